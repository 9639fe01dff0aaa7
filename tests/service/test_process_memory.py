"""Threads of a process that executes jobs share one arena of the allocator."""

import subprocess
import sys

import pytest

COUNT = """
import ctypes, sys, tempfile, threading
from cairn.service.jobs.process_memory import keep_one_arena

if sys.argv[1] == "one":
    assert keep_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
met = threading.Barrier(4)

def allocate():
    libc.malloc(5000)
    met.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
with tempfile.TemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fdopen(file.fileno(), b"w"))
    assert libc.malloc_info(0, stream) == 0
    libc.fflush(stream)
    file.seek(0)
    print(file.read().count(b"<heap nr="))
"""


@pytest.mark.parametrize(("kept", "expected"), [("one", {1}), ("all", {2, 3, 4, 5})])
def test_threads_allocate_from_one_arena_where_that_is_asked(kept: str, expected: set[int]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT, kept], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) in expected
