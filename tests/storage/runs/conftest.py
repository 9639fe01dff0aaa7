"""The run that tests of the protocol's verbs start from."""

import pytest

from cairn import Run, parse_uri
from tests.storage.forks import save_parent
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


@pytest.fixture
def parent(root_uri, copies) -> Run:
    """A run to fork from, with arrays."""
    copies.put(save_parent, root_uri / "parent")
    return Run.open(root_uri / "parent")


@pytest.fixture
def on_disk(tmp_path, copies) -> Run:
    """The same on a disk, for what only a disk does."""
    uri = parse_uri(tmp_path / "root/parent")
    copies.put(save_parent, uri)
    return Run.open(uri)
