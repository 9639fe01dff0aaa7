"""What Cairn saves is read by plain Orbax of the oldest release that it supports: `make proofs`.

`make test` reads by the present one. The oldest is installed by itself, without Cairn, into a
folder under `.cache` that stays.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cairn
from tests.devices import xla_flags
from tests.packaging.conftest import ROOT
from tests.state.checkpointing.orbax_reader import leaves
from tests.storage.states import put, state

READER = Path(__file__).with_name("orbax_reader.py")
CONSTRAINTS = ROOT / "constraints-oldest.txt"
PACKAGES = ("orbax-checkpoint", "jax", "jaxlib", "tensorstore", "numpy")

MODEL = {
    **state()["model"],
    "half": put(np.arange(64, dtype=ml_dtypes.bfloat16).reshape(8, 8), "dp", "fsdp"),
    "eighth": jnp.arange(16).astype(jnp.float8_e4m3fn),
    "flags": np.array([True, False]),
    "keys": jax.random.split(jax.random.key(3), 4),
    "list": [jnp.ones(3), np.arange(5, dtype=np.int8)],
    "a/b": np.arange(6.0).reshape(2, 3),
    "number": 7,
}
OTHER = {"count": jnp.int32(3), "moments": {"w": put(np.ones((8, 4), np.float32), "dp")}}


def declared() -> str:
    """The oldest release of Orbax that pyproject.toml allows."""
    (oldest,) = re.findall(r'"orbax-checkpoint>=([0-9.]+)', (ROOT / "pyproject.toml").read_text())
    return oldest


@pytest.fixture(scope="module")
def oldest() -> Path:
    """The interpreter of an environment with that release, and the oldest JAX."""
    folder = ROOT / ".cache" / "orbax-oldest"
    content = hashlib.sha256(CONSTRAINTS.read_bytes() + sys.version.encode()).hexdigest()
    python, stamp = folder / "bin" / "python", folder / "installed"
    if stamp.is_file() and stamp.read_text() == content:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    install = [python, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, *PACKAGES]
    subprocess.run(install, check=True, timeout=600)
    stamp.write_text(content)
    return python


def read(python: Path | str, folder: Path, *items: str) -> dict:
    done = subprocess.run(
        [python, "-W", "ignore", READER, folder, *items],
        env={
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", ""),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": xla_flags(8),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def stored(tree):
    """The leaves as a step has them: lists as dicts, keys as their words, numbers as arrays."""
    plain = jax.tree_util.tree_leaves_with_path(tree)
    names = [
        "/".join(str(getattr(key, "key", getattr(key, "idx", ""))) for key in keys)
        for keys, _ in plain
    ]
    traits = [leaves({"leaf": leaf})["leaf"] for _, leaf in plain]
    return dict(zip(names, traits, strict=True))


def by_checkpointer(run: Path) -> None:
    with cairn.Checkpointer(run) as checkpointer:
        checkpointer.save(1, {"model": MODEL, "other": OTHER}, meta={"note": "a", "n": [1, None]})


def by_manager(run: Path) -> None:
    items = {"model": ocp.args.StandardSave(MODEL), "other": ocp.args.PyTreeSave(OTHER)}
    with cairn.CheckpointManager(run) as manager:
        manager.save(1, args=ocp.args.Composite(**items), custom_metadata={"note": "a"})


@pytest.mark.parametrize("save", [by_checkpointer, by_manager])
def test_the_oldest_and_the_present_orbax_read_what_was_saved(oldest, save, tmp_path):
    save(tmp_path / "run")
    folder = tmp_path / "run" / "attempts" / "1" / "1"
    present = read(sys.executable, folder, "model", "other")
    old = read(oldest, folder, "model", "other")
    assert (old.pop("release"), present.pop("release")) == (declared(), ocp.__version__)
    assert old == present
    for way in ("handler", "manager", "v1"):
        assert old[way] == {"model": stored(MODEL), "other": stored(OTHER)}, way
    words = {**MODEL, "keys": jax.random.key_data(MODEL["keys"])}
    bits = {path: traits[:3] for path, traits in stored(words).items()}
    assert {path: traits[:3] for path, traits in old["host"].items()} == bits
    note = (
        old["meta"]
        if save is by_checkpointer
        else old["meta"]["checkpoint_manager"]["custom_metadata"]
    )
    assert note["note"] == "a"


def test_the_oldest_release_is_the_one_that_the_range_begins_with():
    pins = dict(re.findall(r"^([a-z-]+)==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE))
    assert pins["orbax-checkpoint"] == declared()
