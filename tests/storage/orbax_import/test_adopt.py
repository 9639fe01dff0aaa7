"""Folders of plain Orbax become runs, and stay as they are."""

import os
import shutil
from datetime import timedelta
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from orbax.checkpoint import v1

from cairn import (
    Checkpointer,
    CheckpointManager,
    CheckpointReader,
    CorruptionError,
    InvalidURIError,
    LeaseHeldError,
    ModelInfo,
    ModelMap,
    NotACheckpointError,
    NotFoundError,
    ObjectStore,
    PreconditionFailedError,
    Run,
    StepExistsError,
    StepInUseError,
    StepNotFoundError,
    StoreUnavailableError,
    TreeMismatchError,
    UnsupportedFormatError,
    adopt,
    best_step,
    check_run,
    collect_garbage,
    delete_step,
    fork_run,
    load,
    open_files,
    parse_uri,
    promote_step,
    roll_back,
    verify_step,
)
from cairn.storage.orbax_import import step_reading
from cairn.storage.runs.trash import GRACE_SECONDS
from tests.faults.report import is_long, trials
from tests.plain_orbax import (
    MIXED,
    READABLE,
    TREE,
    UNNUMBERED,
    UNREADABLE,
    aggregated_steps,
    manager,
)
from tests.storage.orbax_import.folders import everything
from tests.storage.stored_runs import SetClock

ADOPTED = {
    **{name: (make, "") for name, make in READABLE.items()},
    **{name: (make, "best") for name, make in UNNUMBERED.items()},
}

SOME = ("steps", "steps of zarr 3 without items", "older trees of small files", "folders of trees")
SLICE = ADOPTED if is_long() else SOME
"""Of layouts: one of each kind of stored array."""

ALIKE = (
    "steps with a prefix",
    "steps of the v1 checkpointer",
    "older trees",
    "one tree",
    "one standard step",
    "folders of trees in small files",
)
"""Layouts of which another one has each part: its name, its items, and how it stores arrays."""
UNLIKE = [layout for layout in ADOPTED if is_long() or layout not in ALIKE]


def flip_a_bit(step: Path) -> Path:
    """In the middle of the largest file."""
    files = [path for path in step.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 4
    largest.write_bytes(data)
    return largest


def bits(leaf) -> tuple:
    array = np.asarray(leaf)
    return array.shape, array.dtype, array.tobytes()


@pytest.mark.parametrize("layout", UNLIKE)
def test_plain_orbax_is_read_bit_by_bit_and_stays_as_it_was(tmp_path, layout):
    make, inner = ADOPTED[layout]
    make(tmp_path / "old", MIXED)
    folder = tmp_path / "old" / inner
    before = everything(tmp_path / "old")
    report = adopt(folder, tmp_path / "adopted")
    assert report.ok, report.problems
    assert report.adopted
    run = Run.open(tmp_path / "adopted")
    assert [info.step for info in run.steps()] == list(report.adopted)
    leaves = 0
    for info in run.steps():
        manifest = run.manifest(info)
        found = verify_step(run, info)
        assert found.ok, found.problems
        assert found.loads
        assert not found.extra
        for item, inside in manifest.plain.trees.items():
            theirs = ocp.PyTreeCheckpointer().restore(run.orbax_uri(info).local_path + f"/{inside}")
            expected = without_value(theirs) if layout == "Variables of older Flax" else theirs
            ours = load(run.uri, {item: expected}, step=info.step)[item]
            assert jax.tree.structure(ours) == jax.tree.structure(expected)
            pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True)
            for one, other in pairs:
                assert bits(one) == bits(other)
                leaves += 1
    assert leaves >= len(run.steps()) * 9
    assert everything(tmp_path / "old") == before


def without_value(tree):
    match tree:
        case {"value": value}:
            return value
        case dict():
            return {name: without_value(child) for name, child in tree.items()}
        case list():
            return [without_value(child) for child in tree]
    return tree


@pytest.mark.parametrize("layout", SLICE)
def test_a_flipped_bit_in_a_value_is_found_by_verification_and_refused_by_a_load(tmp_path, layout):
    make, inner = ADOPTED[layout]
    tree = {"params": {"embed": np.arange(4096, dtype=np.float32).reshape(64, 64)}}
    make(tmp_path / "old", tree)
    adopt(tmp_path / "old" / inner, tmp_path / "adopted")
    run = Run.open(tmp_path / "adopted")
    info = run.latest()
    step = Path(run.orbax_uri(info).local_path)
    largest = flip_a_bit(step)
    found = verify_step(run, info)
    assert not found.ok
    assert any(problem.startswith(str(largest.relative_to(step))) for problem in found.problems)
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
    (item,) = [item for item in reader.items() if "params/embed" in reader.leaves(item)]
    with pytest.raises(CorruptionError):
        reader.read(item, "params/embed")


