"""Test frame: eight virtual CPU devices, strict numerics, and the GCS double as a fixture."""

import gc
import itertools
import os
import shutil
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.devices import COMPILED, THREADS, xla_flags
from tests.folders import DISK, in_memory, remove

# A shell's background job is started with Ctrl-C ignored, and its children inherit that; tests send
# SIGINT to the programs they start, which must find it as a terminal leaves it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything asks where temporary files lie. The workers and programs of a run share the place.
os.environ.update(in_memory())

# Before anything imports JAX: every test sees the same eight devices and the CPU backend.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = xla_flags(8)
os.environ["PJRT_NPROC"] = THREADS
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# torch's threads wait for each other by spinning: beside other workers' tests a layer of a tiny
# model took 3 ms of CPU, and generation by transformers more than half of its test.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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

from tests.faults.report import trials
from tests.leases import stop_renewing
from tests.lowering import share_contexts
from tests.made_once import make_once
from tests.programs.program import SHARED

# What is imported and collected stays, and is millions of objects: to look through them meanwhile,
# again and again, took a quarter of a collection. `pytest_collection_finish` has it go on.
gc.disable()

share_contexts()
make_once()

# How long an example takes says nothing of what is tested, on a machine that others use. Each run
# draws others, and keeps those that fail.
hypothesis.settings.register_profile(
    "untimed", deadline=None, max_examples=trials(short=20, long=300)
)
hypothesis.settings.load_profile("untimed")

# Shapes in signatures are checked while the tests run.
_SHAPED = ("attention", "mlp", "norms", "positions")
install_import_hook(
    [
        "cairn.state.models.sampling",
        *(f"cairn.state.models.decoder.{name}" for name in _SHAPED),
    ],
    "beartype.beartype",
)

pytest_plugins = ["tests.gcs.plugin", "tests.s3.plugin", "tests.stores"]

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


LONG = (
    "tests/interop/families/test_llama_cpp.py",
    "tests/service/test_fleet.py",
    "tests/service/fuzzing/",
    "tests/examples/",
    "tests/test_docs.py",
    "tests/packaging/test_public_types.py",
    "tests/test_benchmarks.py",
    "tests/faults/",
    "tests/multi_process/",
    "tests/state/checkpointing/saves/test_file_check.py",
    "tests/service/command/test_serve.py",
    "tests/service/command/test_top_cli.py",
    "tests/service/dashboard/test_journeys.py",
    "tests/service/test_convert_checked.py",
    "tests/service/test_convert_trainers.py",
    "tests/service/test_export_memory.py",
    "tests/service/test_export_resumed.py",
    "tests/service/test_search_queries.py",
    "tests/state/adapters/",
    "tests/interop/families/test_gguf",
    "tests/state/hub/test_hub.py",
    "tests/state/models/",
    "tests/storage/orbax_import/test_adopt.py",
    "tests/state/checkpointing/saves/test_dedup.py",
    "tests/state/checkpointing/test_checkpointer.py",
    "tests/test_main_job.py",
)
"""Files that take long: the tests of a file are one worker's."""


ON_DISK = (
    "tests/faults/test_forks.py",
    "tests/faults/test_kill.py",
    "tests/storage/arrays/test_data_file_writers.py",
    "tests/storage/store_checks/test_disk.py",
    "tests/storage/store/disk/",
    "tests/storage/store/test_files.py",
    "tests/state/checkpointing/test_checkpointer.py",
    "tests/test_main_job.py",
)
"""Files whose tests find a disk below `tmp_path`: past its page cache memory goes differently."""


HERE = Path(__file__).parent

# A file that was renamed would otherwise lose its place without a word.
GONE = [name for name in (*LONG, *ON_DISK) if not any(HERE.parent.glob(f"{name}*"))]
if GONE:
    raise pytest.UsageError(f"LONG and ON_DISK: no such files: {', '.join(GONE)}")

