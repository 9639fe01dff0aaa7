"""What NFS, Lustre and mounted buckets may break is found, and told by name."""

import errno
import fcntl
import os
import shutil

import pytest

from cairn import Checkpointer, ObjectStore, Run, StoreCheckError, StoreFullError
from cairn.storage.runs.lease import read_lease
from cairn.storage.store_checks import mounts
from cairn.storage.store_checks.disk import disk_problems
from tests.storage.records import RECORD_FILE, begin_attempt
from tests.storage.states import floats

DISK = mounts.Mount("/", "ext4", "/dev/vda", frozenset({"rw"}))
BUCKET = mounts.Mount("/mnt", "fuse", "weights", frozenset({"rw"}))

pytestmark = pytest.mark.usefixtures("new_process")


@pytest.fixture
def mounted(tmp_path, monkeypatch):
    """Has the kernel say that a folder is mounted so."""

    def mount(kind, source, options="rw", point=tmp_path):
        table = tmp_path / "mountinfo"
        table.write_text(
            "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard\n"
            f"90 27 0:50 / {point} rw,noatime shared:7 master:1 - {kind} {source} {options}\n"
        )
        monkeypatch.setattr(mounts, "_MOUNTS", str(table))

    return mount


def begin(tmp_path):
    return begin_attempt(Run.create(tmp_path / "run").objects, writer="job", base_step=-1)


def failing(monkeypatch, module, name, number):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, name, refuse)


def test_a_disk_of_this_machine_is_sound(tmp_path):
    assert disk_problems(str(tmp_path), mounts.mount_of(str(tmp_path))) == []


def test_gcsfuse_is_refused_by_name_and_the_bucket_given_in_its_place(tmp_path, mounted):
    mounted("fuse.gcsfuse", "weights", "rw,user_id=0")
    with (
        Checkpointer(tmp_path / "root/run") as checkpointer,
        pytest.raises(StoreCheckError, match=r"(?s)gcsfuse.*gs://weights/"),
    ):
        checkpointer.save(1, {"model": {"w": floats(2)}}, meta={})
    assert not (tmp_path / "root" / RECORD_FILE).exists()
    assert not (tmp_path / "root/run/attempts").exists()


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("nfs", "local_lock=all"),
        ("nfs", "local_lock=posix"),
        ("lustre", "localflock"),
        ("cifs", "nobrl"),
    ],
)
def test_locks_that_other_hosts_do_not_see_are_refused_by_the_mount_s_option(
    tmp_path, mounted, kind, option
):
    mounted(kind, "server:/export", f"rw,vers=3,{option}")
    with pytest.raises(StoreCheckError) as caught:
        begin(tmp_path)
    assert option in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert read_lease(ObjectStore.open(tmp_path / "run")).released


@pytest.mark.parametrize(
    ("kind", "options"),
    [("nfs4", "rw,vers=4.2,local_lock=none"), ("lustre", "rw,flock"), ("nfs", "local_lock=flock")],
)
def test_network_file_systems_with_locks_for_all_hosts_are_taken(tmp_path, mounted, kind, options):
    mounted(kind, "server:/export", options)
    assert begin(tmp_path).number == 1
    record = (tmp_path / RECORD_FILE).read_text()
    assert f'"kind":"{kind}"' in record
    assert '"source":"server:/export"' in record


def test_a_root_that_was_copied_to_another_disk_is_asked_anew(tmp_path, mounted, new_process):
    begin(tmp_path)
    mounted("lustre", "mgs:/fs", "rw,flock")
    new_process()
    begin(tmp_path)
    assert '"source":"mgs:/fs"' in (tmp_path / RECORD_FILE).read_text()