def test_a_step_that_its_owner_removed_is_named_by_all_who_ask(tmp_path):
    manager(tmp_path / "old", max_to_keep=None)
    adopt(tmp_path / "old")
    run = Run.open(tmp_path / "old.cairn")
    with ocp.CheckpointManager(tmp_path / "old") as made:
        made.delete(5)
    info = run.step(5)
    (problem, *_) = verify_step(run, info).problems
    assert "owner has removed" in problem
    with pytest.raises(StepNotFoundError, match=r"owner has removed.*disk of another machine"):
        load(run.uri, {"state": {"w": np.zeros((4, 4), np.float32)}}, step=5)
    again = adopt(tmp_path / "old")
    assert (again.adopted, again.kept, again.gone) == ((), (10,), (5,))
    with pytest.raises(StepNotFoundError, match="owner has removed"):
        fork_run(run, info, parse_uri(tmp_path / "fork"), by="me")
    (said,) = check_run(run).problems
    assert "owner has removed" in said


def test_adopted_again_a_folder_adds_what_is_new(tmp_path):
    manager(tmp_path / "old", max_to_keep=None)
    first = adopt(tmp_path / "old")
    assert (first.adopted, first.run.name) == ((5, 10), "old.cairn")
    manager(tmp_path / "old", steps=(15,), max_to_keep=None)
    again = adopt(tmp_path / "old")
    assert (again.adopted, again.kept, again.ok) == ((15,), (5, 10), True)
    assert Run.open(first.run).latest_step() == 15


def test_a_step_that_its_owner_wrote_anew_is_named_and_not_loaded(tmp_path):
    manager(tmp_path / "old")
    adopt(tmp_path / "old")
    shutil.rmtree(tmp_path / "old" / "10")
    manager(tmp_path / "old", {"w": np.full((4, 4), 2, np.float32)}, steps=(10,))
    run = Run.open(tmp_path / "old.cairn")
    with pytest.raises(CorruptionError, match="not what was adopted"):
        load(run.uri, {"state": {"w": np.zeros((4, 4), np.float32)}}, step=10)
    again = adopt(tmp_path / "old")
    assert (again.adopted, again.kept, again.gone, again.ok) == ((), (5,), (), False)
    assert again.problems[0].startswith("10: changed since it was adopted")


def test_a_file_that_was_changed_in_place_is_seen_by_its_time(tmp_path):
    manager(tmp_path / "old", {"w": np.arange(4096, dtype=np.float32)})
    adopt(tmp_path / "old")
    flip_a_bit(tmp_path / "old" / "5")
    again = adopt(tmp_path / "old")
    assert again.kept == (10,)
    assert "crc32c" in again.problems[0]


def test_files_that_were_only_touched_are_as_they_were(tmp_path):
    manager(tmp_path / "old")
    adopt(tmp_path / "old")
    for path in (tmp_path / "old").rglob("*"):
        os.utime(path, ns=(1, 1))
    again = adopt(tmp_path / "old")
    assert (again.kept, again.ok) == ((5, 10), True)


def test_what_was_not_committed_is_named(tmp_path):
    READABLE["steps beside one that is not committed"](tmp_path / "old")
    report = adopt(tmp_path / "old")
    assert report.adopted == (5,)
    assert report.left == ("10.orbax-checkpoint-tmp-1700000000: not committed",)


def test_two_folders_of_one_step_are_named_and_neither_is_taken(tmp_path):
    manager(tmp_path / "old")
    shutil.copytree(tmp_path / "old" / "5", tmp_path / "old" / "ckpt_00005")
    report = adopt(tmp_path / "old")
    assert report.adopted == (10,)
    assert [line.partition(":")[0] for line in report.problems] == ["5", "ckpt_00005"]


def test_json_and_metrics_go_with_the_step(tmp_path):
    READABLE["steps of several items"](tmp_path / "old")
    READABLE["steps with metrics"](tmp_path / "scored")
    adopt(tmp_path / "old")
    run = Run.open(tmp_path / "old.cairn")
    info = run.latest()
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
    assert reader.meta() == {"data": {"position": 1}}
    with pytest.raises(NotFoundError, match="the item is JSON") as caught:
        load(run.uri, {"data": {"position": 1}})
    assert "CheckpointReader.open(\"RUN/steps/N\").meta()['data']" in caught.value.next_step
    adopt(tmp_path / "scored")
    target = {"state": {"w": np.zeros((4, 4), np.float32)}}
    found = load(tmp_path / "scored.cairn", target, step="best:loss:min")
    assert found["state"]["w"].sum() == 16
    assert best_step(Run.open(tmp_path / "scored.cairn"), "loss", "min").step == 5


@pytest.mark.parametrize("names", [None, ("meta",), ("data", "config")])
def test_a_step_of_json_alone_is_adopted_and_read_as_orbax_reads_it(tmp_path, names):
    position = ocp.args.JsonSave({"position": [1, "a", None]})
    items = position if names is None else ocp.args.Composite(**dict.fromkeys(names, position))
    with ocp.CheckpointManager(tmp_path / "old") as theirs:
        theirs.save(5, args=items)
        theirs.wait_until_finished()
        report = adopt(tmp_path / "old")
        assert (report.adopted, report.problems, report.left) == ((5,), (), ())
        with CheckpointManager(report.run) as ours:
            assert ours.restore(5) == theirs.restore(5)
            assert ours.item_metadata(5) == theirs.item_metadata(5)
    run = Run.open(report.run)
    assert verify_step(run, 5).ok
    fork_run(run, run.latest(), parse_uri(tmp_path / "fork"), by="me")
    with CheckpointManager(tmp_path / "fork") as copied, CheckpointManager(report.run) as ours:
        assert copied.restore(5) == ours.restore(5)


