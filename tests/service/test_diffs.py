import gc
import tracemalloc
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from cairn import Checkpointer, CheckpointReader, Run, adopt, annotate_step
from cairn.service.actions.caches import StepCache
from cairn.storage.runs.records.layout import INDEX_FILE
from tests.service.seams import caches
from tests.service.test_tensors import damage
from tests.storage.plain_steps import as_plain_step

CHECKPOINTS = "/v1/roots/default/runs/{run}/checkpoints"


def save(root, name, *trees, **options):
    with Checkpointer(str(root / name)) as checkpointer:
        for step, tree in enumerate(trees, 1):
            checkpointer.save(step, tree, meta={}, **options).wait()
    return Run.open(str(root / name))


def ask(http, step=1, other=2, run="run", **parameters):
    url = CHECKPOINTS.format(run=run)
    return http.get(f"{url}/{step}:diff", params={"other": other} | parameters)


def diff(http, *steps, **parameters):
    answer = ask(http, *steps, **parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def kernel(scale=1.0, shape=(8, 6)):
    return (np.arange(np.prod(shape), dtype=np.float32) * scale).reshape(shape)


THIS = {
    "model": {"same": kernel(), "scaled": kernel(), "cast": kernel(), "grown": kernel()},
    "optimizer": {"count": np.int32(1)},
}
OTHER = {
    "model": {
        "same": kernel(),
        "scaled": kernel(1.5),
        "cast": kernel().astype(np.float16),
        "grown": kernel(shape=(9, 6)),
        "added": kernel(),
    },
    "optimizer": {"count": np.int32(2)},
}


@pytest.fixture
def unlike(root):
    return save(root, "run", THIS, OTHER)


@pytest.fixture
def unread(monkeypatch):
    """No values are read."""

    def refuse(*arguments, **options):
        raise AssertionError("values were read")

    monkeypatch.setattr(CheckpointReader, "iter_blocks", refuse)
    monkeypatch.setattr(CheckpointReader, "read", refuse)


def test_differing_leaves_are_named_with_what_differs(http, unlike, unread):
    found = diff(http)
    assert (found["this"]["step"], found["other"]["step"]) == (1, 2)
    assert found["equal"] is False
    assert found["leaves"] == {
        "equal": 1,
        "values": 2,
        "dtype": 1,
        "shape": 1,
        "only_this": 0,
        "only_other": 1,
        "undigested": 0,
    }
    told = {(one["item"], one["path"]): one for one in found["differences"]}
    assert list(told) == sorted(told)
    assert {path: one["change"] for (_, path), one in told.items()} == {
        "added": "only_other",
        "cast": "dtype",
        "count": "values",
        "grown": "shape",
        "scaled": "values",
    }
    added, grown = told["model", "added"], told["model", "grown"]
    assert (added["this"], added["other"]["shape"]) == (None, [8, 6])
    assert (grown["this"]["shape"], grown["other"]["shape"]) == ([8, 6], [9, 6])
    assert {one["values"] for one in told.values()} == {None}


def test_steps_that_were_compared_are_not_read_again(http, unlike, unread, monkeypatch):
    first = diff(http)
    there_and_back = diff(http, 2, 1)

    def refuse(*arguments, **options):
        raise AssertionError("leaves were read")

    with monkeypatch.context() as patched:
        patched.setattr(StepCache, "open", refuse)
        assert diff(http) == first
        assert diff(http, 2, 1) == there_and_back
        assert [one["path"] for one in diff(http, item="optimizer")["differences"]] == ["count"]


def test_what_is_known_stays_within_its_bounds():
    known, asked = caches.LRUCache(10, len), []

    def get(name, size):
        return known.get(name, lambda: asked.append(name) or name * size)

    for name, size in (("a", 4), ("b", 4), ("a", 4), ("c", 4), ("a", 4), ("b", 4)):
        assert get(name, size) == name * size
    assert asked == ["a", "b", "c", "b"]
    get("d", 99)
    assert get("d", 99) == "d" * 99, "what is larger is kept alone"
    assert get("a", 4) == "aaaa"
    assert asked[4:] == ["d", "a"]


def test_a_kept_difference_takes_half_a_kilobyte(root):
    count = 300
    trees = [{f"layers/{n:04}/kernel": np.full(2, n + one) for n in range(count)} for one in (0, 1)]
    run = save(root, "run", *trees)
    this, other = (StepCache().open(run, run.step(step)) for step in (1, 2))
    _ = this.leaves, other.leaves
    gc.collect()
    tracemalloc.start()
    changes = caches.StepChanges.between(this, other)
    del this, other, run
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(changes.leaves) == count
    assert size / count < 512


def test_values_of_differing_leaves_are_compared_when_asked(http, unlike):
    told = {one["path"]: one["values"] for one in diff(http, values=True)["differences"]}
    assert (told["added"], told["grown"]) == (None, None)
    scaled = told["scaled"]
    assert (scaled["elements"], scaled["differing"]) == (48, 47)
    assert scaled["max_absolute"] == 0.5 * 47
    assert scaled["relative"] == pytest.approx(0.5)
    assert scaled["norm"] == pytest.approx(np.linalg.norm(kernel(0.5)))
    assert (told["cast"]["differing"], told["cast"]["max_absolute"]) == (0, 0)
    assert (told["count"]["mean"], told["count"]["relative"]) == (1, 1)


def test_the_other_way_round_the_differences_are_the_opposite(http, unlike):
    there, back = (
        {one["path"]: one for one in diff(http, *steps, values=True)["differences"]}
        for steps in ((1, 2), (2, 1))
    )
    assert there["count"]["values"]["mean"] == -back["count"]["values"]["mean"]
    assert back["added"]["change"] == "only_this"


def test_equal_steps_are_told_from_their_manifests_alone(http, root, unread):
    run = save(root, "run", THIS, THIS)
    for step in (1, 2):
        Path(run.step_uri(run.step(step)).local_path, INDEX_FILE).unlink()
    found = diff(http, values=True)
    assert (found["equal"], found["leaves"]["equal"], found["differences"]) == (True, 5, [])


def test_steps_of_two_runs_are_compared(http, root, unread):
    save(root, "run", THIS)
    save(root, "rival", OTHER, THIS)
    assert diff(http, 1, 2, other_run="rival")["equal"] is True
    assert diff(http, 1, 1, other_run="rival")["equal"] is False


def test_plain_steps_and_new_ones_are_compared(http, root, unread):
    run = save(root, "run", THIS, THIS, OTHER)
    as_plain_step(run, run.step(1))
    found = diff(http, 1, 2)
    assert (found["equal"], found["leaves"]["equal"]) == (True, 5)
    assert diff(http, 1, 3)["leaves"]["values"] == 2


def test_leaves_without_digests_are_told_apart_by_their_values(http, root, tmp_path):
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        for step in (1, 2):
            checkpointer.save(
                tmp_path / "plain" / str(step), args=ocp.args.StandardSave(THIS["model"])
            )
    adopt(str(tmp_path / "plain"), str(root / "run"))
    found = diff(http, values=True)
    assert found["equal"] is (found["leaves"]["undigested"] == 0)
    assert all(one["values"]["differing"] == 0 for one in found["differences"])


def test_metrics_labels_and_configuration_are_compared(http, root):
    run = save(root, "run", THIS, THIS, THIS)
    annotate_step(run, 1, metrics={"loss": 2.0, "nan": float("nan")}, labels={"stage": "warm"})
    annotate_step(run, 2, metrics={"loss": 1.0, "nan": float("nan"), "acc": 0.5})
    found = diff(http)
    assert found["equal"] is True
    assert found["metrics"] == [
        {"path": "acc", "change": "only_other", "this": None, "other": 0.5},
        {"path": "loss", "change": "changed", "this": 2.0, "other": 1.0},
    ]
    assert found["labels"] == [
        {"path": "stage", "change": "only_this", "this": "warm", "other": None}
    ]


@pytest.mark.parametrize("page_size", [1, 2, 1000])
def test_pages_have_every_difference_once_in_order(http, unlike, page_size):
    found, token = [], {}
    while token is not None:
        page = diff(http, page_size=page_size, values=True, **token)
        assert page["leaves"]["equal"] == 1
        found += [(one["item"], one["path"]) for one in page["differences"]]
        token = page["next_page_token"] and {"page_token": page["next_page_token"]}
    model = [("model", path) for path in ("added", "cast", "grown", "scaled")]
    assert found == [*model, ("optimizer", "count")]


def test_differences_are_cut_by_item_and_prefix(http, unlike):
    def paths(**parameters):
        return [one["path"] for one in diff(http, **parameters)["differences"]]

    assert paths(item="optimizer") == ["count"]
    assert paths(prefix="s") == ["scaled"]
    assert paths(item="optimizer", prefix="s") == []


def test_page_ends_where_too_much_would_be_read(http, unlike, monkeypatch):
    monkeypatch.setattr("cairn.service.actions.diffs.MAX_COMPARED_BYTES", 300)
    found = diff(http, values=True)
    assert [one["path"] for one in found["differences"]] == ["added", "cast", "grown"]
    token = found["next_page_token"]
    found = diff(http, values=True, page_token=token)
    assert [one["path"] for one in found["differences"]] == ["scaled", "count"]
    assert "cairn diff" in found["differences"][0]["not_compared"]


def test_damaged_values_are_never_compared(http, unlike):
    damage(unlike, every=32)
    answer = ask(http, values=True, prefix="scaled")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cairn:problem:corrupt")


def test_steps_that_are_not_there_are_named(http, unlike):
    for steps, parameters, kind in (
        ((3, 1), {}, "step-not-found"),
        ((1, 3), {}, "step-not-found"),
        ((1, 1), {"other_run": "nothing"}, "run-not-found"),
        ((1, 1), {"other_root": "nowhere"}, "root-not-found"),
    ):
        answer = ask(http, *steps, **parameters)
        assert (answer.status_code, answer.json()["type"]) == (404, f"urn:cairn:problem:{kind}")


@pytest.mark.parametrize(
    "parameters", [{"other": "x"}, {"other": -1}, {"other_run": "../up"}, {"othr": 1}]
)
def test_odd_questions_are_refused(http, unlike, parameters):
    assert ask(http, **parameters).status_code == 422
