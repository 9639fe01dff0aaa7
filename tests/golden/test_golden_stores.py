"""Stores that earlier releases wrote still open, load, verify and go on. README.md lists them."""

import hashlib
import json
import shutil
from pathlib import Path

import google_crc32c
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

from cairn import (
    Alias,
    AliasNotFoundError,
    Annotation,
    CheckpointReader,
    EasyDeLState,
    Lease,
    Manifest,
    Run,
    RunInfo,
    StepState,
    Tombstone,
    check_run,
    collect_garbage,
    delete_step,
    find_garbage,
    fork_run,
    list_runs,
    parse_uri,
    promote_step,
    resolve_checkpoint,
    undelete_step,
    verify_step,
)
from cairn.state.checkpointing import trees
from cairn.state.checkpointing.restore import open_step, restore_item, stored_tree
from cairn.storage.runs.records.assets import read_asset
from cairn.storage.runs.records.exports import ExportKey, ExportManifest, find_export
from cairn.storage.runs.records.layout import annotation_file
from tests.storage.records import AttemptRecord
from tests.storage.states import mesh

GOLDEN = Path(__file__).parent
PROBE_FILE = ".cairn-store.json"
KEY_IMPLS = {"dropout": "threefry2x32", "batch": "rbg"}


RELEASES = ("0.1.0",)
VERSION = 1
"""Of every record."""


class Store:
    """A copy of a golden store, and what the release that wrote it read in it."""

    def __init__(self, name, root):
        self.name = name
        self.root = root
        self.expected = json.loads((root / "expected.json").read_text())
        self.steps = self.expected["runs"]["my-run"]["steps"]
        self.by_key = {(one["step"], one["attempt"]): one for one in self.steps}
        self.run = Run.open(root / "my-run")

    def key(self, step):
        """(step, attempt) of the one that was listed."""
        return self.key_of(step, "listed")

    def key_of(self, step, state):
        """(step, attempt) of the one that was in this state."""
        (attempt,) = [
            one["attempt"] for one in self.steps if (one["step"], one["state"]) == (step, state)
        ]
        return step, attempt

    def leaves(self, step, item):
        return self.by_key[self.key(step)]["leaves"][item]

    def listed(self):
        return [one for one in self.steps if one["state"] == "listed"]


@pytest.fixture(params=RELEASES)
def store(request, tmp_path):
    shutil.copytree(GOLDEN / request.param, tmp_path / "store")
    return Store(request.param, tmp_path / "store")


def described(leaf):
    """As expected.json has it."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.ascontiguousarray(np.asarray(leaf)).reshape(np.shape(leaf))
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    return f"{array.dtype.name}{list(array.shape)} sha256:{digest}"


def described_all(leaves):
    return {path: described(leaf) for path, leaf in sorted(leaves.items())}


def assert_all_reads(run, expected_steps):
    """Every leaf, the JSON and every file of these steps are what they were."""
    for one in expected_steps:
        key = one["step"], one["attempt"]
        (info,) = [info for info in run.all_states() if (info.step, info.attempt) == key]
        reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
        for item, leaves in one["leaves"].items():
            found = {path: reader.read(item, path) for path in reader.leaves(item)}
            assert described_all(found) == leaves, (key, item)
        assert reader.items() == sorted(one["leaves"]), key
        assert reader.meta() == one["meta"], key
        report = verify_step(run, info)
        assert report.ok, (key, report.problems)
        assert not report.extra, key
        assert report.files > 0
        assert report.leaves == sum(map(len, one["leaves"].values()))


def tree_of(state, item):
    if item == "optimizer":
        return trees.flatten(state.opt_state)
    return {
        **trees.flatten(nnx.to_pure_dict(state.graphother)),
        **trees.flatten(state.params),
    }


def records_of(run):
    """The files of a run's records: not those of its steps and exports."""
    for path in run.rglob("*.json"):
        folder, *names = path.relative_to(run).parts
        if len(names) <= {"attempts": 1, "exports": 2}.get(folder, len(names)):
            yield path