def test_leaves_of_text_are_text_again(tmp_path):
    tree = {"w": np.ones(3), "names": {"first": "a", "second": "ü"}}
    ocp.PyTreeCheckpointer().save(tmp_path / "old" / "1", tree)
    report = adopt(tmp_path / "old")
    assert report.adopted == (1,), report.problems
    target = {"w": np.zeros(3), "names": {"first": "", "second": ""}}
    assert load(report.run, {"state": target})["state"]["names"] == tree["names"]
    assert load(report.run, {"state": target}, only="second")["state"]["names"]["first"] == ""
    for other, problem in (
        ({"w": "", "names": target["names"]}, "w: expected text, stored an array"),
        ({"w": np.zeros(3), "names": {"first": ""}}, "names/second: stored, not in the target"),
        (
            {"w": np.zeros(3), "names": {"first": "", "second": np.zeros(2)}},
            "names/second: expected an array, stored text",
        ),
    ):
        with pytest.raises(TreeMismatchError) as caught:
            load(report.run, {"state": other})
        assert any(problem in line for line in caught.value.problems)
    fork_run(Run.open(report.run), Run.open(report.run).latest(), parse_uri(tmp_path / "f"), by="m")
    assert load(tmp_path / "f", {"state": target})["state"]["names"] == tree["names"]


def test_items_that_are_no_trees_belong_to_the_step_and_go_with_a_fork(tmp_path):
    manager(tmp_path / "old")
    iterator = tmp_path / "old" / "10" / "iter"
    iterator.mkdir()
    (iterator / "process_0-of-1.json").write_text("{}")
    report = adopt(tmp_path / "old")
    assert report.adopted == (5, 10)
    assert report.left == (
        "10: item iter is neither arrays nor JSON; its files belong to the step",
    )
    run = Run.open(report.run)
    forked = fork_run(run, run.step(10), parse_uri(tmp_path / "fork"), by="me")
    fork = Run.open(tmp_path / "fork")
    files = Path(fork.step_uri(forked).local_path)
    assert (files / "iter" / "process_0-of-1.json").read_text() == "{}"


@pytest.mark.parametrize("layout", SLICE)
def test_a_fork_of_an_adopted_step_stands_alone_and_plain_orbax_reads_it(tmp_path, layout):
    make, inner = ADOPTED[layout]
    make(tmp_path / "old", MIXED)
    report = adopt(tmp_path / "old" / inner, tmp_path / "adopted")
    source = Run.open(report.run)
    info = source.latest()
    (item, *_) = (trees := source.manifest(info).plain.trees)
    expected = ocp.PyTreeCheckpointer().restore(
        source.orbax_uri(info).local_path + f"/{trees[item]}"
    )
    forked = fork_run(source, info, parse_uri(tmp_path / "fork"), by="me")
    shutil.rmtree(tmp_path / "old")
    shutil.rmtree(tmp_path / "adopted")
    fork = Run.open(tmp_path / "fork")
    assert forked.source is None
    found = verify_step(fork, forked)
    assert found.ok, found.problems
    assert check_run(fork).ok
    plain = ocp.PyTreeCheckpointer().restore(fork.orbax_uri(forked).local_path + f"/{trees[item]}")
    assert jax.tree.map(bits, plain) == jax.tree.map(bits, expected)
    target = without_value(expected) if layout == "Variables of older Flax" else expected
    ours = load(fork.uri, {item: target})[item]
    assert jax.tree.map(bits, ours) == jax.tree.map(bits, target)


def test_a_job_goes_on_in_an_attempt_of_its_own(tmp_path):
    manager(tmp_path / "old")
    adopt(tmp_path / "old")
    before = everything(tmp_path / "old")
    target = {"state": {"w": jax.numpy.zeros((4, 4))}}
    with Checkpointer(tmp_path / "old.cairn") as checkpointer:
        assert checkpointer.latest_step() == 10
        state = checkpointer.restore(target)
        with pytest.raises(StepExistsError):
            checkpointer.save(10, state)
        checkpointer.save(20, jax.tree.map(lambda leaf: leaf + 1, state)).wait()
        assert checkpointer.steps() == [5, 10, 20]
    run = Run.open(tmp_path / "old.cairn")
    assert run.step(20).attempt > run.step(10).attempt
    assert run.step(20).source is None
    assert check_run(run).ok
    assert everything(tmp_path / "old") == before
    manager(tmp_path / "old", steps=(15, 30))
    report = adopt(tmp_path / "old")
    assert report.adopted == (30,)
    assert report.problems == ("15: the run goes on to step 20; adopt it into another run",)
    assert run.latest_step() == 30


