"""One store with a good run and everything around it that users mistake for one."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cairn import Checkpointer, EasyDeLState, Run
from tests.contract.subjects import make_state
from tests.service.planes import running_plane
from tests.service.stores import begin_saving
from tests.tiny import TinyRun, leaves_of, make_run

SAME_MESH = {"sharding_axis_dims": (2, 4, 1, 1), "auto_shard_model": True, "verbose": False}


@dataclass(frozen=True)
class Store:
    """A store root on this disk.

    Attributes:
        root: its folder. Runs: `tiny` (steps 1 and 2), `busy` (as tiny, step 7 is being saved by
            someone else). No runs: `plain` (a text file in it), `empty`, `file`, and `link`, a
            symbolic link to a whole run outside of the root.
        outside: the folder that `link` leads to.
        tiny: what `tiny` holds.
    """

    root: Path
    outside: Path
    tiny: TinyRun


@pytest.fixture(scope="package")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    base = tmp_path_factory.mktemp("bad-input").resolve()
    root, outside = base / "store", base / "outside"
    root.mkdir()
    tiny = make_run(str(root))
    Checkpointer.for_run(tiny.uri).close()
    shutil.copytree(root / "tiny", outside)
    (root / "link").symlink_to(outside)
    shutil.copytree(root / "tiny", root / "busy")
    begin_saving(Run.open(root / "busy"), 7)
    (root / "plain").mkdir()
    (root / "plain" / "notes.txt").write_text("no checkpoint")
    (root / "empty").mkdir()
    (root / "file").write_text("no folder")
    return Store(root, outside, tiny)


@pytest.fixture(scope="package")
def plane(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a control plane over the store, a process of its own."""
    folder = tmp_path_factory.mktemp("plane")
    with running_plane(store.root, folder) as (url, _):
        yield url


@pytest.fixture(scope="module")
def untouched(store: Store) -> Iterator[None]:
    """Fails unless every file in and around the store is as it was before the file's tests."""
    before = digests(store.root.parent)
    yield
    assert digests(store.root.parent) == before


@pytest.fixture(scope="package", autouse=True)
def _good_run_still_loads(store: Store) -> Iterator[None]:
    yield
    assert_loads_bit_equal(store.tiny.uri, store.tiny.leaves)


def digests(folder: Path) -> dict[str, str]:
    """Every file below a folder and the hash of its content; links and folders by name."""
    found = {}
    for path in folder.rglob("*"):
        plain = path.is_file() and not path.is_symlink()
        data = path.read_bytes() if plain else b""
        found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest() if plain else ""
    return found


def assert_loads_bit_equal(reference: str, leaves: dict[str, dict[str, np.ndarray]]) -> None:
    """The checkpoint loads, and every leaf of it has the bits that were saved."""
    found = leaves_of(EasyDeLState.load_state(reference, **SAME_MESH))
    for item, expected in leaves.items():
        assert found[item].keys() == expected.keys()
        for path, leaf in expected.items():
            assert found[item][path].dtype == leaf.dtype, path
            assert found[item][path].tobytes() == leaf.tobytes(), path


def says(text: str, path: str, expected: str, found: str, next_step: str) -> None:
    """One message names the path, what was expected, what was found, and what to do next."""
    assert path in text
    for part in (f"expected {expected}", f"found {found}", next_step):
        assert part in text, text
    assert text.index(f"expected {expected}") < text.index(f"found {found}") < text.index(next_step)


def raised(kind: type[Exception], call: Callable[[], object]) -> Exception:
    """The error of exactly this kind that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return caught.value


@pytest.fixture(scope="module")
def state() -> EasyDeLState:
    """A sharded state of a user's own model, at step 0."""
    return make_state()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, state: EasyDeLState) -> Path:
    """A run with step 0 of the state."""
    run = tmp_path_factory.mktemp("bad-state") / "run"
    state.save_state(run, wait=True, verbose=False)
    Checkpointer.for_run(run).close()
    return run
