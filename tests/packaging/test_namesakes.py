"""A job may have files beside it that are called what Cairn's folders are called."""

import os
import socket
import subprocess
import sys

from tests.packaging.conftest import ROOT

JOB = """\
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import service
import storage
from cairn import Client, DecoderConfig, DecoderForCausalLM, EasyDeLState

assert storage.OURS and service.OURS
config = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)
model = DecoderForCausalLM(config, rngs=nnx.Rngs(0))
state = EasyDeLState.create(model=model, tx=optax.adamw(1e-3), init_opt_state=True)
ids = jnp.arange(16).reshape(2, 8)


@jax.jit
def step(state):
    def loss(weights):
        return state.merge(weights)(input_ids=ids, labels=ids).loss

    return state.apply_gradients(grads=jax.grad(loss)(state.graphstate))


state = step(state)
state.save_state("runs/job", step=1).wait()
again = EasyDeLState.load_state("runs/job", tx=optax.adamw(1e-3))
same = jax.tree.map(lambda ours, theirs: bool((ours == theirs).all()), state.params, again.params)
assert all(jax.tree.leaves(same)) and int(again.step) == 1
assert "state" not in sys.modules
port = sys.argv[1]
command = [sys.executable, "-m", "cairn", "serve", "--root", "runs", "--port", port]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    try:
        assert any(line.startswith("cairn: http://") for line in server.stdout)
        with Client(f"http://127.0.0.1:{port}") as client:
            print(*[(run.name, run.latest_step) for run in client.runs()])
    finally:
        server.terminate()
"""


def test_a_job_beside_namesakes_trains_saves_loads_and_is_served(tmp_path):
    (tmp_path / "state.py").write_text(
        "raise RuntimeError('the state.py of the job was imported')\n"
    )
    (tmp_path / "storage.py").write_text("OURS = True\n")
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__init__.py").write_text("OURS = True\n")
    (tmp_path / "job.py").write_text(JOB)
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("CAIRN_")},
        "PYTHONPATH": str(ROOT),  # after the script's own folder, as an installed package is
        "CAIRN_DATA_DIR": str(tmp_path / "databases"),
    }

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "job.py", port],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (0, "('job', 1)\n"), done.stderr