def test_deleting_an_adopted_step_leaves_its_files(tmp_path):
    clock = SetClock()
    manager(tmp_path / "old")
    adopt(tmp_path / "old", clock=clock)
    before = everything(tmp_path / "old")
    run = Run.open(tmp_path / "old.cairn", clock=clock)
    delete_step(run, run.step(10), by="me", clock=clock)
    assert run.latest_step() == 5
    again = adopt(tmp_path / "old", clock=clock)
    assert (again.adopted, again.kept, again.left) == ((), (5,), ("10: deleted from the run",))
    clock.now += timedelta(seconds=GRACE_SECONDS + 1)
    assert [one.step for one in collect_garbage(run, by="me", clock=clock)] == [10]
    assert run.latest_step() == 5
    assert everything(tmp_path / "old") == before


def test_promotion_holds_an_adopted_step(tmp_path):
    manager(tmp_path / "old")
    adopt(tmp_path / "old")
    run = Run.open(tmp_path / "old.cairn")
    promote_step(run, 5, "good", by="me", reason="", expect=None)
    target = {"state": {"w": np.zeros((4, 4), np.float32)}}
    assert load(f"{tmp_path}/old.cairn@good", target)["state"]["w"].sum() == 16
    with pytest.raises(StepInUseError):
        delete_step(run, run.step(5), by="me")


def test_what_its_owner_has_removed_or_changed_is_not_promoted(tmp_path):
    manager(tmp_path / "old", steps=(1, 2, 3))
    run = Run.open(adopt(tmp_path / "old").run)
    promote_step(run, 3, "good", by="me", reason="", expect=None)
    shutil.rmtree(tmp_path / "old" / "1")
    (value, *_) = (tmp_path / "old" / "2" / "default").rglob("d/*")
    value.write_bytes(value.read_bytes()[:-1])
    with pytest.raises(StepNotFoundError, match="owner has removed"):
        promote_step(run, 1, "good", by="me", reason="", expect=1)
    with pytest.raises(CorruptionError, match="not what was adopted") as caught:
        promote_step(run, 2, "good", by="me", reason="", expect=1)
    assert str(value.relative_to(tmp_path / "old" / "2")) in caught.value.problems[0]
    assert load(f"{run.uri}@good", {"state": TREE})["state"]["w"].sum() == 16


def test_bytes_that_were_exchanged_at_the_same_size_and_time_are_never_loaded(tmp_path):
    tree = {"w": np.arange(4096, dtype=np.float32)}
    manager(tmp_path / "old", tree, steps=(5,))
    run = Run.open(adopt(tmp_path / "old").run)
    files = [path for path in (tmp_path / "old").rglob("*") if path.is_file()]
    times = {path: path.stat().st_mtime_ns for path in files}
    flip_a_bit(tmp_path / "old")
    for path, time in times.items():
        os.utime(path, ns=(time, time))
    with pytest.raises(CorruptionError):
        load(run.uri, {"state": tree})
    assert not verify_step(run, 5).loads
    with pytest.raises(CorruptionError):
        fork_run(run, run.step(5), parse_uri(tmp_path / "fork"), by="me")