def test_all_folders_are_known():
    folders = {path.name for path in GOLDEN.iterdir() if (path / "expected.json").exists()}
    assert folders == set(RELEASES)


def test_the_store_is_of_the_release_that_it_is_named_after(store):
    assert store.expected["release"] == store.name
    records = 0
    runs = (store.root / "my-run", store.root / "forked")
    ids = {run.name: json.loads((run / "run.json").read_bytes())["run"] for run in runs}
    assert len(set(ids.values())) == 2
    for run in runs:
        for path in records_of(run):
            record = json.loads(path.read_bytes())
            assert record["version"] == VERSION, path
            place = (path.relative_to(run).as_posix(), ids[run.name])
            assert (record["key"], record["run"]) == place, path
            records += 1
    assert records > 20
    assert_each_record_tells_of_another(store)
    step = store.root / "my-run/attempts" / str(store.key(5)[1]) / "5"
    metadata = json.loads((step / "_CHECKPOINT_METADATA").read_bytes())
    assert metadata["custom_metadata"]["cairn"]["forms"]["mixed"]["int4"][0] == "packed"
    compressed = {
        leaf.compression
        for info in store.run.steps()
        for leaf in store.run.contents(info).leaves
        if info.step in (6, 7)
    }
    assert "zstd" in compressed
    shared = {info.step: store.run.contents(info).shared_files for info in store.run.steps()}
    assert [step for step, files in shared.items() if files] == [9]
    assert [one.step for one in shared[9]] == [8]


def assert_each_record_tells_of_another(store):
    """An attempt names the one before it, the lease the newest, and a step."""
    run = store.root / "my-run"
    attempts = {
        int(path.stem): json.loads(path.read_bytes()) for path in run.glob("attempts/*.json")
    }
    lease = json.loads((run / "lease.json").read_bytes())
    told = [attempts[number]["previous"] for number in sorted(attempts)]
    begun = [[number, attempts[number]["base_step"]] for number in sorted(attempts)]
    assert [*told, lease["begun"]] == [[0, -1], *begun]
    latest = store.run.latest()
    assert lease["durable"] == [latest.step, latest.attempt]


def place_of_marker(path):
    """Where a marker of Orbax says that it lies: a fork has its parent's."""
    return "/".join(path.parent.parts[path.parts.index("attempts") :])


def test_the_store_names_no_machine(store):
    places = (b"/tmp", b"/root", b"/home", b"/Users")
    for path in (GOLDEN / store.name).rglob("*"):
        if path.is_file() and path.parent.name not in ("d", "b"):  # bytes of arrays: anything
            data = path.read_bytes()
            assert not [place for place in places if place in data], path
        if path.name == "commit_success.txt":
            assert path.read_text().endswith(f" /golden/my-run/{place_of_marker(path)}"), path
    known = json.loads((store.root / PROBE_FILE).read_bytes())["store"]
    assert known == {"scheme": "file", "kind": "ext4", "source": "/dev/golden"}
    for info in store.run.steps():
        manifest = store.run.manifest(info)
        assert manifest.environment["host"] == "golden"
        assert manifest.writer == "golden-job"


def test_runs_steps_and_their_states(store):
    assert list_runs(store.root) == sorted(store.expected["runs"])
    for name, expected in store.expected["runs"].items():
        run = Run.open(store.root / name)
        info = run.info()
        lineage = info.lineage and info.lineage.model_dump()
        assert (info.name, info.created, lineage) == (
            expected["name"],
            expected["created"],
            expected["lineage"],
        )
        attempts = [[one.number, one.base_step, one.writer, one.at] for one in run.attempts()]
        assert attempts == expected["attempts"]
        fields = ("step", "attempt", "created", "nbytes", "manifest_digest")
        found = [
            {field: getattr(one, field) for field in fields} | {"state": one.state.value}
            for one in run.all_states()
        ]
        assert found == [
            {field: one[field] for field in (*fields, "state")} for one in expected["steps"]
        ]
        listed = {
            one["step"]: one["attempt"] for one in expected["steps"] if one["state"] == "listed"
        }
        assert run.step_attempts() == listed
        assert [one.step for one in run.steps()] == sorted(listed)
        assert run.latest().step == max(listed)
        assert run.unpublished() == []


