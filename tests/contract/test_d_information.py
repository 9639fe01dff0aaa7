"""EasyDeLBaseModule: its ancestors, constructor and information; the names of arguments."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cairn as package
from cairn import (
    ArgumentError,
    EasyBridgeMixin,
    EasyDeLBackends,
    EasyDeLBaseModule,
    EasyDeLPlatforms,
    EasyDeLQuantizationMethods,
    EasyGenerationMixin,
    OperationCacheMixin,
    PartitionAxis,
    TaskType,
    make_mesh,
)
from tests.contract.subjects import DECODER, make_decoder
from tests.state.my_model import MyModel, MyModelConfig, batch, my_model


@pytest.fixture(scope="module")
def model():
    return my_model()


def test_a_model_is_an_nnx_module():
    assert package.EasyDeLBaseModule is EasyDeLBaseModule
    assert issubclass(EasyDeLBaseModule, nnx.Module)
    graphdef, state = nnx.split(my_model())
    assert isinstance(nnx.merge(graphdef, state), MyModel)


class Config:
    """All that the mixins look at."""

    model_type = "none"
    eos_token_id = None
    pad_token_id = None
    max_position_embeddings = 64


class Counting(nnx.Module, EasyGenerationMixin, OperationCacheMixin):
    """Says the next number: no EasyDeLBaseModule."""

    def __init__(self):
        self.config = Config()

    def __call__(self, input_ids, attention_mask=None):
        return jax.nn.one_hot((input_ids + 1) % 10, 10)


def test_easygenerationmixin_works_by_itself():
    assert issubclass(EasyDeLBaseModule, EasyGenerationMixin)
    out = Counting().generate(np.array([[3, 4]], np.int32), max_new_tokens=3)
    assert out.sequences.tolist() == [[3, 4, 5, 6, 7]]


def test_operationcachemixin_works_by_itself():
    assert issubclass(EasyDeLBaseModule, OperationCacheMixin)

    class Cached(OperationCacheMixin):
        config, dtype = DECODER, np.dtype(jnp.bfloat16)

        def __call__(self, input_ids, cache=None):
            pass

    assert Cached().takes_cache
    assert not Counting().takes_cache
    assert Cached().init_operations_cache(2, 8).keys.dtype == jnp.bfloat16


def test_easybridgemixin_works_by_itself(tmp_path):
    assert issubclass(EasyDeLBaseModule, EasyBridgeMixin)

    class Bridged(nnx.Module, EasyBridgeMixin):
        def __init__(self, config, rngs, dtype=None, param_dtype=None, precision=None):
            self.config = config
            self.dense = nnx.Linear(2, 3, rngs=rngs)

    one = Bridged(MyModelConfig(), nnx.Rngs(0))
    one.save_pretrained(tmp_path / "hf")
    two = Bridged.from_pretrained(tmp_path / "hf", auto_shard_model=False)
    np.testing.assert_array_equal(two.dense.kernel.get_value(), one.dense.kernel.get_value())


NAMES = [
    (TaskType, "CAUSAL_LM", "causal-lm", "model_task"),
    (TaskType, "AUTO_BIND", "auto-bind", "model_task"),
    (EasyDeLBackends, "CPU", "cpu", "backend"),
    (EasyDeLPlatforms, "JAX", "jax", "platform"),
    (EasyDeLPlatforms, "TPU", "tpu", "platform"),
    (EasyDeLQuantizationMethods, "NF4", "nf4", "quantization_method"),
]


@pytest.mark.parametrize(("names", "member", "value", "argument"), NAMES)
def test_names_of_arguments_are_enums_that_list_the_known_ones(names, member, value, argument):
    """TaskType, EasyDeLBackends, EasyDeLPlatforms, EasyDeLQuantizationMethods."""
    assert getattr(package, names.__name__) is names
    assert names[member] == names(value) == value
    with pytest.raises(ArgumentError, match=argument) as caught:
        names("no-such-name")
    assert "'no-such-name'" in str(caught.value)
    assert all(str(known) in str(caught.value) for known in names)


def test_partitionaxis_is_frozen_and_refuses_unknown_axes():
    axis = PartitionAxis()
    assert axis == PartitionAxis()
    hash(axis)
    with pytest.raises(AttributeError):
        axis.batch_axis = "dp"
    with pytest.raises(ArgumentError, match="head_axis: expected a mesh axis, several or None"):
        PartitionAxis(head_axis=3)
    with pytest.raises(ArgumentError, match=r"fields among .*head_axis.*unknown: no_such_axis"):
        PartitionAxis.from_dict({"no_such_axis": "dp"})


def test_config_is_kept_and_static(model):
    config = MyModelConfig(sharding_axis_dims=(2, 4, 1, 1))
    made = MyModel(config=config, rngs=nnx.Rngs(0))
    assert made.config is config
    hash(nnx.graphdef(made))
    assert model.config == config


def test_dtype_is_of_the_computation():
    model = my_model(dtype=jnp.bfloat16)
    assert model(batch()).dtype == jnp.bfloat16
    assert model.module_dtype == jnp.float32


def test_param_dtype_is_of_the_parameters():
    model = my_model(param_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.bfloat16)}
    assert model(batch()).dtype == jnp.float32


def test_precision_reaches_the_matrix_products():
    for precision in (None, jax.lax.Precision.HIGHEST):
        model = make_decoder(precision=precision)
        assert model.precision is precision
        text = str(jax.make_jaxpr(lambda ids, model=model: model(ids).logits)(batch(1, 4)))
        assert ("HIGHEST" in text) == (precision is not None)


def test_rngs_decide_the_parameters():
    one, same, other = my_model(seed=1), my_model(seed=1), my_model(seed=2)
    np.testing.assert_array_equal(one(batch()), same(batch()))
    assert (np.asarray(one(batch())) != np.asarray(other(batch()))).any()
    assert "rngs" in inspect.signature(EasyDeLBaseModule.__init__).parameters


def test_model_type_is_the_configs(model):
    assert model.model_type == "my-model-of-the-tests"
    assert make_decoder().model_type == "llama"


def test_model_task_is_the_classs(model):
    assert model.model_task is TaskType.CAUSAL_LM
    assert model.model_task == "causal-lm"


def test_mesh_is_the_configs_until_the_parameters_are_on_one():
    model = my_model()
    assert dict(model.mesh.shape) == {"dp": 2, "fsdp": 4, "tp": 1, "sp": 1}
    other = make_mesh((1, 2, 1, 1))
    model.shard_model(mesh=other)
    assert model.mesh == other


def test_params_is_a_dict_of_arrays(model):
    params = model.params
    assert type(params) is dict
    assert set(params) == {"embed_tokens", "layers"}
    assert params["layers"][1]["kernel"].shape == (64, 64)
    assert not any("noise" in str(path) for path, _ in jax.tree.leaves_with_path(params))


def test_graphtree_params_shape_is_params_without_arrays(model):
    shapes = model.graphtree_params_shape
    assert jax.tree.structure(shapes) == jax.tree.structure(model.params)
    for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(model.params), strict=True):
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
        assert isinstance(shape, jax.ShapeDtypeStruct)


def test_module_dtype_is_what_most_elements_have():
    model = my_model()
    assert model.module_dtype == jnp.float32
    model.layers[0].bias.set_value(jnp.zeros((64,), jnp.float16))
    assert model.module_dtype == jnp.float32
    assert model.half().module_dtype == jnp.float16


def test_is_quantized_tells_after_quantize():
    model = make_decoder()
    assert not model.is_quantized
    assert model.quantize(method="nf4").is_quantized


def test_lora_is_enabled_tells_after_apply_lora_to_layers():
    model = make_decoder()
    assert not model.lora_is_enabled
    assert model.apply_lora_to_layers(4, 8, "q_proj").lora_is_enabled
    assert not model.unwrap_lora_to_layers().lora_is_enabled