def test_what_adopts_nothing_says_what_there_is(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events").write_text("other")
    READABLE["one step"](tmp_path / "fine")
    UNREADABLE["steps of the oldest releases"](tmp_path / "oldest")
    adopt(tmp_path / "fine", tmp_path / "run")
    refused = [
        ((tmp_path / "nothing",), NotFoundError, "nothing"),
        ((tmp_path / "logs",), NotACheckpointError, "events"),
        ((tmp_path / "run",), InvalidURIError, "a run of Cairn's"),
        ((tmp_path / "run" / "attempts" / "1",), InvalidURIError, "a folder of the run"),
        ((tmp_path / "fine", tmp_path / "fine" / "run"), InvalidURIError, "in it"),
        ((tmp_path / "fine", tmp_path), InvalidURIError, "around it"),
        (("s3://bucket/old",), InvalidURIError, "s3://"),
        ((tmp_path / "fine", "s3://bucket/run"), InvalidURIError, "s3://"),
    ]
    for arguments, kind, found in refused:
        with pytest.raises(kind, match=found) as caught:
            adopt(*arguments)
        assert caught.value.next_step
    manager(tmp_path / "another")
    with pytest.raises(PreconditionFailedError, match="one that adopts"):
        adopt(tmp_path / "another", tmp_path / "run")
    report = adopt(tmp_path / "oldest")
    assert report.adopted == ()
    assert "first releases" in report.problems[0]
    UNNUMBERED["folders of trees"](tmp_path / "trees")
    with pytest.raises(NotACheckpointError) as caught:
        adopt(tmp_path / "trees")
    assert caught.value.problems == (
        "best: a checkpoint without a number; adopt that folder by itself",
    )
    assert not (tmp_path / "trees.cairn").exists()
    assert names(tmp_path / "logs") == ["events"]


def test_aggregated_leaves_are_refused_by_that_name(tmp_path: Path) -> None:
    aggregated_steps(tmp_path / "old")
    with ocp.CheckpointManager(tmp_path / "old") as old:  # the way out
        tree = old.restore(5, args=ocp.args.PyTreeRestore())
    assert tree["step"] == 7
    np.testing.assert_array_equal(tree["small"], np.ones(3, np.int32))
    (problem,) = adopt(tmp_path / "old").problems
    assert all(text in problem for text in ("aggregate=True", "'small', 'step'", "_METADATA"))
    assert "save it again" in problem


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_folder_in_a_bucket_is_adopted_and_stays_as_it_was(gcs):
    bucket = gcs.bucket_uri
    with ocp.CheckpointManager(f"{bucket}/old") as made:
        for step in (5, 10):
            made.save(step, args=ocp.args.StandardSave(MIXED))
    files = open_files(parse_uri(f"{bucket}/old"))
    before = files.walk()
    report = adopt(f"{bucket}/old")
    assert (report.adopted, report.ok) == ((5, 10), True)
    run = Run.open(f"{bucket}/old.cairn")
    expected = ocp.PyTreeCheckpointer().restore(f"{bucket}/old/10/default")
    ours = load(run.uri, {"state": expected})["state"]
    assert jax.tree.map(bits, ours) == jax.tree.map(bits, expected)
    assert verify_step(run, 10).ok
    assert files.walk() == before
    files.delete_tree("5")
    with pytest.raises(StepNotFoundError, match="owner has removed"):
        load(run.uri, {"state": expected}, step=5)
    again = adopt(f"{bucket}/old")
    assert (again.kept, again.gone) == ((10,), (5,))


def test_a_save_in_a_bucket_without_its_marker_is_not_adopted(gcs):
    bucket = gcs.bucket_uri
    with ocp.CheckpointManager(f"{bucket}/old") as made:
        for step in (5, 10):
            made.save(step, args=ocp.args.StandardSave(MIXED))
    ObjectStore.open(f"{bucket}/old").delete("10/commit_success.txt")
    report = adopt(f"{bucket}/old")
    assert (report.adopted, report.left) == ((5,), ("10: not committed",))


def test_a_folder_may_be_on_a_disk_and_its_run_in_a_bucket(gcs, tmp_path):
    manager(tmp_path / "old", MIXED)
    report = adopt(tmp_path / "old", f"{gcs.bucket_uri}/runs/old")
    run = Run.open(report.run)
    assert [info.step for info in run.steps()] == [5, 10]
    assert verify_step(run, 10).ok
    expected = ocp.PyTreeCheckpointer().restore(tmp_path / "old" / "10" / "default")
    ours = load(run.uri, {"state": expected})["state"]
    assert jax.tree.map(bits, ours) == jax.tree.map(bits, expected)


def sharded(shape, spec, dtype="float32"):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    return jax.device_put(values, jax.NamedSharding(mesh, jax.P(*spec)))


SHARDED = {
    "rows": lambda: sharded((64, 6), ("x",)),
    "both": lambda: sharded((8, 12, 2), ("x", "y")),
    "replicated": lambda: sharded((5, 3), ()),
    "half": lambda: sharded((16, 16), ("x", "y"), "bfloat16"),
    "fp8": lambda: sharded((16, 4), ("x",), "float8_e4m3fn"),
    "int4": lambda: sharded((16, 4), ("x",), "int4"),
    "count": lambda: jax.numpy.zeros((), "int32"),
    "legacy_key": lambda: jax.random.PRNGKey(3),
}


@pytest.mark.parametrize("options", [{}, {"use_zarr3": True}, {"use_ocdbt": False}], ids=str)
def test_arrays_in_many_chunks_load_in_part_and_on_any_device(tmp_path, options):
    tree = {name: make() for name, make in SHARDED.items()}
    handler = ocp.PyTreeCheckpointHandler(**options)
    ocp.Checkpointer(handler).save(tmp_path / "old" / "3", tree)
    report = adopt(tmp_path / "old")
    assert report.adopted == (3,), report.problems
    run = Run.open(report.run)
    info = run.step(3)
    assert verify_step(run, info).ok
    records = {leaf.path: leaf for leaf in run.contents(info).leaves}
    assert records["rows"].chunks[0] < 64
    on_one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    for target in (tree, on_one):
        ours = load(run.uri, {"state": target})["state"]
        assert jax.tree.map(bits, ours) == jax.tree.map(bits, tree)
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
    part = reader.read("state", "both", np.s_[3:7, 5:, 1])
    assert bits(part) == bits(np.asarray(tree["both"])[3:7, 5:, 1])


def test_typed_keys_are_keys_again(tmp_path):
    tree = {
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(7, impl="rbg"), 3),
        "unsafe": jax.random.key(7, impl="unsafe_rbg"),
        "w": jax.numpy.ones(3),
    }
    with v1.training.Checkpointer(tmp_path / "old") as made:
        made.save(1, tree)
    report = adopt(tmp_path / "old")
    assert report.adopted == (1,), report.problems
    ours = load(report.run, {"state": tree})["state"]
    for name in ("key", "keys", "unsafe"):
        assert ours[name].dtype == tree[name].dtype
        assert bits(jax.random.key_data(ours[name])) == bits(jax.random.key_data(tree[name]))
    fork_run(Run.open(report.run), Run.open(report.run).latest(), parse_uri(tmp_path / "f"), by="m")
    again = load(tmp_path / "f", {"state": tree})["state"]
    assert bits(jax.random.key_data(again["keys"])) == bits(jax.random.key_data(tree["keys"]))
    with Checkpointer(tmp_path / "own") as checkpointer:
        checkpointer.save(1, {"state": tree})
    imported, own = (
        {
            leaf.path: (leaf.dtype, leaf.nbytes, leaf.digest)
            for leaf in run.contents(run.step(1)).leaves
        }
        for run in (Run.open(report.run), Run.open(tmp_path / "own"))
    )
    assert imported == own, "a diff shows no difference where nothing changed"


