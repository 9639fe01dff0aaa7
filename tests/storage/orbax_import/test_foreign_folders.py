"""What lies in a folder beside whole steps, or instead of them, is named, and not taken."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

from cairn import (
    CheckpointManager,
    CheckpointReader,
    InvalidURIError,
    NotACheckpointError,
    Run,
    UnsupportedFormatError,
    adopt,
    fork_run,
    load,
    parse_uri,
    verify_step,
)
from tests.plain_orbax import READABLE, TREE, manager
from tests.storage.orbax_import.folders import everything, steps_of_items


def moved_and_linked(path: Path, to: Path) -> None:
    shutil.move(path, to)
    path.symlink_to(to)


def test_an_item_that_is_a_link_elsewhere_is_not_left_out_silently(tmp_path):
    steps_of_items(tmp_path / "old", "params", "opt")
    moved_and_linked(tmp_path / "old" / "5" / "opt", tmp_path / "pool")
    report = adopt(tmp_path / "old")
    assert report.adopted == ()
    (problem,) = report.problems
    assert problem.startswith("5: a checkpoint with links")
    assert f"opt -> {tmp_path}/pool" in problem


def test_a_step_whose_fork_would_lack_what_a_link_leads_to_is_not_adopted(tmp_path):
    steps_of_items(tmp_path / "old", "params")
    (tmp_path / "old" / "5" / "ema").symlink_to("params")
    steps_of_items(tmp_path / "values", "params")
    (tmp_path / "pool").mkdir()
    for path in list((tmp_path / "values").rglob("d/*")):
        moved_and_linked(path, tmp_path / "pool" / path.name)
    steps_of_items(tmp_path / "broken", "params")
    (tmp_path / "broken" / "5" / "params" / "notes").symlink_to("nowhere")
    for name, link in (("old", "ema -> params"), ("values", "/pool/"), ("broken", "notes")):
        report = adopt(tmp_path / name)
        assert report.adopted == ()
        assert link in report.problems[0]


def test_a_link_to_a_file_of_the_step_is_a_file_and_a_fork_has_it(tmp_path):
    manager(tmp_path / "old", steps=(5,))
    (value,) = (tmp_path / "old" / "5" / "default" / "d").iterdir()
    value.rename(value.parent.parent / "kept")
    value.symlink_to("../kept")
    report = adopt(tmp_path / "old")
    assert report.adopted == (5,), report.problems
    run = Run.open(report.run)
    fork_run(run, run.step(5), parse_uri(tmp_path / "fork"), by="me")
    shutil.rmtree(tmp_path / "old")
    assert load(tmp_path / "fork", {"state": TREE})["state"]["w"].sum() == 16


def test_a_tree_that_is_one_leaf_is_read_by_itself_and_refused_in_a_loop(tmp_path):
    values = np.arange(6.0).reshape(2, 3)
    v1.save(tmp_path / "old", values)
    run = Run.open(adopt(tmp_path / "old", tmp_path / "run", step=3).run)
    assert verify_step(run, 3).ok
    reader = CheckpointReader.open(run.step_uri(run.latest()), run.manifest(run.latest()))
    np.testing.assert_array_equal(reader.read("state", ""), values)
    with (
        CheckpointManager(run.uri) as manager,
        pytest.raises(UnsupportedFormatError, match="a tree that is one leaf: state"),
    ):
        manager.restore(3)


def test_steps_that_are_links_are_named(tmp_path):
    manager(tmp_path / "old", steps=(5, 10, 15))
    moved_and_linked(tmp_path / "old" / "15", tmp_path / "15")
    for name in ("best_20", "ckpt_00010", "latest"):
        (tmp_path / "old" / name).symlink_to("10")
    (tmp_path / "old" / "30").symlink_to("nowhere")
    report = adopt(tmp_path / "old")
    assert report.adopted == (5, 10)
    assert report.left == tuple(
        f"{name}: a link to 10" for name in ("best_20", "ckpt_00010", "latest")
    )
    assert report.problems == (
        f"15: a link to {tmp_path}/15; adopt that folder by itself",
        "30: a link to nowhere; adopt that folder by itself",
    )
    assert adopt(tmp_path / "old" / "15", tmp_path / "run").adopted == (15,)


def test_a_root_may_be_reached_by_a_link(tmp_path):
    manager(tmp_path / "old")
    (tmp_path / "link").symlink_to("old")
    assert adopt(tmp_path / "link").adopted == (5, 10)


@pytest.mark.parametrize("layout", ["steps", "steps that nothing describes"])
def test_the_run_of_an_item_is_never_made_in_its_step(tmp_path, layout):
    READABLE[layout](tmp_path / "old")
    item = next(tmp_path.joinpath("old", "5").glob("*/_METADATA")).parent
    before = everything(tmp_path)
    for run in (None, item.parent / "mine"):
        with pytest.raises(InvalidURIError, match="no place beside this checkpoint"):
            adopt(item, run)
    with pytest.raises(InvalidURIError, match="no place beside this checkpoint"):
        adopt(tmp_path / "old" / "5", tmp_path / "old" / "mine")
    assert everything(tmp_path) == before
    assert adopt(item, tmp_path / "run", step=5).adopted == (5,)


def test_the_run_of_an_item_in_a_bucket_is_never_made_in_its_step(gcs):
    with ocp.CheckpointManager(f"{gcs.bucket_uri}/old") as made:
        made.save(5, args=ocp.args.StandardSave(TREE))
    with pytest.raises(InvalidURIError, match="no place beside this checkpoint"):
        adopt(f"{gcs.bucket_uri}/old/5/default")


def test_roots_are_not_taken_for_steps_of_their_parent(tmp_path):
    for number in (1, 2):
        for step in (5, 10):
            ocp.PyTreeCheckpointer().save(tmp_path / "runs" / f"exp-{number}" / f"{step}", TREE)
    READABLE["older trees"](tmp_path / "runs" / "exp-3")
    manager(tmp_path / "runs" / "exp-4")
    with pytest.raises(NotACheckpointError) as caught:
        adopt(tmp_path / "runs")
    assert caught.value.problems == tuple(
        f"exp-{number}: a folder of checkpoints; adopt it by itself" for number in range(1, 5)
    )
    assert not (tmp_path / "runs.cairn").exists()
    assert adopt(tmp_path / "runs" / "exp-1").adopted == (5, 10)


def test_an_item_that_was_removed_is_named(tmp_path):
    steps_of_items(tmp_path / "old", "params", "opt")
    shutil.rmtree(tmp_path / "old" / "5" / "opt")
    report = adopt(tmp_path / "old")
    assert report.adopted == (5,)
    assert report.left == ("5: item opt is not there, though Orbax names it",)


def test_an_item_that_lost_what_describes_it_is_damage(tmp_path):
    steps_of_items(tmp_path / "old", "params", "opt", steps=(5, 10))
    (tmp_path / "old" / "5" / "opt" / "_METADATA").unlink()
    report = adopt(tmp_path / "old")
    assert report.adopted == (10,)
    assert "trees that nothing describes" in report.problems[0]
    assert "opt/_METADATA" in report.problems[0]


@pytest.mark.parametrize("when", [10**30, -1, "soon", None])
def test_a_time_that_is_none_is_not_believed(tmp_path, when):
    manager(tmp_path / "old", steps=(5,))
    described = tmp_path / "old" / "5" / "_CHECKPOINT_METADATA"
    parsed = json.loads(described.read_text()) | {"commit_timestamp_nsecs": when}
    described.write_text(json.dumps(parsed))
    os.utime(described, ns=(0, 0))
    report = adopt(tmp_path / "old")
    assert report.adopted == (5,), report.problems
    assert np.datetime64(Run.open(report.run).latest().created.rstrip("Z")).item().year > 2020


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_leaves_that_orbax_has_kept_in_one_array_are_not_taken_for_two(tmp_path, use_ocdbt):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)
    tree = {"a.b": np.ones(3), "a": {"b": np.zeros(3)}}
    ocp.Checkpointer(handler).save(tmp_path / "old" / "1", tree)
    ocp.Checkpointer(handler).save(tmp_path / "old" / "2", TREE)
    report = adopt(tmp_path / "old")
    assert report.adopted == (2,)
    assert "leaves that are one array" in report.problems[0]
    assert "a.b, a/b" in report.problems[0]


def test_a_name_that_no_file_can_have_is_the_problem_of_its_step_alone(tmp_path):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    ocp.Checkpointer(handler).save(tmp_path / "old" / "1", {"": np.ones(3)})
    ocp.Checkpointer(handler).save(tmp_path / "old" / "2", TREE)
    report = adopt(tmp_path / "old")
    assert report.adopted == (2,)
    assert report.problems[0].startswith("1: stored data of a leaf is missing or damaged")


@pytest.mark.parametrize("layout", ["older trees", "older trees of small files"])
def test_chunks_that_are_not_stored_are_said_to_be(tmp_path, layout):
    READABLE[layout](tmp_path / "whole", TREE)
    assert adopt(tmp_path / "whole").left == ()
    READABLE["older trees of small files"](tmp_path / "lost", TREE | {"z": np.ones(3)})
    for step in (5, 10):
        (tmp_path / "lost" / f"checkpoint_{step}" / "w" / "0.0").unlink()
    report = adopt(tmp_path / "lost")
    assert report.adopted == (5, 10)
    text = "chunks are not stored, and are zeros unless they were lost: of state/w"
    assert [line.partition(":")[0] for line in report.left] == ["checkpoint_10", "checkpoint_5"]
    assert all(line.endswith(text) for line in report.left)


def test_a_copy_of_a_fork_is_adopted_with_digests_of_its_own(tmp_path):
    manager(tmp_path / "old", steps=(5,))
    source = Run.open(adopt(tmp_path / "old").run)
    fork_run(source, source.step(5), parse_uri(tmp_path / "fork"), by="me")
    shutil.copytree(tmp_path / "fork" / "attempts" / "1", tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("chunk_digests*"):
        path.write_text("{}")
    run = Run.open(adopt(tmp_path / "copy").run)
    assert verify_step(run, 5).ok
    assert load(run.uri, {"state": TREE})["state"]["w"].sum() == 16
    again = adopt(tmp_path / "copy")
    assert (again.kept, again.left) == ((5,), ())