PROOFS = (
    "tests/deploy/test_image.py",
    "tests/documentation/test_long_pages.py",
    "tests/documentation/test_notebook_cells.py",
    "tests/documentation/test_serving.py",
    "tests/examples/test_long_examples.py",
    "tests/packaging/test_mypy_types.py",
    "tests/service/dashboard/test_clicks_of_all_tasks.py",
    "tests/service/dashboard/test_every_page_whole.py",
    "tests/service/dashboard/test_on_postgresql.py",
    "tests/service/test_convert_checked_afresh.py",
    "tests/interop/families/test_adapters_in_peft.py",
    "tests/interop/families/test_llama_cpp.py",
    "tests/interop/trainers/test_every_map.py",
    "tests/state/checkpointing/test_oldest_orbax.py",
    "tests/state/models/test_generation_whole_model.py",
    "tests/test_all_contenders.py",
)
"""Files that `make proofs` names: long, and `make test` has a part of each in a file beside it.

They are collected only where they are named.
"""

ATTACKS = ("tests/service/fuzzing/test_forged_stores.py",)
"""Files that `make fuzz` names: what they try one of at a time, others prove by kind."""

collect_ignore = [str(HERE.parent / name) for name in (*PROOFS, *ATTACKS)]


def pytest_configure(config):
    """Workers share what programs are forked from, which imports for 6 s of CPU.

    Each worker begins its collection elsewhere: the first to come rewrites a file's assertions.

    Side by side in one order, each of them would rewrite all files, which takes 11 s of CPU.
    """
    config.add_cleanup(remove)
    named = {Path(argument.partition("::")[0]).absolute() for argument in config.args}
    for left_out in map(Path, collect_ignore):
        # pytest takes a file within a folder that is named too for a part of that folder.
        if left_out in named and named & {*left_out.parents}:
            raise pytest.UsageError(f"{left_out} is left out where its folder is named: name files")
    if getattr(config.option, "numprocesses", None) and SHARED not in os.environ:
        folder = TemporaryDirectory(prefix="tests-")
        config.add_cleanup(folder.cleanup)
        os.environ[SHARED] = folder.name
    number = getattr(config, "workerinput", {}).get("workerid", "gw0").removeprefix("gw")
    if number == "0" or [Path(argument).absolute() for argument in config.args] != [HERE]:
        return
    folders = sorted(path for path in HERE.iterdir() if any(path.rglob("test_*.py")))
    files = sorted(
        path
        for path in HERE.iterdir()
        if path.match("test_*.py") and str(path) not in collect_ignore
    )
    sizes = [sum(file.stat().st_size for file in path.rglob("*.py")) for path in folders]
    before = list(itertools.accumulate(sizes, initial=0))
    share = before[-1] * int(number) / config.workerinput["workercount"]
    first = min(range(len(folders)), key=lambda n: abs(before[n] - share))
    config.args = [str(path) for path in [*folders[first:], *files, *folders[:first]]]


def pytest_collection_modifyitems(items):
    """Long files first: what begins last is short, and the workers end together."""

    def place(item):
        return not item.nodeid.startswith(LONG), item.path.relative_to(HERE).parts[0]

    items.sort(key=place)


def pytest_collection_finish():
    """What was imported and collected stays: the garbage collector need not look through it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Leases that a file's tests have left are renewed no more.

    What a file has left is looked through once: the whole is too much for each collection.

    Memory is given back: a test's folder, once whatever the test has patched is as it was.
    """
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    done = yield
    if folder is not None and DISK in os.environ:
        shutil.rmtree(folder, ignore_errors=True)
    if nextitem is None or nextitem.path != item.path:
        stop_renewing()
        gc.collect()
        gc.freeze()
    return done


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """What is sent of a test that passed has no keywords, which nobody reads."""
    report = yield
    if report.passed:
        report.keywords = {}
    return report


@pytest.fixture(scope="session", autouse=True)
def _eight_devices():
    if jax.device_count() != 8:
        pytest.fail(f"the tests need 8 virtual CPU devices, found {jax.device_count()}")


@pytest.fixture
def tmp_path(request, tmp_path):
    """A folder of the test's own."""
    if DISK in os.environ and request.node.nodeid.startswith(ON_DISK):
        folder = TemporaryDirectory("", "cairn-disk-", os.environ[DISK], ignore_cleanup_errors=True)
        with folder as path:
            yield Path(path)
    else:
        yield tmp_path


@pytest.fixture(autouse=True)
def _writer_id_of_its_own(monkeypatch):
    """The writer id of the shell, or of another test, is no test's."""
    monkeypatch.delenv("CAIRN_WRITER_ID", raising=False)