def test_an_imported_step_is_read_by_its_folders_and_by_its_address(tmp_path):
    manager(tmp_path / "old", steps=(5,))
    run = Run.open(adopt(tmp_path / "old").run)
    promote_step(run, 5, "best-yet", expect=None)
    info = run.step(5)
    named = (
        f"{tmp_path}/old.cairn/steps/5",
        tmp_path / "old.cairn/steps/5",
        f"{run.uri}@best-yet",
        f"{tmp_path}/old.cairn@latest",
    )
    folders = (run.step_uri(info), run.orbax_uri(info), str(run.step_uri(info)))
    for place in (*named, *folders, parse_uri(f"{run.uri}/steps/5")):
        reader = CheckpointReader.open(place)
        assert str(reader.uri) == str(run.orbax_uri(info))
    with pytest.raises(StepNotFoundError, match="4"):
        CheckpointReader.open(f"{run.uri}/steps/4")
    with ocp.CheckpointManager(tmp_path / "steps") as manager_:  # a folder of that name, no run's
        manager_.save(7, args=ocp.args.StandardSave(TREE))
    assert CheckpointReader.open(tmp_path / "steps" / "7").items() == ["default"]


def test_damaged_digests_are_found_and_refuse_a_load(tmp_path):
    manager(tmp_path / "old", steps=(5,))
    report = adopt(tmp_path / "old")
    run = Run.open(report.run)
    info = run.step(5)
    (digests,) = Path(run.step_uri(info).local_path).rglob("chunk_digests*")
    data = digests.read_bytes()
    digests.write_bytes(data.replace(b'"digests":"', b'"digests":"0', 1)[: len(data)])
    found = verify_step(run, info)
    assert [problem.partition(":")[0] for problem in found.problems] == [
        "state/chunk_digests.process_0.json"
    ]
    with pytest.raises(CorruptionError, match="chunk_digests"):
        load(run.uri, {"state": {"w": np.zeros((4, 4), np.float32)}})


def test_a_step_that_changes_while_it_is_read_is_not_adopted(tmp_path, monkeypatch):
    manager(tmp_path / "old")
    digest = step_reading.digest_chunks

    def changed(*arguments):
        (tmp_path / "old" / "5" / "late").write_text("later")
        return digest(*arguments)

    monkeypatch.setattr(step_reading, "digest_chunks", changed)
    report = adopt(tmp_path / "old")
    assert report.adopted == (10,)
    assert "5: the step was changed while it was read" in report.problems[0]
    monkeypatch.undo()
    assert [info.step for info in Run.open(report.run).steps()] == [10]


def test_an_adoption_that_was_interrupted_goes_on_where_it_stopped(tmp_path):
    manager(tmp_path / "old", steps=(1, 2, 3))

    def stop(done, of):
        assert of == 3
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adopt(tmp_path / "old", progress=stop)
    report = adopt(tmp_path / "old")
    assert (report.adopted, report.kept) == ((3,), (1, 2))


def test_a_run_that_a_job_writes_is_left_to_it(tmp_path):
    manager(tmp_path / "old", steps=(1,))
    report = adopt(tmp_path / "old")
    manager(tmp_path / "old", steps=(2,))
    with Checkpointer(report.run) as checkpointer:
        checkpointer.begin()
        with pytest.raises(LeaseHeldError):
            adopt(tmp_path / "old")
        checkpointer.save(5, {"state": {"w": np.ones(3)}}).wait()


def test_steps_that_the_run_went_back_before_stay_aside(tmp_path):
    manager(tmp_path / "old")
    report = adopt(tmp_path / "old")
    run = Run.open(report.run)
    roll_back(run, run.step(5), by="me")
    again = adopt(tmp_path / "old")
    assert again.left == ("10: superseded in the run, which went back before it",)
    assert run.latest_step() == 5


def test_a_tree_may_have_the_name_of_our_json(tmp_path):
    with v1.training.Checkpointer(tmp_path / "old") as made:
        made.save_checkpointables(5, {"meta": {"a": 1}, "state": {"w": np.ones(3)}})
    report = adopt(tmp_path / "old")
    found = load(report.run, {"meta": {"a": 0}, "state": {"w": np.zeros(3)}})
    assert found["meta"] == {"a": 1}


def test_steps_that_cairn_saved_are_not_taken_from_a_copy_without_their_run(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"state": {"w": np.ones(3)}}).wait()
    shutil.copytree(tmp_path / "run" / "attempts" / "1", tmp_path / "copy")
    report = adopt(tmp_path / "copy")
    assert report.adopted == ()
    assert "a step that Cairn has saved" in report.problems[0]


KEYS = ["with space", "a/b", "ünï", "a#b", "%41", "c", "d", "5"]