def test_labels_metrics_and_assets(store):
    seen = set()
    for info in store.run.all_states():
        expected = store.by_key[info.step, info.attempt]
        found = store.run.objects.read(annotation_file(info.step, info.attempt))
        assert (found is None) == (expected["labels"] is None)
        if found is not None:
            annotation = Annotation.parse(found.value, "annotation")
            assert annotation.labels == expected["labels"]
            metrics = {name: float(value) for name, value in expected["metrics"].items()}
            np.testing.assert_equal(annotation.metrics, metrics)
            seen |= set(metrics)
            assert annotation.to_bytes() == found.value
        assets = store.run.manifest(info).assets
        assert {asset.name: asset.sha256 for asset in assets} == expected["assets"]
        for asset in assets:
            content = read_asset(store.run.objects, asset)
            assert hashlib.sha256(content).hexdigest() == asset.sha256
            seen.add(asset.name)
    assert seen == {"accuracy", "loss", "top", "notes.txt", "tokenizer_config.json"}


def test_every_leaf_of_every_step_reads_and_verifies(store):
    assert len(store.listed()) >= 3
    for name, expected in store.expected["runs"].items():
        assert_all_reads(Run.open(store.root / name), expected["steps"])


def test_records_are_written_again_as_they_were_read(store):
    """So that a digest that is taken of a record is that of what is stored."""
    kinds = {
        "cairn.alias": Alias,
        "cairn.attempt": AttemptRecord,
        "cairn.annotation": Annotation,
        "cairn.export": ExportManifest,
        "cairn.lease": Lease,
        "cairn.manifest": Manifest,
        "cairn.run": RunInfo,
        "cairn.tombstone": Tombstone,
    }
    seen = set()
    for path in records_of(store.root / "my-run"):
        data = path.read_bytes()
        kind = json.loads(data)["format"]
        if kind in kinds:
            assert kinds[kind].parse(data, path).to_bytes() == data, path
        seen.add(kind)
    assert seen >= kinds.keys()


