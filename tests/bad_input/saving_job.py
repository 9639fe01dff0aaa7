"""A training job whose disk runs full during its second save; a test starts it and reads it.

    python -m tests.bad_input.saving_job FOLDER limit|disk

It fills the disk of FOLDER (or lowers its own file size limit), saves, tells what came of it as
JSON, makes room again, and saves again.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import jax

from cairn import EasyDeLState, Run, StoreFullError
from tests.bad_input.conftest import assert_loads_bit_equal, digests
from tests.tiny import leaves_of, make_state

LEFT_BYTES = 100_000
"""Less than a step takes, more than its small files take."""


def limit_files(_: Path) -> Callable[[], None]:
    """Every write beyond LEFT_BYTES of a file fails with EFBIG, as over a quota."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LEFT_BYTES, old[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, old)


def fill_disk(folder: Path) -> Callable[[], None]:
    """Every write beyond LEFT_BYTES in all fails with ENOSPC."""
    ballast = folder / "ballast"
    free = os.statvfs(folder)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - LEFT_BYTES)
    return ballast.unlink


def failure(save: Callable[[], object]) -> StoreFullError:
    try:
        save()
    except StoreFullError as error:
        return error
    raise AssertionError("the save did not fail")


def main(folder: Path, means: str) -> None:
    uri = folder / "run"
    state: EasyDeLState = make_state()
    leaves = leaves_of(state)
    state.save_state(uri, step=1, verbose=False, wait=True)
    before = digests(uri / "attempts/1/1")
    # What stays as it is would be linked, which takes no room.
    changed = state.replace(graphstate=jax.tree.map(lambda leaf: leaf * 2, state.graphstate))
    make_room = {"limit": limit_files, "disk": fill_disk}[means](folder)
    handle = changed.save_state(uri, step=2, verbose=False)  # the failure comes later
    error = failure(handle.wait)
    again = failure(lambda: changed.save_state(uri, step=2, verbose=False, wait=True))
    found = Run.open(uri)
    report = {
        "error": str(error),
        "errno": error.errno,
        "again": str(again),
        "states": [(info.step, info.state.value) for info in found.all_states()],
        "folders": sorted(str(path.relative_to(uri)) for path in (uri / "attempts").glob("*/*")),
        "kept": digests(uri / "attempts/1/1") == before,
    }
    assert_loads_bit_equal(str(uri), leaves)
    make_room()
    changed.save_state(uri, step=2, verbose=False, wait=True)
    assert_loads_bit_equal(f"{uri}/steps/2", leaves_of(changed))
    assert_loads_bit_equal(f"{uri}/steps/1", leaves)
    report["after"] = [info.step for info in found.steps()]
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