@pytest.mark.parametrize(
    ("key", "use_ocdbt"),
    [*((key, True) for key in KEYS), *((key, False) for key in (KEYS if is_long() else ["a/b"]))],
)
def test_keys_of_any_kind_are_read_or_named(tmp_path, key, use_ocdbt):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)
    tree = {"params": {key: {"w": np.arange(3.0)}}, key: np.arange(4)}
    ocp.Checkpointer(handler).save(tmp_path / "old" / "1", tree)
    report = adopt(tmp_path / "old")
    if report.adopted:
        ours = load(report.run, {"state": tree})["state"]
        assert jax.tree.map(bits, ours) == jax.tree.map(bits, tree)
        assert verify_step(Run.open(report.run), 1).ok
    else:
        assert report.problems
        assert not use_ocdbt


def test_where_the_store_refuses_the_run_the_error_says_how_to_go_on(gcs):
    with ocp.CheckpointManager(f"{gcs.bucket_uri}/old") as made:
        made.save(5, args=ocp.args.StandardSave(MIXED))
    refused = {"status": 403, "operation": "upload", "name": "old.cairn/run.json"}
    gcs.faults.add("status", count=None, **refused)
    with pytest.raises(StoreUnavailableError, match="beside this folder") as caught:
        adopt(f"{gcs.bucket_uri}/old")
    assert "where the run is to be" in caught.value.next_step


def test_another_model_than_before_is_refused(tmp_path):
    manager(tmp_path / "old", steps=(5,))
    rules = {r"state/w": "kernel"}
    model = ModelMap(ModelInfo(model_type="tiny"), {"kernel": (4, 4)}, rules)
    report = adopt(tmp_path / "old", model=model)
    assert Run.open(report.run).manifest(Run.open(report.run).latest()).items == ("model",)
    manager(tmp_path / "old", steps=(10,))
    for other in (None, ModelMap(ModelInfo(model_type="other"), {"kernel": (4, 4)}, rules)):
        with pytest.raises(PreconditionFailedError, match="adopted with another model"):
            adopt(tmp_path / "old", model=other)
    assert adopt(tmp_path / "old", model=model).adopted == (10,)


def test_a_module_is_filled_from_what_older_flax_saved(tmp_path):
    saved = nnx.Linear(4, 8, rngs=nnx.Rngs(1))
    tree = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(saved)))
    READABLE["Variables of older Flax"](tmp_path / "old", tree)
    report = adopt(tmp_path / "old")
    filled = load(report.run, {"state": nnx.Linear(4, 8, rngs=nnx.Rngs(2))})["state"]
    assert isinstance(filled, nnx.Linear)
    assert bits(filled.kernel[...]) == bits(saved.kernel[...])
    assert bits(filled.bias[...]) == bits(saved.bias[...])


def test_a_chunk_that_is_damaged_before_its_adoption_is_named(tmp_path):
    manager(tmp_path / "old", {"w": np.arange(4096, dtype=np.float32)})
    flip_a_bit(tmp_path / "old" / "5")
    for path in (tmp_path / "old" / "10").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-1])
    report = adopt(tmp_path / "old")
    assert 10 not in report.adopted
    assert any(line.startswith("10: stored data of a leaf") for line in report.problems)


def test_a_folder_whose_owner_removed_all_is_told_as_gone(tmp_path):
    manager(tmp_path / "old")
    adopt(tmp_path / "old")
    shutil.rmtree(tmp_path / "old")
    assert adopt(tmp_path / "old").gone == (5, 10)


def test_one_checkpoint_keeps_the_step_that_it_was_given(tmp_path):
    READABLE["one tree"](tmp_path / "best")
    assert adopt(tmp_path / "best", step=4000).adopted == (4000,)
    again = adopt(tmp_path / "best")
    assert (again.adopted, again.kept, again.ok) == ((), (4000,), True)
    manager(tmp_path / "many")
    with pytest.raises(InvalidURIError, match="a step is given for many"):
        adopt(tmp_path / "many", step=3)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events").write_text("other")
    with pytest.raises(NotACheckpointError, match="events"):
        adopt(tmp_path / "logs", step=3)


def test_numbered_folders_of_other_things_are_named(tmp_path):
    manager(tmp_path / "old", steps=(5,))
    (tmp_path / "old" / "7").mkdir()
    (tmp_path / "old" / "7" / "events").write_text("other")
    assert adopt(tmp_path / "old").left == ("7: no checkpoint of Orbax",)


@pytest.mark.parametrize(
    "layout",
    [
        *(["steps"] if is_long() else []),
        "steps of zarr 3 without items",
        "older trees of small files",
    ],
)
def test_no_flipped_bit_of_any_file_is_read_as_another_value(tmp_path, layout):
    READABLE[layout](tmp_path / "old", MIXED)
    report = adopt(tmp_path / "old", tmp_path / "adopted")
    run = Run.open(report.run)
    info = run.latest()
    step = Path(run.orbax_uri(info).local_path)
    item = run.manifest(info).items[0]

    def values():
        reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
        return {path: bits(reader.read(item, path)) for path in reader.leaves(item)}

    expected = values()
    randomly = np.random.default_rng(0)
    kept = Path(run.step_uri(info).local_path)
    files = [path for folder in (step, kept) for path in sorted(folder.rglob("*"))]
    hit = 0
    for path in files:
        if path.is_dir() or not (data := path.read_bytes()):
            continue
        for at in randomly.integers(0, len(data), size=trials(short=1, long=5)):
            damaged = bytearray(data)
            damaged[at] ^= 1 << int(randomly.integers(8))
            path.write_bytes(damaged)
            try:
                assert values() == expected
            except (CorruptionError, UnsupportedFormatError):
                hit += 1
            found = verify_step(run, info)
            assert any(path.name in problem for problem in found.problems)
        path.write_bytes(data)
    assert hit > 3
    assert verify_step(run, info).ok