def test_a_damaged_value_is_found(store):
    step, attempt = store.key(1)
    folder = store.root / f"my-run/attempts/{attempt}/{step}/model"
    values = max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(values.read_bytes())
    data[len(data) // 2] ^= 1
    values.write_bytes(data)
    assert not verify_step(store.run, step).ok


def test_aliases_and_their_history(store):
    expected = store.expected["runs"]["my-run"]["aliases"]
    found = [one.model_dump(exclude={"token"}) for one in store.run.aliases.list()]
    assert json.loads(json.dumps(found)) == expected
    history = [one.model_dump() for one in store.run.aliases.history("candidate")]
    assert history == store.expected["deleted_alias_history"]
    assert history[0]["deleted"]
    assert store.run.aliases.get("candidate") is None
    _, info = resolve_checkpoint(f"{store.run.uri}@production")
    assert (info.step, info.attempt, info.state) == (*store.key(3), StepState.LISTED)
    with pytest.raises(AliasNotFoundError):
        resolve_checkpoint(f"{store.run.uri}@candidate")

    moved = promote_step(store.run, info.step, "production", expect=3)
    assert moved.sequence == 4
    assert [one.step for one in moved.history] == [1, 2, 3, 3]


def test_a_state_loads_with_an_optimizer_given_and_with_the_stored_one(store):
    given = EasyDeLState.load_state(
        f"{store.run.uri}/steps/1", tx=optax.adamw(1e-2), optimizer="require", verbose=False
    )
    stored = EasyDeLState.load_state(f"{store.run.uri}/steps/1", optimizer="require", verbose=False)
    assert stored.tx_init is not None
    for state in (given, stored):
        assert int(state.step) == 1
        assert dict(state.extras) == {"position": 1}
        assert set(state.model.config.tokenizer_files) == {"tokenizer_config.json"}
        for item in ("model", "optimizer"):
            assert described_all(tree_of(state, item)) == store.leaves(1, item)


def test_a_state_loads_onto_another_mesh(store):
    for step in [one["step"] for one in store.listed() if "model" in one["leaves"]]:
        state = EasyDeLState.load_state(
            f"{store.run.uri}/steps/{step}",
            auto_shard_model=True,
            sharding_axis_dims=(1, 2, 1, 4),
            verbose=False,
        )
        assert any(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(state.params))
        for item in store.by_key[store.key(step)]["leaves"]:
            assert described_all(tree_of(state, item)) == store.leaves(step, item)


def test_leaves_of_every_kind_restore_onto_another_mesh(store):
    rows = jax.sharding.NamedSharding(mesh(4), jax.sharding.PartitionSpec("fsdp"))
    whole = jax.sharding.NamedSharding(mesh(4), jax.sharding.PartitionSpec())
    for one in [one for one in store.listed() if "mixed" in one["leaves"]]:
        step = open_step(store.run.uri / f"attempts/{one['attempt']}/{one['step']}")
        for item, leaves in one["leaves"].items():
            if item == "meta":
                continue
            target = {
                path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                if leaf.dtype == np.float64  # no array of JAX here
                else jax.ShapeDtypeStruct(
                    leaf.shape,
                    leaf.dtype,
                    sharding=rows if leaf.shape[:1] == (8,) else whole,
                )
                for path, leaf in stored_tree(step, item).items()
            }
            target = {
                path: np.zeros(leaf.shape, leaf.dtype) if leaf.sharding is None else leaf
                for path, leaf in target.items()
            }
            found = restore_item(step, item, trees.nest(target))
            assert described_all(trees.flatten(found)) == leaves, item
            for name, impl in KEY_IMPLS.items() if item == "keys" else ():
                assert str(jax.random.key_impl(found[name])) == impl


def test_what_was_rolled_back_stays_aside_and_a_deleted_step_comes_back(store):
    def aside():
        return [
            (info.step, info.attempt)
            for info in store.run.all_states()
            if info.state is StepState.SUPERSEDED
        ]

    before = aside()
    assert before == [(3, 1), (4, 2)]
    trashed = [
        (info.step, info.attempt)
        for info in store.run.all_states()
        if info.state is StepState.TRASHED
    ]
    assert trashed == [store.key_of(4, "trashed")]
    assert 4 not in store.run.step_attempts()
    undelete_step(store.run, *trashed[0])
    assert store.run.step_attempts()[4] == trashed[0][1]
    assert_all_reads(store.run, [store.by_key[trashed[0]]])
    assert aside() == before


def test_keys_restore_as_they_were_given(store):
    empty = np.zeros((8, 16), np.float32)
    target = dict.fromkeys(("model.layers.0.weight", "linear/~/w", "100%2F"), empty)
    target |= {"linear": {"~": {"w": empty}}, "step": np.int32(0)}
    for number in (8, 9):
        step = open_step(store.run.step_uri(store.run.step(number)))
        found = restore_item(step, "named", target)
        assert found.keys() == target.keys()
        assert described_all(trees.flatten(found)) == store.leaves(number, "named")
        assert found["step"] == number
        np.testing.assert_array_equal(found["linear/~/w"], -found["model.layers.0.weight"])
        np.testing.assert_array_equal(found["linear"]["~"]["w"], 2 * found["model.layers.0.weight"])


def link_shared_files(store):
    """As the release had it on its disk: git and the fixture made copies."""
    for info in store.run.steps():
        for one in store.run.contents(info).shared_files:
            writer = store.root / f"my-run/attempts/{one.attempt}/{one.step}"
            for name in one.files:
                path = Path(store.run.step_uri(info).local_path) / name
                path.unlink()
                path.hardlink_to(writer / name)


def test_a_step_stays_whole_when_the_one_that_it_shares_files_with_goes(store):
    link_shared_files(store)
    folder = Path(store.run.step_uri(store.run.step(8)).local_path)
    assert [path for path in folder.rglob("d/*") if path.stat().st_nlink == 2]
    delete_step(store.run, store.run.step(8), by="test", grace=0)
    assert [one.step for one in collect_garbage(store.run, by="test")] == [8]
    assert not folder.exists()
    assert_all_reads(store.run, [store.by_key[store.key(9)]])


def test_the_records_fit_together(store):
    for name in store.expected["runs"]:
        assert check_run(Run.open(store.root / name)).problems == ()


def test_no_listed_step_is_garbage(store):
    expected = store.by_key
    for garbage in find_garbage(store.run):
        assert expected[garbage.step, garbage.attempt]["state"] != "listed", garbage


def test_the_run_goes_on(store):
    before = store.run.all_states()
    latest = store.run.latest_step()
    state = EasyDeLState.load_state(f"{store.run.uri}/steps/1", verbose=False)
    handle = state.save_state(str(store.run.uri), step=latest + 1, verbose=False, wait=True)
    assert handle.attempt == store.run.attempts()[-1].number
    assert handle.attempt == len(store.expected["runs"]["my-run"]["attempts"]) + 1
    assert store.run.latest_step() == latest + 1
    assert verify_step(store.run, latest + 1).ok
    again = EasyDeLState.load_state(str(store.run.uri), verbose=False)
    for item in ("model", "optimizer"):
        assert described_all(tree_of(again, item)) == store.leaves(1, item)
    assert [info for info in store.run.all_states() if info.step <= latest] == before
    assert_all_reads(store.run, store.steps)


def test_an_old_step_can_be_overwritten(store):
    state = EasyDeLState.load_state(f"{store.run.uri}/steps/1", verbose=False)
    state.save_state(str(store.run.uri), step=2, overwrite=True, verbose=False, wait=True)
    assert sorted(store.run.step_attempts()) == [1, 2]
    aside = [info for info in store.run.all_states() if info.state is StepState.SUPERSEDED]
    assert (2, 1) in [(info.step, info.attempt) for info in aside]
    assert verify_step(store.run, 2).ok


def test_forks_of_old_steps(store):
    forked = Run.open(store.root / "forked")
    source = store.run.step(2)
    lineage = forked.info().lineage
    assert (lineage.step, lineage.attempt) == (source.step, source.attempt)
    assert lineage.manifest_digest == source.manifest_digest

    target = parse_uri(store.root / "again")
    for step in {1, 5, store.run.latest_step()}:
        info = fork_run(store.run, store.run.step(step), target / f"of-{step}", by="test")
        assert info.copied.files == len(store.run.contents(store.run.step(step)).objects)
        run = Run.open(target / f"of-{step}")
        assert verify_step(run, step).ok
        assert run.contents(info).shared_files == ()  # a fork copies
        assert run.info().lineage.manifest_digest == store.run.step(step).manifest_digest
        expected = {**store.by_key[store.key(step)], "attempt": info.attempt}
        assert_all_reads(run, [expected])


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_plain_orbax_reads_the_arrays(store):
    for run, step in ((store.run, 1), (store.run, 2), (Run.open(store.root / "forked"), 2)):
        folder = run.step_uri(run.step(step)).local_path
        tree = ocp.load(folder, checkpointable_name="model")
        assert described_all(trees.flatten(tree)) == store.leaves(step, "model")


def test_the_export_still_counts(store):
    expected = store.expected["export"]
    key = ExportKey.of(
        **{name: expected[name] for name in ("step", "attempt", "kind", "source", "options")},
        rule_version=expected["rule_version"],
    )
    assert key.manifest == expected["manifest"]
    found = find_export(store.run.objects, key)
    assert found.source == store.run.step(1).manifest_digest
    assert [file.model_dump() for file in found.files] == expected["files"]
    folder = store.root / "my-run" / key.try_folder(found.folder)
    for file in found.files:
        data = (folder / file.name).read_bytes()
        assert (len(data), f"{google_crc32c.value(data):08x}") == (file.size, file.crc32c)
