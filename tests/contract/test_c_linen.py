"""EDPretrainedModel: the constructor, and what a subclass has to define."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import cairn as package
from cairn import EDPretrainedConfig, EDPretrainedModel, make_mesh
from tests.contract.subjects import assert_same_bits


@dataclass(frozen=True, kw_only=True)
class BagConfig(EDPretrainedConfig):
    model_type: str = "bag-of-words-of-the-contract"
    vocab_size: int = 32
    hidden_size: int = 16
    sharding_axis_dims: tuple[int, ...] = (2, 4, 1, 1)


class Bag(nn.Module):
    """Scores from the mean of the tokens' vectors."""

    config: BagConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, input_ids):
        vectors = nn.Embed(
            self.config.vocab_size, self.config.hidden_size, dtype=self.dtype, name="embed"
        )(input_ids)
        return nn.Dense(4, dtype=self.dtype, name="head")(vectors.mean(axis=1))


class BagModel(EDPretrainedModel):
    """A user's own: it defines the call and nothing else."""

    def __call__(self, input_ids, *args, params=None, **inputs):
        return self.module.apply({"params": self.params if params is None else params}, input_ids)


CONFIG = BagConfig()


@pytest.fixture(scope="module")
def model():
    return BagModel(CONFIG, Bag(CONFIG), input_shape=(1, 3))


def test_edpretrainedmodel_is_the_base_that_the_package_exports(model):
    assert package.EDPretrainedModel is EDPretrainedModel
    assert isinstance(model, EDPretrainedModel)


def test_config_is_an_argument_of_init_and_a_property(model):
    """`__init__(config)` keeps it, and `config` cannot be changed."""
    assert model.config is CONFIG
    with pytest.raises(AttributeError):
        model.config = BagConfig()


def test_module_is_initialised_and_applied(model):
    ids = jnp.zeros((2, 5), jnp.int32)
    assert isinstance(model.module, Bag)
    expected = Bag(CONFIG).apply({"params": model.params}, ids)
    np.testing.assert_array_equal(model(ids), expected)


def test_input_shape_is_what_the_module_is_initialised_with():
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, input_ids):
            return nn.Dense(2)(input_ids.astype(jnp.float32))

    for width in (3, 5):
        made = BagModel(CONFIG, Wide(), input_shape=(1, width))
        assert made.input_shape == (1, width)
        assert made.params["Dense_0"]["kernel"].shape == (width, 2)


def test_seed_decides_the_parameters(model):
    same = BagModel(CONFIG, Bag(CONFIG), (1, 3), seed=0)
    other = BagModel(CONFIG, Bag(CONFIG), (1, 3), seed=1)
    assert_same_bits(same.params, model.params)
    assert (
        np.asarray(other.params["embed"]["embedding"]) != same.params["embed"]["embedding"]
    ).any()


def test_dtype_is_the_computations():
    made = BagModel(CONFIG, Bag(CONFIG, jnp.bfloat16), (1, 3), dtype=jnp.bfloat16)
    assert made.dtype == jnp.bfloat16
    assert made(jnp.zeros((1, 2), jnp.int32)).dtype == jnp.bfloat16
    assert made.params["head"]["kernel"].dtype == jnp.float32


def test_do_init_false_leaves_the_parameters_to_the_caller(model):
    abstract = BagModel(CONFIG, Bag(CONFIG), (1, 3), _do_init=False)
    ids = jnp.zeros((2, 5), jnp.int32)
    with pytest.raises(AssertionError, match="_do_init=False"):
        abstract(ids)
    np.testing.assert_array_equal(abstract(ids, params=model.params), model(ids))
    abstract.params = model.params
    np.testing.assert_array_equal(abstract(ids), model(ids))


def test_mesh_is_the_configs(model):
    assert model.mesh == CONFIG.mesh
    assert dict(model.mesh.shape) == {"dp": 2, "fsdp": 4, "tp": 1, "sp": 1}


def test_get_named_sharding_is_a_sharding_for_each_parameter(model):
    rules = (("embedding", PartitionSpec("fsdp")), (".*", PartitionSpec()))
    found = model.get_named_sharding(rules)
    assert found["embed"]["embedding"] == NamedSharding(model.mesh, PartitionSpec("fsdp"))
    assert jax.tree.structure(found) == jax.tree.structure(model.params)
    placed = jax.device_put(model.params, found)
    assert placed["embed"]["embedding"].addressable_shards[0].data.shape == (8, 16)
    mesh = make_mesh((1, 2, 1, 1))
    assert model.get_named_sharding(rules, mesh)["head"]["bias"].mesh == mesh


ABSTRACT = {
    "__call__": lambda model: model(jnp.zeros((1, 2), jnp.int32)),
    "get_input_embeddings": lambda model: model.get_input_embeddings(),
    "set_input_embeddings": lambda model: model.set_input_embeddings(None),
    "get_output_embeddings": lambda model: model.get_output_embeddings(),
    "set_output_embeddings": lambda model: model.set_output_embeddings(None),
    "get_decoder": lambda model: model.get_decoder(),
    "set_decoder": lambda model: model.set_decoder(None),
    "init_cache": lambda model: model.init_cache(1, 4),
}


@pytest.mark.parametrize("name", ABSTRACT)
def test_what_a_subclass_must_define_raises_naming_the_class(name):
    """__call__, get_input_embeddings, set_input_embeddings, get_output_embeddings,
    set_output_embeddings, get_decoder, set_decoder and init_cache, one at a time."""

    class Unfinished(EDPretrainedModel):
        pass

    made = Unfinished(CONFIG, Bag(CONFIG), (1, 3), _do_init=False)
    with pytest.raises(NotImplementedError, match=rf"Unfinished.*{name}"):
        ABSTRACT[name](made)


def test_repr_is_one_line_with_class_and_size(model):
    """__repr__ names the class, the model type and the number of parameters."""
    text = repr(model)
    assert text.startswith("BagModel(")
    assert "bag-of-words-of-the-contract" in text
    assert f"{32 * 16 + 16 * 4 + 4:,}" in text
    assert "\n" not in text


def test_str_tells_the_configuration_too(model):
    """__str__ goes on where __repr__ ends."""
    text = str(model)
    assert "hidden_size" in text
    assert "16" in text


def test_md_info_is_markdown_about_every_parameter(model):
    text = model._md_info()
    assert text.lstrip().startswith("#")
    for part in ("BagModel", "embed", "head", "float32", "vocab_size"):
        assert part in text


def test_can_generate_only_with_a_cache(model):
    assert not model.can_generate()
