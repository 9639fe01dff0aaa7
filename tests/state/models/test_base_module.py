import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import (
    CausalLMOutput,
    ShardingError,
    TaskType,
    TreeStructureError,
    UnknownModelError,
)
from cairn.state.model_classes import find
from cairn.state.paths import named_leaves
from cairn.state.sharding.mesh import mesh_of
from tests.state.my_model import MyModel, MyModelConfig, batch, my_model


@pytest.fixture
def model():
    return my_model()


def leaves_by_path(tree):
    return {named.path: named.leaf for named in named_leaves(tree)}


def test_a_model_tells_what_it_is(model):
    assert model.config == MyModelConfig(sharding_axis_dims=(2, 4, 1, 1))
    assert model.model_type == "my-model-of-the-tests"
    assert model.model_task is TaskType.CAUSAL_LM
    assert dict(model.mesh.shape) == {"dp": 2, "fsdp": 4, "tp": 1, "sp": 1}
    assert model.num_parameters == 256 * 64 + 2 * (64 * 64 + 64)
    assert model.module_dtype == jnp.float32
    assert not model.is_quantized
    assert not model.lora_is_enabled
    shapes = model.graphtree_params_shape
    assert shapes["layers"][1]["kernel"] == jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert model.params["embed_tokens"]["embedding"].shape == (256, 64)


def test_parameters_that_do_not_fit_are_all_listed_and_none_is_taken(model):
    before = model(batch())
    params = model.split_params_dict()
    del params["layers"][0]["bias"]
    params["layers"][1]["kernel"] = jnp.zeros((64, 32))
    params["extra"] = jnp.zeros((3,))
    with pytest.raises(TreeStructureError) as caught:
        model.merge_params_dict(params)
    assert caught.value.problems == (
        "extra: unexpected, has shape (3,)",
        "layers/0/bias: missing, expected shape (64,)",
        "layers/1/kernel: expected shape (64, 64), found (64, 32)",
    )
    np.testing.assert_array_equal(model(batch()), before)


@pytest.mark.parametrize("kind", ["mapping", "dataclass"])
def test_the_loss_joins_whatever_the_forward_pass_returns(kind):
    class Speaker(MyModel):
        def __call__(self, input_ids, **kwargs):
            logits = super().__call__(input_ids)
            return {"logits": logits} if kind == "mapping" else CausalLMOutput(logits=logits)

    model = Speaker(MyModelConfig(), rngs=nnx.Rngs(0))
    outputs = model(batch(), labels=batch())
    loss = outputs["loss"] if kind == "mapping" else outputs.loss
    assert loss == my_model()(batch(), labels=batch()).loss


def test_rules_that_do_not_fit_move_nothing(model):
    rules = ((".*", PartitionSpec(None, None, "fsdp")),)
    with pytest.raises(ShardingError, match="embed_tokens/embedding: rule"):
        model.shard_model(rules)
    assert mesh_of(nnx.state(model)) is None
    report = model.explain_sharding(rules)
    assert len(report.problems) == 5
    with pytest.raises(ShardingError):
        model.explain_sharding(rules, strict=True)


def test_classes_are_found_by_name_and_only_if_defined():
    assert find("MyModel", MyModel.__module__, path="run") is MyModel
    with pytest.raises(UnknownModelError, match="pass model_class="):
        find("NoSuchModel", "somewhere", path="run")


def test_two_classes_of_one_name_are_told_apart_by_module():
    class Twin(MyModel):
        pass

    class Other(MyModel):
        __module__ = "another.module"

    Other.__name__ = "Twin"
    from cairn.state.model_classes import register

    register(Other)
    assert find("Twin", "another.module", path="run") is Other
    assert find("Twin", Twin.__module__, path="run") is Twin
    with pytest.raises(UnknownModelError, match="found 2 among"):
        find("Twin", "a.third.module", path="run")
