"""Saves of CPU devices that take the way of an accelerator's, and writes that wait."""

import threading

import pytest

from tests.state.seams import host_arrays, host_trees, pinned_warmup, preparation, tree_writer
from tests.stores import give_in_turn


@pytest.fixture
def elsewhere(monkeypatch):
    """The devices' memory is not the host's."""
    for module in (host_arrays, host_trees, preparation):
        monkeypatch.setattr(module, "on_host", lambda: False)


def pytest_generate_tests(metafunc):
    give_in_turn(metafunc, "accelerator", ("transfers", "pinned"))


@pytest.fixture
def accelerator(request, monkeypatch, elsewhere):
    """The devices' memory is not the host's; on a GPU copies go to pinned memory."""
    for module in (host_arrays, host_trees):
        monkeypatch.setattr(module, "on_gpu", lambda: request.param == "pinned")


@pytest.fixture
def pinned(monkeypatch, elsewhere):
    """The devices are those of a GPU."""
    for module in (host_arrays, host_trees, pinned_warmup):
        monkeypatch.setattr(module, "on_gpu", lambda: True)


@pytest.fixture
def writes(monkeypatch):
    """Nothing is written until `set` is called; `reached` tells that something is to be."""
    allowed = threading.Event()
    allowed.reached = threading.Event()
    write = tree_writer.write_data_files

    def waiting(sink, shards):
        allowed.reached.set()
        assert allowed.wait(60)
        return write(sink, shards)

    monkeypatch.setattr(tree_writer, "write_data_files", waiting)
    yield allowed
    allowed.set()