@pytest.mark.parametrize(
    "layout", ["steps", "one tree", "steps of the v1 checkpointer", "one step"]
)
def test_a_train_state_is_loaded_into_its_like(tmp_path, layout):
    params = {"dense": {"kernel": jax.numpy.ones((4, 3)), "bias": jax.numpy.zeros(3)}}
    tx = optax.chain(optax.clip(1.0), optax.adamw(1e-2), optax.trace(0.9))
    made = TrainState.create(apply_fn=None, params=params, tx=tx)
    leaves = [jax.numpy.asarray(leaf) + 1 for leaf in jax.tree.leaves(made)]
    made = jax.tree.unflatten(jax.tree.structure(made), leaves)
    READABLE[layout](tmp_path / "old", made)
    report = adopt(tmp_path / "old")
    assert report.ok, report.problems
    empty = jax.tree.map(jax.numpy.zeros_like, made)
    (item,) = Run.open(report.run).manifest(Run.open(report.run).latest()).items
    found = load(report.run, {item: empty})[item]
    assert jax.tree.structure(found) == jax.tree.structure(made)
    assert jax.tree.map(bits, found) == jax.tree.map(bits, made)


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_a_tree_without_arrays_is_adopted(tmp_path, use_ocdbt):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)
    ocp.Checkpointer(handler).save(tmp_path / "old" / "1", {"empty": {}, "none": None})
    report = adopt(tmp_path / "old")
    assert report.adopted == (1,), report.problems
    run = Run.open(report.run)
    assert verify_step(run, 1).ok
    assert load(run.uri, {"state": {"empty": {}, "none": None}}) == {
        "state": {"empty": {}, "none": None}
    }


def test_an_item_that_was_not_committed_is_no_tree_of_the_step(tmp_path):
    READABLE["steps of several items"](tmp_path / "old")
    left = "params.orbax-checkpoint-tmp-1700000000"
    shutil.copytree(tmp_path / "old" / "5" / "params", tmp_path / "old" / "5" / left)
    report = adopt(tmp_path / "old")
    assert report.adopted == (5,)
    assert report.left[0].startswith(f"5: item {left} is neither arrays nor JSON")
    assert Run.open(report.run).manifest(Run.open(report.run).latest()).items == ("data", "params")


def test_nothing_is_written_into_a_root_of_orbax_beside_a_step(tmp_path):
    manager(tmp_path / "old", steps=(5,))
    UNNUMBERED["folders of trees"](tmp_path / "trees")
    shutil.copytree(tmp_path / "trees" / "best", tmp_path / "trees" / "last")
    before = everything(tmp_path)
    for folder in (tmp_path / "old" / "5", tmp_path / "trees" / "best"):
        with pytest.raises(InvalidURIError, match="no place beside this checkpoint"):
            adopt(folder)
    assert everything(tmp_path) == before
    assert adopt(tmp_path / "old" / "5", tmp_path / "run").adopted == (5,)


def test_folders_with_names_that_no_address_has_are_in_nobodys_way(tmp_path):
    manager(tmp_path / "old", steps=(5,))
    (tmp_path / "old" / "what?").mkdir()
    (tmp_path / "old" / "50%").mkdir()
    assert adopt(tmp_path / "old").adopted == (5,)


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_a_dict_whose_key_is_value_is_loaded_into_its_like(tmp_path, use_ocdbt):
    tree = {
        "ema": {"value": np.arange(3.0)},
        "one": {"value": np.ones(2)},
        "deep": {"value": {"value": np.zeros(4)}},
        "list": [{"value": np.full(2, 5.0)}, {"value": np.full(2, 6.0)}],
        "step": 3,
    }
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)
    ocp.Checkpointer(handler).save(tmp_path / "old" / "1", tree)
    report = adopt(tmp_path / "old")
    fork_run(Run.open(report.run), Run.open(report.run).latest(), parse_uri(tmp_path / "f"), by="m")
    for run in (report.run, tmp_path / "f"):
        ours = load(run, {"state": tree})["state"]
        assert jax.tree.map(bits, ours) == jax.tree.map(bits, tree)
        some = load(run, {"state": tree}, only="ema/value")["state"]
        assert bits(some["ema"]["value"]) == bits(tree["ema"]["value"])
    with pytest.raises(TreeMismatchError) as caught:
        load(report.run, {"state": tree | {"ema": {"value": np.zeros(4)}}})
    (problem,) = caught.value.problems
    assert problem.startswith("state/ema/value: expected shape (4,)")
