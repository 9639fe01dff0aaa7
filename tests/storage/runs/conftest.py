"""The run that tests of the protocol's verbs start from."""

import pytest

from cairn.storage.runs.run import Run
from tests.storage.stored_runs import SetClock, begin, end, save


@pytest.fixture
def clock():
    return SetClock()


@pytest.fixture
def run(tmp_path, clock):
    """Steps 3, 6 and 9 of one attempt, whose writer has ended."""
    made = Run.create(tmp_path / "run", clock=clock)
    attempt = begin(made, -1)
    for step in (3, 6, 9):
        save(made, step, attempt)
    end(made)
    return made
