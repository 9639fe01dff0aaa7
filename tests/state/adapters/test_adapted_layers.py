"""Adapted layers take the places of a model's layers, and give them back."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cairn import QuantizationSettings
from cairn.state.adapters.layers import dequantize_layers, quantize_layers, unwrap_layers
from tests.state.my_model import my_model


class Pair(NamedTuple):
    first: nnx.Linear
    second: nnx.Linear


class Everywhere(nnx.Module):
    """Linear layers in every container that a module may have, one of them in two places."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def linear() -> nnx.Linear:
            return nnx.Linear(8, 8, rngs=rngs)

        self.attribute = linear()
        self.again = self.attribute
        self.list = nnx.List([linear(), linear()])
        self.dict = nnx.Dict(inner=linear())
        self.plain_list = nnx.data([linear(), {"deep": linear()}])
        self.plain_tuple = nnx.data((linear(), 3))
        self.pair = nnx.data(Pair(linear(), linear()))
        self.sequence = nnx.Sequential(linear(), jnp.tanh, linear())


def linears(model: nnx.Module) -> list[nnx.Linear]:
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, nnx.Linear)]


def test_layers_are_replaced_wherever_they_are():
    model = Everywhere(nnx.Rngs(0))
    before = nnx.graphdef(model)
    count = len(linears(model))
    inputs = jnp.ones((2, 8))
    exact = model.sequence(inputs)
    quantize_layers(model, QuantizationSettings("8bit"))
    assert len(linears(model)) == count == 11
    assert {type(layer).__name__ for layer in linears(model)} == {"AdaptedLinear"}
    assert model.again is model.attribute
    assert isinstance(model.pair, Pair)
    np.testing.assert_allclose(model.sequence(inputs), exact, atol=0.05)
    dequantize_layers(model)
    assert {type(layer) for layer in linears(model)} == {nnx.Linear}
    assert nnx.graphdef(model) == before


def test_an_adapted_layer_has_the_variables_of_the_layer_that_it_replaces():
    model = my_model()
    layer, bias = model.layers[0], model.layers[0].bias
    model.apply_lora_to_layers(2)
    assert model.layers[0] is not layer
    assert type(layer) is nnx.Linear
    assert model.layers[0].bias is bias


def test_equal_settings_give_equal_graphdefs_and_plain_ones_come_back():
    plain = nnx.graphdef(my_model())
    first, second = my_model().quantize("nf4"), my_model().quantize("nf4")
    assert nnx.graphdef(first) == nnx.graphdef(second) != plain
    assert nnx.graphdef(first.dequantize()) == plain
    adapted = my_model().apply_lora_to_layers(2)
    assert nnx.graphdef(adapted.unwrap_lora_to_layers()) == plain


def test_the_floating_kernel_goes_once_a_layer_is_quantized():
    model = my_model()
    kernel = model.layers[0].kernel
    model.quantize("nf4")
    shared = [node for _, node in nnx.iter_graph(model) if node is kernel]
    assert shared == []


def test_a_layer_of_a_users_own_class_keeps_its_methods():
    class Named(nnx.Linear):
        def doubled(self, inputs: jax.Array) -> jax.Array:
            return 2 * self(inputs)

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layer = Named(4, 4, rngs=nnx.Rngs(0))

    model = Model()
    quantize_layers(model, QuantizationSettings("8bit"))
    inputs = jnp.ones((1, 4))
    np.testing.assert_array_equal(model.layer.doubled(inputs), 2 * model.layer(inputs))


def test_layers_without_adapters_are_left_alone():
    model = my_model()
    layers = linears(model)
    unwrap_layers(model)
    assert [one is other for one, other in zip(linears(model), layers, strict=True)]


@pytest.mark.parametrize("method", ["nf4", "a8q"])
def test_a_layer_can_be_quantized_again(method):
    model = my_model().quantize("8bit").dequantize().quantize(method)
    assert model.is_quantized