def test_the_mount_is_the_innermost_and_the_last_at_its_point(tmp_path, mounted):
    folder = tmp_path / "with blank"
    mounted("tmpfs", "none", point=str(folder).replace(" ", "\\040"))
    for path in (folder / "x", folder):
        assert mounts.mount_of(str(path)).kind == "tmpfs"
    assert mounts.mount_of(f"{folder}-beside").kind == "ext4"
    with open(mounts._MOUNTS, "a") as table:
        table.write(f"91 27 0:51 / {str(folder)[:-11]} rw - xfs /dev/sda rw\nbroken\n")
        table.write("92 27 0:52 / / rw - overlay overlay rw\n")
    assert mounts.mount_of("/elsewhere").kind == "overlay"
    assert mounts.mount_of(str(folder)).kind == "tmpfs"


def test_where_the_kernel_tells_no_mounts_the_disk_is_tried_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "_MOUNTS", str(tmp_path / "absent"))
    assert begin(tmp_path).number == 1
    assert '"store":{"scheme":"file"}' in (tmp_path / RECORD_FILE).read_text()


def test_a_bucket_that_is_mounted_by_any_name_has_no_hard_links(tmp_path, monkeypatch):
    failing(monkeypatch, os, "link", errno.ENOSYS)
    (problem,) = disk_problems(str(tmp_path), BUCKET)
    assert "gs://BUCKET" in problem
    assert disk_problems(str(fresh(tmp_path)), DISK) == []  # files are copied then


def fresh(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    return folder


def copied(source, target):
    shutil.copyfile(source, target)


def linked_over(source, target, link=os.link):
    if os.path.exists(target):
        os.unlink(target)
    link(source, target)


def written_through(source, target):
    """As a store does that copies by name, whenever it is read."""
    if os.path.exists(target):
        raise FileExistsError(17, "exists", target)
    os.symlink(source, target)


@pytest.mark.parametrize(
    ("module", "name", "broken", "problem"),
    [
        (os, "replace", copied, "its old name gone"),
        (os, "replace", lambda source, target: os.unlink(source), "the new bytes there"),
        (os, "link", linked_over, "a hard link to a name that exists"),
        (os, "link", written_through, "a hard link whose other name was replaced"),
        (fcntl, "fcntl", lambda *args: 0, "locking a file that is locked"),
    ],
)
def test_what_a_file_system_does_and_must_not_is_told(
    tmp_path, monkeypatch, module, name, broken, problem
):
    monkeypatch.setattr(module, name, broken)
    assert any(problem in found for found in disk_problems(str(tmp_path), DISK))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_sound(tmp_path, monkeypatch, number):
    failing(monkeypatch, fcntl, "fcntl", number)
    (problem,) = disk_problems(str(tmp_path), DISK)
    assert os.strerror(number) in problem
    assert "mount it with locks" in problem


def test_a_kernel_without_locks_of_open_files_is_asked_for_the_other_kind(tmp_path, monkeypatch):
    failing(monkeypatch, fcntl, "fcntl", errno.EINVAL)
    assert disk_problems(str(tmp_path), DISK) == []
    monkeypatch.setattr(fcntl, "flock", lambda *args: None)
    assert "locking a file that is locked" in disk_problems(str(fresh(tmp_path)), DISK)[0]


def test_creation_that_overwrites_is_not_sound(tmp_path, monkeypatch):
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *mode: opened(path, flags & ~os.O_EXCL))
    assert "creating a file that exists" in disk_problems(str(tmp_path), DISK)[0]


def test_a_full_disk_is_full_and_not_unsound(tmp_path, monkeypatch):
    failing(monkeypatch, os, "replace", errno.ENOSPC)
    with pytest.raises(StoreFullError):
        begin(tmp_path)


def test_a_root_that_can_not_be_written_has_the_run_remember(tmp_path, monkeypatch):
    mkdir = os.mkdir

    def refuse(path, *mode):
        if os.fspath(path).startswith(str(tmp_path / ".cairn-probe")):
            raise PermissionError(13, "Permission denied", path)
        mkdir(path, *mode)

    monkeypatch.setattr(os, "mkdir", refuse)
    (tmp_path / "run").mkdir()
    assert begin(tmp_path).number == 1
    assert not (tmp_path / RECORD_FILE).exists()
    assert (tmp_path / "run" / RECORD_FILE).exists()
