"""The leaves of a model in somebody's tree, as a map says them."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

from cairn import CheckpointReader, ModelInfo, ModelMap, PreconditionFailedError, Run, adopt
from tests.plain_orbax import manager

LEAVES = {"a": np.zeros((4, 4), np.float32), "b": np.ones((4, 4), np.float32)}
RULES = {r"state/(a|b)": r"\1"}
SWAPPED = {r"state/a": "b", r"state/b": "a"}


def model(rules: dict[str, str]) -> ModelMap:
    return ModelMap(ModelInfo(model_type="tiny"), {"a": (4, 4), "b": (4, 4)}, rules)


def test_another_map_of_the_same_model_is_refused(tmp_path):
    manager(tmp_path / "old", LEAVES, steps=(5,))
    assert adopt(tmp_path / "old", model=model(RULES)).adopted == (5,)
    manager(tmp_path / "old", LEAVES, steps=(10,))
    for other in (SWAPPED, {}):
        with pytest.raises(PreconditionFailedError, match="adopted with another model"):
            adopt(tmp_path / "old", model=model(other))
    same = {r"state/a": "a", r"state/b": "b"}
    assert adopt(tmp_path / "old", model=model(same)).adopted == (10,)
    other = adopt(tmp_path / "old", tmp_path / "swapped", model=model(SWAPPED))
    assert other.adopted == (5, 10)
    run = Run.open(other.run)
    reader = CheckpointReader.open(run.step_uri(run.latest()), run.manifest(run.latest()))
    assert reader.read("model", "a").sum() == 16


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8"])
def test_leaves_that_are_no_weights_are_not_mapped_to_weights(tmp_path, dtype):
    manager(tmp_path / "old", LEAVES | {"a": np.ones((4, 4), dtype)}, steps=(5,))
    report = adopt(tmp_path / "old", model=model(RULES))
    assert report.adopted == ()
    assert not (tmp_path / "old.cairn").exists()
    assert f"state/a: mapped to a, which is floating, stored {dtype}" in report.problems[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float64"])
def test_weights_may_be_of_any_floating_dtype(tmp_path, dtype):
    leaves = {name: np.asarray(leaf, np.dtype(dtype)) for name, leaf in LEAVES.items()}
    manager(tmp_path / "old", leaves, steps=(5,))
    assert adopt(tmp_path / "old", model=model(RULES)).adopted == (5,)


def test_text_beside_the_leaves_of_a_model_stays_in_its_own_item(tmp_path):
    ocp.PyTreeCheckpointer().save(tmp_path / "old" / "5", LEAVES | {"note": "of the owner"})
    report = adopt(tmp_path / "old", model=model(RULES))
    run = Run.open(report.run)
    reader = CheckpointReader.open(run.step_uri(run.latest()), run.manifest(run.latest()))
    assert reader.items() == ["model", "state"]
    assert reader.texts("state") == {"note": "of the owner"}
    assert reader.texts("model") == {}
    assert reader.leaves("state") == {}
