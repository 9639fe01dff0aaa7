"""Nothing that lies in a confined folder leads out of it, whatever is asked."""

import contextlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from cairn import (
    InvalidURIError,
    ObjectStore,
    PreconditionFailedError,
    StorageError,
    open_files,
    parse_uri,
    safe_join,
)
from cairn.storage.errors import ConfinementError, SourceRefusedError
from cairn.storage.store.disk.confinement import (
    check_below,
    check_tree,
    open_below,
    source_folder,
    with_confinement,
)

SECRET = b"secret"


@pytest.mark.parametrize(
    "segment", ["..", ".", "", "a/b", "-x", ".hidden", "a b", "ä", "a" * 129, "a\n", "a%20", "~"]
)
def test_confine_takes_plain_names_only(tmp_path, segment):
    with pytest.raises(InvalidURIError, match="invalid name"):
        safe_join(parse_uri(tmp_path), segment)


def test_confine_gives_the_child(tmp_path):
    assert safe_join(parse_uri(tmp_path), "run-1", "x.y").local_path == str(tmp_path / "run-1/x.y")
    assert str(safe_join(parse_uri("gs://my-bucket/r"), "run")) == "gs://my-bucket/r/run"


def test_confine_refuses_a_symlink_out_of_the_root(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "inside").mkdir()
    (root / "out").symlink_to(outside)
    (root / "in").symlink_to(root / "inside")
    (root / "up").symlink_to("..")
    with pytest.raises(ConfinementError, match="leads out of its root"):
        safe_join(parse_uri(root), "out")
    with pytest.raises(ConfinementError, match="leads out of its root"):
        safe_join(parse_uri(root), "up", "outside")
    assert safe_join(parse_uri(root), "in").name == "in"


