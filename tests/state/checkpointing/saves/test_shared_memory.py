"""Arrays of CPU devices that lie in memory of NumPy's, to which its owner writes all the time."""

import jax
import numpy as np
import pytest

from cairn import Checkpointer, Run, load, verify_step
from cairn.storage.arrays.box_buffers import aligned_empty
from tests.state.seams import data_files


def ours_and_theirs(shape, dtype):
    """Memory of NumPy's, and an array of JAX in it."""
    (memory,) = aligned_empty([shape], np.dtype(dtype))
    memory[...] = 1
    array = jax.device_put(memory)
    assert array.unsafe_buffer_pointer() == memory.ctypes.data
    return memory, array


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("item", ["model", "other"])  # in strips of columns, of rows
def test_what_is_durable_is_whole_although_it_changed_while_it_was_written(
    some_root_uri, monkeypatch, compression, item
):
    memory, array = ours_and_theirs((512, 4096), np.float32)
    uri = f"{some_root_uri}/run"
    changes = 0

    def changed(call):
        def and_again(*arguments):
            nonlocal changes
            changes += 1
            memory[...] = changes
            return call(*arguments)

        return and_again

    with Checkpointer(uri) as checkpointer:
        for name in ("crc_bytes", "fingerprint", "box_digest"):
            monkeypatch.setattr(data_files, name, changed(getattr(data_files, name)))
        checkpointer.save(1, {item: {"w": array}}, compression=compression).wait()
        monkeypatch.undo()
        assert changes
    assert verify_step(Run.open(uri), 1).ok
    load(uri, {item: {"w": array}})


def test_what_changed_in_the_very_array_of_the_last_step_is_written(tmp_path):
    memory, array = ours_and_theirs((64, 4096), np.float32)
    frozen = jax.device_put(np.arange(1 << 18, dtype=np.float32))
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2, 3):
            memory[...] = min(step, 2)
            checkpointer.save(step, {"ours": {"w": array}, "frozen": {"w": frozen}}).wait()
    run = Run.open(tmp_path / "run")
    for step in (1, 2, 3):
        found = load(run.uri, {"ours": {"w": array}}, step=step)["ours"]["w"]
        assert np.all(np.asarray(found) == min(step, 2))
    assert run.contents(run.step(2)).shared_files  # of what did not change
