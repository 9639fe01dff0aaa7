"""Runs saved by some processes and continued by others: 2 -> 4, 4 -> 2, 4 -> 1."""

import re

import jax
import numpy as np
import pytest

from cairn import EasyDeLState, Run
from cairn.storage.arrays.ocdbt import is_data_file
from tests.multi_process.scenarios import digest, host_leaves
from tests.tiny import batch, compile_step

JOB_SECONDS = 240
pytestmark = pytest.mark.timeout(3 * JOB_SECONDS)


@pytest.fixture(scope="module")
def runs(bucket, tmp_path_factory):
    """One run in the GCS-protocol server, one in a folder that all processes share."""
    return [f"gs://{bucket}/run", str(tmp_path_factory.mktemp("shared") / "run")]


@pytest.fixture(scope="module")
def trained(launch, runs, tmp_path_factory):
    """Two processes with two devices each train three steps and save the second."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    job = launch("train", {"runs": runs, "folder": str(folder)}, count=2, devices=2)
    return job.results(JOB_SECONDS)


@pytest.fixture(scope="module")
def alone(trained, runs):
    """Step 2 as one process reads it, on one device."""
    state = EasyDeLState.load_state(f"{runs[0]}/steps/2", verbose=False)
    assert len(jax.tree.leaves(state.params)[0].devices()) == 1
    return state


@pytest.fixture(scope="module")
def by_four(trained, alone, launch, runs, gcs_server):
    """Four processes go on with what two saved, on other axes, and save step 3."""
    gcs_server.requests.clear()  # of which the server keeps so many
    aligned = f"{runs[0]}/steps/1"
    arguments = {"run": runs[0], "dims": [1, 2, 2, 1], "aligned": aligned, "save": True}
    results = launch("resume", arguments, count=4).results(JOB_SECONDS)
    return results, bytes_read(gcs_server, 1), bytes_read(gcs_server, 2)


def bytes_read(gcs_server, step):
    """Bytes read of a step's arrays, by all processes together."""
    return sum(
        served.answered
        for served in list(gcs_server.requests)
        if served.operation == "media.get"
        and re.search(rf"/attempts/1/{step}/(model|optimizer)/", served.name)
    )


def test_two_processes_store_what_they_hold(trained, alone):
    assert trained[0] == trained[1]
    assert digest(host_leaves(alone)) == trained[0]["digest"]
    assert alone.extras == {"position": 2}


def test_manifest_of_many_processes_describes_every_leaf(trained, runs):
    for uri in runs:
        run = Run.open(uri)
        manifest = run.manifest(run.step(2))
        assert manifest.environment["processes"] == 2
        leaves = run.contents(run.step(2)).leaves
        assert len(leaves) == manifest.leaf_count
        assert [leaf.path for leaf in leaves if leaf.chunks is None] == []
        assert [leaf.path for leaf in leaves if leaf.shards is None] == []
        assert manifest.nbytes > 12 << 20


def test_four_processes_restore_two_processes_state_and_go_on(trained, by_four):
    results, *_ = by_four
    assert [one["digest"] for one in results] == [trained[0]["digest"]] * 4
    assert [one["extras"] for one in results] == [{"position": 2}] * 4
    assert [one["attempt"] for one in results] == [2] * 4
    for one in results:
        np.testing.assert_allclose(one["loss"], trained[0]["losses"][2], rtol=1e-5)


def test_one_process_continues_with_an_equal_loss(trained, runs):
    state = EasyDeLState.load_state(
        f"{runs[0]}/steps/2",
        auto_shard_model=True,
        sharding_axis_dims=(2, 2, 2, 1),
        verbose=False,
    )
    _, loss = compile_step(state)(state, batch(2))
    np.testing.assert_allclose(float(loss), trained[0]["losses"][2], rtol=1e-5)


def test_one_process_reads_what_four_saved(by_four, runs):
    state = EasyDeLState.load_state(runs[0], verbose=False)
    assert int(state.step) == 3
    assert digest(host_leaves(state)) == by_four[0][0]["final"]


def test_gathered_and_exported_states_hold_every_value(trained, alone):
    tensors = {name: tensor.numpy() for name, tensor in alone.to_torch().items()}
    for one in trained:
        assert one["torch"] == digest(tensors)
        assert one["gathered"] == [True, one["digest"]]
        names, there = one["folder"]
        assert names == there
        assert sum(name.endswith(".safetensors") for name in names) > 1
        assert one["imported"]


def test_a_leaf_of_experts_whose_tensors_lie_in_several_files_is_exported(trained):
    assert [one["experts_imported"] for one in trained] == [True, True]


def test_four_processes_read_little_more_than_the_checkpoint(by_four, runs):
    _, aligned, across = by_four
    run = Run.open(runs[0])
    objects = run.contents(run.step(2)).objects
    whole = sum(record.size for record in objects if is_data_file(record.name))
    assert whole <= aligned < 1.25 * whole
    # Two of the four need a half of each stored chunk: chunks are read whole.
    assert across < 2.25 * whole


@pytest.fixture(scope="module")
def in_turn(trained, launch, runs, by_four, tmp_path_factory):
    """What two processes say, by scenario."""
    calls = {
        "hybrid": {"run": runs[1], "dims": [1, 4, 1, 1], "across": f"{runs[0]}/steps/3"},
        "merge": {"run": str(tmp_path_factory.mktemp("merged") / "run")},
    }
    return launch("in_turn", {"calls": calls}, count=2, devices=2).results(JOB_SECONDS)


@pytest.fixture(scope="module")
def by_two(in_turn):
    """Two processes go on with what two saved, from the shared folder."""
    return [told["hybrid"] for told in in_turn]


def test_two_processes_restore_what_four_saved(by_two, by_four):
    assert [one["across"] for one in by_two] == [by_four[0][0]["final"]] * 2


def test_hybrid_mesh_keeps_each_process_together_along_its_axis(by_two, trained):
    for one in by_two:
        assert one["owners"]["dp"] == [[0, 0], [1, 1]]
        assert one["owners"]["fsdp"] == [[0, 0, 1, 1]]
        assert one["owners"]["dp digest"] == trained[0]["digest"]
        assert one["owners"]["fsdp digest"] == trained[0]["digest"]


def test_adapters_of_two_processes_are_merged_and_go_on(in_turn):
    for told in (one["merge"] for one in in_turn):
        assert told["refused"].startswith("merge_lora: expected the same on every process")
        assert told["adapters"] == [True, False]
        assert told["resumed"]
        assert told["served"]


def test_two_processes_on_the_same_mesh_continue_bit_equal(by_two, trained):
    for one in by_two:
        assert one["digest"] == trained[0]["digest"]
        assert one["loss"] == trained[0]["losses"][2]
        assert one["final"] == trained[0]["final"]
