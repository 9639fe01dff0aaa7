"""(e) A full disk: saves on a small file system that is filled to another level before each.

Levels are drawn from nothing to what a save takes, in bytes and in inodes, so that every kind of
file is once the one that does not fit. Where mounting is forbidden, a limit on the size of files
stands in for the disk.
"""

from tests.bad_input.disks import can_mount
from tests.faults import report
from tests.faults.forked import drive

FAULT = "e full disk"
DISK = "8m,nr_inodes=1000"


def test_a_save_on_a_full_disk_fails_and_the_next_one_needs_no_more_than_room(tmp_path):
    trials = report.trials(short=8, long=100)
    mounts = can_mount()
    arguments = {
        "folder": str(tmp_path),
        "means": ["bytes", "inodes"] if mounts else ["limit"],
        "trials": trials,
        "seed": report.seed(),
    }
    mounting = ["tests.bad_input.disks", str(tmp_path), DISK] if mounts else []
    seconds = report.trials(short=200, long=1800)
    found = drive("full_disk_job", arguments, environment={}, seconds=seconds, through=mounting)
    broken = len(found["lost"])
    report.record(
        fault=FAULT,
        store="file",
        trials=trials,
        survived=trials - broken,
        lost=broken,
        note=f"{found['full']} saves failed for lack of {' or '.join(arguments['means'])}, "
        f"{found['fitted']} just fitted; could not write {found['hit']}",
    )
    assert found["lost"] == []
    assert found["full"] >= trials // 2, "the disk was hardly ever full: nothing was tried"
