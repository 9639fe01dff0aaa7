import itertools
import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import Checkpointer, CheckpointReader, Run
from cairn.storage.reading import step_diff
from cairn.storage.reading.tensor_parts import TensorPart
from cairn.storage.runs.records.manifest import LeafRecord


def leaf(path, shape=(4,), dtype="float32", digest="words-64:1", item="model"):
    return LeafRecord(item=item, path=path, shape=shape, dtype=dtype, digest=digest)


def changes(this, other):
    found, equal = step_diff.diff_leaves(this, other)
    return {(one.item, one.path): one.change for one in found}, equal


def test_leaves_are_compared_by_their_digests():
    found, equal = changes(
        [leaf("same"), leaf("value"), leaf("shape"), leaf("dtype"), leaf("gone"), leaf("old")],
        [
            leaf("same"),
            leaf("value", digest="words-64:2"),
            leaf("shape", shape=(2, 2)),
            leaf("dtype", dtype="bfloat16"),
            leaf("new"),
            leaf("old", digest=None),
        ],
    )
    assert equal == 1
    assert found == {
        ("model", "value"): "values",
        ("model", "shape"): "shape",
        ("model", "dtype"): "dtype",
        ("model", "gone"): "only_this",
        ("model", "new"): "only_other",
        ("model", "old"): "undigested",
    }


def test_leaf_of_another_item_is_another_leaf():
    found, equal = changes([leaf("w")], [leaf("w", item="ema")])
    assert equal == 0
    assert found == {("ema", "w"): "only_other", ("model", "w"): "only_this"}


@pytest.fixture
def parts(tmp_path):
    """Saves two trees, and gives the leaf `w` of each."""

    steps = itertools.count(1)

    def saved(*leaves):
        found = []
        for step, values in zip(steps, leaves, strict=False):
            with Checkpointer(str(tmp_path / "run")) as checkpointer:
                checkpointer.save(step, {"model": {"w": values}}, meta={}).wait()
            run = Run.open(str(tmp_path / "run"))
            info = run.step(step)
            reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
            found.append(TensorPart.of(reader, "model", "w"))
        return found

    return saved


DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int32", "int64", "uint64", "int4", "bool")


@pytest.mark.parametrize("name", DTYPES)
def test_differences_are_those_of_the_numbers(parts, name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    draw = np.random.default_rng(0)
    this, other = (draw.integers(0, 5, (300, 40)).astype(dtype) for _ in range(2))
    found = step_diff.diff_values(*parts(this, other))
    far = other.astype(np.float64) - this.astype(np.float64)
    assert found.differing == np.count_nonzero(far)
    assert found.max_absolute == np.abs(far).max()
    assert found.change.norm == pytest.approx(np.linalg.norm(far))
    norm = np.linalg.norm(this.astype(np.float64))
    assert found.relative == pytest.approx(np.linalg.norm(far) / norm)


def test_other_dtypes_are_compared_where_float64_holds_both(parts):
    this = np.arange(100, dtype=np.float32) / 3
    found = step_diff.diff_values(*parts(this, this.astype(ml_dtypes.bfloat16)))
    assert 0 < found.differing < 100
    assert found.relative < 2**-8
    assert step_diff.diff_values(*parts(this, this.astype(np.int64))) is None
    assert step_diff.diff_values(*parts(this, this.astype(np.complex64))) is None


def test_differences_of_large_integers_are_not_rounded_away(parts):
    this = np.asarray([2**63 - 1, -(2**63), 2**60, 5], np.int64)
    other = np.asarray([2**63 - 2, 2**63 - 1, 2**60 + 1, 5], np.int64)
    found = step_diff.diff_values(*parts(this, other))
    assert found.differing == 3
    assert found.max_absolute == 2.0**64
    assert found.change.min == -1.0
    assert found.change.zeros == 1


def test_what_is_not_finite_is_equal_to_its_like_alone(parts):
    inf, nan = np.inf, np.nan
    this = np.asarray([nan, inf, -inf, nan, 1, inf, 0.0], np.float32)
    other = np.asarray([nan, inf, -inf, 1, nan, -inf, -0.0], np.float32)
    found = step_diff.diff_values(*parts(this, other))
    assert found.differing == 3
    assert (found.change.nan, found.change.negative_infinity) == (2, 1)
    assert found.max_absolute == 0.0


def test_complex_numbers_differ_by_their_distance(parts):
    this = np.asarray([1 + 1j, 2, 3], np.complex64)
    found = step_diff.diff_values(*parts(this, this + np.asarray([3 + 4j, 0, 0], np.complex64)))
    assert (found.differing, found.max_absolute) == (1, 5.0)
    assert found.norm == pytest.approx(np.linalg.norm(this))


def test_leaves_of_other_shapes_are_not_compared(parts):
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\)"):
        step_diff.diff_values(*parts(np.zeros(2), np.zeros(3)))


def test_nothing_differs_from_nothing(parts):
    found = step_diff.diff_values(*parts(np.zeros((0, 3)), np.zeros((0, 3))))
    assert (found.differing, found.max_absolute, found.relative) == (0, None, None)


def test_what_was_all_zero_has_no_relative_change(parts):
    found = step_diff.diff_values(*parts(np.zeros(3), np.ones(3)))
    assert (found.differing, found.relative) == (3, None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_an_object_does_not_differ_from_itself(value):
    again = json.loads(json.dumps(value))
    assert step_diff.diff_entries(again, json.loads(json.dumps(value))) == []


def test_entries_are_told_by_their_path():
    found = step_diff.diff_entries(
        {"a": 1, "rope": {"theta": 1e4, "type": "x"}, "gone": None, "b": True, "n": float("nan")},
        {"a": 2, "rope": {"theta": 5e5, "type": "x"}, "new": [1], "b": 1, "n": float("nan")},
    )
    assert {(one.path, one.change, one.this, one.other) for one in found if one.path != "new"} == {
        ("a", "changed", 1, 2),
        ("b", "changed", True, 1),
        ("gone", "only_this", None, None),
        ("rope/theta", "changed", 1e4, 5e5),
    }
    (new,) = [one for one in found if one.path == "new"]
    assert (new.change, new.this, new.other) == ("only_other", None, [1])
