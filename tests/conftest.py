"""Test frame: eight virtual CPU devices, strict numerics, and the GCS double as a fixture."""

import gc
import os
import signal

from tests.devices import COMPILED, THREADS, xla_flags

# A shell's background job is started with Ctrl-C ignored, and its children inherit that; tests send
# SIGINT to the programs they start, which must find it as a terminal leaves it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports JAX: every test sees the same eight devices and the CPU backend.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = xla_flags(8)
os.environ["PJRT_NPROC"] = THREADS
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# What one test, or a process that it starts, has had compiled, the others read: most of the suite's
# time was XLA's. An entry that is read while it is written is compiled anew (see `pyproject.toml`).
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Where in the source each operation came from makes programs no other, and takes time to say.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

from tests.lowering import share_contexts

share_contexts()

# How long an example takes says nothing of what is tested, on a machine that others use.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Shapes in signatures are checked while the tests run.
_SHAPED = ("attention", "mlp", "norms", "positions")
install_import_hook(
    ["cairn.state.module.sampling", *(f"cairn.state.decoder.{name}" for name in _SHAPED)],
    "beartype.beartype",
)

pytest_plugins = ["tests.gcs.plugin"]

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


LONG = (
    "tests/examples/",
    "tests/test_docs.py",
    "tests/documentation/test_notebook.py",
    "tests/deploy/test_image.py",
    "tests/packaging/test_public_types.py",
    "tests/state/module/test_generation_real_weights.py",
    "tests/test_benchmarks.py",
    "tests/faults/",
    "tests/multi_process/",
    "tests/storage/training/saving/test_arrival.py",
    "tests/storage/runs/test_protocol.py",
    "tests/service/fuzzing/",
)
"""Files whose few tests take long."""


def pytest_collection_modifyitems(items):
    """Long files first: what begins last is short, and the workers end together."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish():
    """What was imported and collected stays: the garbage collector need not look through it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """What a file has left is looked through once: the whole is too much for each collection."""
    done = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return done


@pytest.fixture(scope="session", autouse=True)
def _eight_devices():
    if jax.device_count() != 8:
        pytest.fail(f"the tests need 8 virtual CPU devices, found {jax.device_count()}")


@pytest.fixture(autouse=True)
def _private_home(tmp_path_factory, monkeypatch):
    """Writer ids, data folders and caches of one test never leak into another."""
    monkeypatch.delenv("CAIRN_WRITER_ID", raising=False)