def test_a_root_that_is_itself_a_symlink_is_fine(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert safe_join(parse_uri(tmp_path / "link"), "run").name == "run"


def test_confine_is_not_fooled_by_a_sibling_with_the_same_start(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root-2").mkdir()
    (tmp_path / "root" / "x").symlink_to(tmp_path / "root-2")
    with pytest.raises(ConfinementError, match="leads out of its root"):
        safe_join(parse_uri(tmp_path / "root"), "x")


@pytest.fixture
def outside(tmp_path):
    """A folder beside the root, with what nobody is to see or change."""
    folder = tmp_path / "outside"
    (folder / "below").mkdir(parents=True)
    (folder / "file").write_bytes(SECRET)
    (folder / "below/file").write_bytes(SECRET)
    return folder


@pytest.fixture
def run(tmp_path, outside):
    """A run whose owner has put links to that folder everywhere."""
    folder = tmp_path / "root" / "run"
    (folder / "kept").mkdir(parents=True)
    (folder / "kept/own").write_bytes(b"own")
    (folder / "folder").symlink_to(outside)
    (folder / "kept/folder").symlink_to(outside)
    (folder / "kept/file").symlink_to(outside / "file")
    return safe_join(with_confinement(parse_uri(tmp_path / "root")), "run")


OF_FILES = {
    "stat": lambda files, rel: files.stat(f"{rel}file"),
    "list": lambda files, rel: files.list(f"{rel}below"),
    "walk": lambda files, rel: files.walk(f"{rel}below"),
    "held": lambda files, rel: files.usage(f"{rel}below"),
    "exists": lambda files, rel: files.exists(f"{rel}file"),
    "open_read": lambda files, rel: files.open_read(f"{rel}file").read(),
    "read_range": lambda files, rel: files.read_range(f"{rel}file", 0, 9),
    "read_into": lambda files, rel: files.read_into(f"{rel}file", 0, memoryview(bytearray(9))),
    "open_write": lambda files, rel: files.open_write(f"{rel}file").commit(),
    "new file": lambda files, rel: files.open_write(f"{rel}new").commit(),
    "delete_tree": lambda files, rel: files.delete_tree(f"{rel}below"),
    "copy": lambda files, rel: files.copy(f"{rel}file", open_files(files.uri), f"{rel}copy"),
    "move": lambda files, rel: files.move(f"{rel}file", open_files(files.uri), f"{rel}moved"),
    "sweep": lambda files, rel: files.sweep(f"{rel}below"),
}
OF_OBJECTS = {
    "read": lambda objects, rel: objects.read(f"{rel}file"),
    "read_many": lambda objects, rel: objects.read_many([f"{rel}file"]),
    "write": lambda objects, rel: objects.write(f"{rel}file", b"new"),
    "start_write": lambda objects, rel: objects.start_write(f"{rel}new", b"new")(),
    "write_if": lambda objects, rel: objects.write_if(f"{rel}new", b"new", generation=None),
    "delete": lambda objects, rel: objects.delete(f"{rel}file"),
    "delete_many": lambda objects, rel: objects.delete_many([f"{rel}file"]),
    "delete_if": lambda objects, rel: objects.delete_if(f"{rel}file", generation=b"x"),
    "delete_prefix": lambda objects, rel: objects.delete_prefix(f"{rel}below/"),
    "list": lambda objects, rel: objects.list(f"{rel}below/"),
    "children": lambda objects, rel: objects.children(f"{rel}below"),
    "etags": lambda objects, rel: objects.etags(f"{rel}below"),
    "entries": lambda objects, rel: objects.entries(f"{rel}below"),
    "folders": lambda objects, rel: objects.folders(f"{rel}below"),
}


PLACES = {
    "the folder that is opened": ("folder", ""),
    "a folder in it": ("", "folder/"),
    "a folder further down": ("kept", "folder/"),
}


def snapshot(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize("place", PLACES)
def test_no_operation_on_files_follows_a_link_out_of_the_run(run, outside, place):
    (folder, rel), before = PLACES[place], snapshot(outside)
    files = open_files(run / folder if folder else run)
    for name, operation in OF_FILES.items():
        with pytest.raises(ConfinementError, match="leads out of its root"):
            pytest.fail(f"{name} gave {operation(files, rel)!r}")
    assert snapshot(outside) == before


@pytest.mark.parametrize("place", PLACES)
def test_no_operation_on_objects_follows_a_link_out_of_the_run(run, outside, place):
    (folder, rel), before = PLACES[place], snapshot(outside)
    objects = ObjectStore.open(run / folder if folder else run)
    for name, operation in OF_OBJECTS.items():
        with pytest.raises(ConfinementError, match="leads out of its root"):
            pytest.fail(f"{name} gave {operation(objects, rel)!r}")
    assert snapshot(outside) == before


def test_folder_that_leads_out_is_not_locked(run, outside):
    with pytest.raises(ConfinementError), open_files(run / "folder").exclusive():
        pass


def test_links_that_lead_out_are_in_no_listing_and_those_within_the_run_are(run):
    os.symlink("own", f"{run.local_path}/kept/again")
    files = open_files(run)
    assert [entry.name for entry in files.list("kept")] == ["again", "own"]
    assert {entry.name for entry in files.walk()} == {"kept/again", "kept/own"}
    assert files.read_range("kept/again", 0, 9) == b"own"
    assert ObjectStore.open(run).read("kept/again").value == b"own"


@pytest.mark.parametrize("operation", [*OF_FILES, *OF_OBJECTS])
def test_folder_that_is_swapped_for_a_link_after_it_was_judged_leads_nowhere(
    tmp_path, outside, monkeypatch, operation
):
    own = tmp_path / "root/run/kept"
    (own / "below").mkdir(parents=True)
    (own / "file").write_bytes(b"own")
    (own / "below/file").write_bytes(b"own")
    run = safe_join(with_confinement(parse_uri(tmp_path / "root")), "run")

    def swap(uri, path):
        check_below(uri, path)
        if not own.is_symlink():
            own.rename(tmp_path / "root/run/moved")
            own.symlink_to(outside)

    monkeypatch.setattr("cairn.storage.store.files_local.check_below", swap)
    monkeypatch.setattr("cairn.storage.store.objects.check_below", swap)
    before = snapshot(outside)
    opened = open_files(run) if operation in OF_FILES else ObjectStore(run)
    answer = None
    with contextlib.suppress(StorageError):
        answer = {**OF_FILES, **OF_OBJECTS}[operation](opened, "kept/")
    assert snapshot(outside) == before
    assert SECRET.decode() not in str(answer)


@pytest.mark.parametrize("operation", ["write", "delete", "delete_many"])
@pytest.mark.parametrize("target", ["file", "new"])
def test_link_in_place_of_a_lock_file_is_not_followed(run, outside, monkeypatch, operation, target):
    lock, before = f"{run.local_path}/kept/file.__lock", snapshot(outside)
    os.unlink(f"{run.local_path}/kept/file")
    os.symlink(outside / target, lock)
    monkeypatch.setattr("cairn.storage.store.objects.remove_stale_lock", lambda _: None)
    with pytest.raises(ConfinementError):
        OF_OBJECTS[operation](ObjectStore(run), "kept/")
    assert snapshot(outside) == before


def test_no_change_is_lost_between_a_server_and_a_training_job(run):
    stores = [ObjectStore(run), ObjectStore(parse_uri(run.local_path))] * 2
    stores[0].write("kept/count", b"0")

    def add(store):
        done = 0
        while done < 25:
            stored = store.read("kept/count")
            value = b"%d" % (int(stored.value) + 1)
            with contextlib.suppress(PreconditionFailedError):
                store.write_if("kept/count", value, generation=stored.generation)
                done += 1

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(add, stores))
    assert stores[1].read("kept/count").value == b"100"
    stores[0].delete("kept/count")
    assert sorted(os.listdir(f"{run.local_path}/kept")) == ["file", "folder", "own"]


def test_one_record_that_leads_out_leaves_the_others_readable(run):
    objects = ObjectStore.open(run)
    parsed = objects.parse_many(["kept/own", "kept/file", "kept/none"], lambda data, _: data)
    assert parsed["kept/own"] == b"own"
    assert isinstance(parsed["kept/file"], ConfinementError)
    assert "kept/none" not in parsed


def test_file_that_is_swapped_for_a_link_after_it_was_judged_is_not_read(run, outside, monkeypatch):
    monkeypatch.setattr("cairn.storage.store.disk.confinement.check_below", lambda *_: None)
    with pytest.raises(ConfinementError):
        open_below(run, "kept/file")


def test_run_that_is_swapped_for_a_link_after_it_was_opened_is_not_read(run, outside):
    shutil.move(run.local_path, f"{run.local_path}.old")
    os.symlink(outside, run.local_path)
    with pytest.raises(ConfinementError):
        open_files(run).read_range("file", 0, 9)


def test_named_pipe_is_refused_and_not_waited_for(run):
    os.mkfifo(f"{run.local_path}/kept/pipe")
    for ask in (
        lambda: open_files(run).read_range("kept/pipe", 0, 9),
        lambda: ObjectStore.open(run).read("kept/pipe"),
        lambda: check_tree(run / "kept"),
    ):
        with pytest.raises(ConfinementError):
            ask()


@pytest.mark.parametrize("name", ["file", "folder", "inner"])
def test_tree_with_a_link_out_or_to_a_folder_is_opened_by_nobody_else(run, name):
    folder = f"{run.local_path}/kept"
    os.symlink(".", f"{folder}/inner")
    for other in {"file", "folder", "inner"} - {name}:
        os.unlink(f"{folder}/{other}")
    with pytest.raises(ConfinementError):
        check_tree(run / "kept")
    os.unlink(f"{folder}/{name}")
    check_tree(run / "kept")


def test_who_asks_for_themselves_follows_links_between_folders(run, outside):
    own = parse_uri(run.local_path)
    assert ObjectStore(own / "folder").read("file").value == SECRET
    assert open_files(own / "folder").read_range("file", 0, 9) == SECRET
    check_tree(own)


def test_files_of_adopted_steps_lie_in_the_root_or_where_an_administrator_allows(tmp_path):
    for name in ("root/old", "allowed/old", "allowed-2", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root/link").symlink_to(tmp_path / "other")
    (tmp_path / "root/deep").symlink_to(tmp_path / "allowed")
    root = with_confinement(parse_uri(tmp_path / "root"), [parse_uri(tmp_path / "allowed")])
    run = safe_join(root, "run")
    for name in ("root/old", "root/none", "allowed", "allowed/old", "root/deep/old"):
        folder = source_folder(run / "attempts/1/1", str(tmp_path / name))
        assert folder.local_path == str(tmp_path / name)
    for source in (
        *(str(tmp_path / name) for name in ("root/link", "allowed-2", "other", "root-2", "")),
        "/",
        "/etc",
        "gs://bucket/old",
        "memory://old",
    ):
        with pytest.raises(SourceRefusedError, match="--adopt-from"):
            source_folder(run, source)
    for source in ("../other", "", "http://host/x", f"{tmp_path}/root/../other"):
        with pytest.raises(InvalidURIError):
            source_folder(run, source)
    assert source_folder(parse_uri(tmp_path / "root/run"), "/etc").local_path == "/etc"


def test_nothing_leads_out_of_the_folder_of_an_adopted_step(tmp_path, outside):
    (tmp_path / "root/old").mkdir(parents=True)
    (tmp_path / "root/old/file").symlink_to(outside / "file")
    run = safe_join(with_confinement(parse_uri(tmp_path / "root")), "run")
    folder = source_folder(run, str(tmp_path / "root/old"))
    with pytest.raises(ConfinementError):
        open_files(folder).read_range("file", 0, 9)


def test_buckets_are_told_apart_by_name_and_prefix():
    root = with_confinement(parse_uri("gs://bucket/runs"), [parse_uri("gs://other/old")])
    run = safe_join(root, "run")
    assert str(source_folder(run, "gs://bucket/runs/x")) == "gs://bucket/runs/x"
    assert str(source_folder(run, "gs://other/old/5")) == "gs://other/old/5"
    for source in ("gs://bucket/runs-2/x", "gs://bucket", "gs://other/older", "s3://other/old/5"):
        with pytest.raises(SourceRefusedError):
            source_folder(run, source)
