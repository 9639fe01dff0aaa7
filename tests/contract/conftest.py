"""One saved run that the tests of loading share."""

import pytest

from cairn import Checkpointer
from tests.contract.subjects import make_state, ones_like


@pytest.fixture(scope="package")
def saved(tmp_path_factory):
    """A run with step 1 of MyModel and AdamW, sharded over dp=2 x fsdp=4, and the state itself."""
    run = tmp_path_factory.mktemp("contract") / "run"
    state = make_state(hyperparameters={"warmup": 10})
    state = state.apply_gradients(grads=ones_like(state.graphstate))
    state.save_state(run, extras={"position": 3}, verbose=False, wait=True)
    Checkpointer.for_run(run).close()
    return run, state
