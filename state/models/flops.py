"""FlopsMixin: number of floating point operations of a forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr

from cairn.interop.config.base import EDPretrainedConfig
from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.decoder_layers import LayerKind, block_layers
from cairn.interop.errors import ArgumentError
from cairn.state.adapters.models import abstract_model, module_settings

__all__ = ["FlopsMixin", "decoder_flops", "matmul_flops"]


class FlopsMixin:
    """Counts the floating point operations of a model's forward pass.

    For a decoder they follow from a formula (`decoder_flops`). Any other model is traced, and its
    matrix multiplications and convolutions are counted (`matmul_flops`).
    """

    if TYPE_CHECKING:
        config: EDPretrainedConfig

    def flops_per_token(self, batch_size: int, sequence_length: int) -> float:
        """Return the forward pass's operations per token; training takes about three times as many.

        Args:
            batch_size: number of rows.
            sequence_length: tokens of each row.

        Raises:
            ArgumentError: for the reasons of `_flop`.
        """
        tokens = batch_size * sequence_length
        return self._flop(self.config, batch_size, sequence_length) / max(tokens, 1)

    def _flop(self, config: Any, batch_size: int, sequence_length: int) -> int:
        """Return the operations of one forward pass over a batch; a multiply-add is two.

        For a DecoderConfig the result is that of `decoder_flops`, in which adapters do not count.
        Any other model's forward pass is traced without computing it, and its matrix
        multiplications and convolutions are counted (`matmul_flops`). Elementwise operations
        (norms, softmax) never count.

        Args:
            config: the model's configuration, or another of its class.
            batch_size: number of rows.
            sequence_length: tokens of each row.

        Raises:
            ArgumentError: a size is below 1, the forward pass has no `input_ids`, or its number of
                operations is only known when it runs.
        """
        if batch_size < 1 or sequence_length < 1:
            raise ArgumentError(
                path="batch_size and sequence_length",
                expected="1 or more",
                found=f"{batch_size} and {sequence_length}",
            )
        if isinstance(config, DecoderConfig):
            return decoder_flops(config, batch_size, sequence_length)
        if "input_ids" not in inspect.signature(type(self).__call__).parameters:
            raise ArgumentError(
                path=f"{type(self).__name__}._flop",
                expected="a forward pass that takes input_ids",
                found=str(inspect.signature(type(self).__call__)),
                next_step="override _flop in this model class",
            )
        module = self
        if config != self.config:
            module = abstract_model(type(self), config, module_settings(self))
        graphdef, state = nnx.split(module)
        ids = jax.ShapeDtypeStruct((batch_size, sequence_length), jnp.int32)

        def forward(state: Any, ids: jax.Array) -> Any:
            return jax.tree.leaves(nnx.merge(graphdef, state, copy=True)(input_ids=ids))

        return matmul_flops(forward, state, ids)


def decoder_flops(config: DecoderConfig, batch_size: int, sequence_length: int) -> int:
    """Return the operations of a decoder's matrix multiplications in one forward pass.

    A multiply-add is two operations. With B rows of S tokens, L layers, model size D, N heads and K
    key/value heads of size H, feed-forward size F and vocabulary V, a decoder like Llama's takes::

        2 B S (L (D N H + 2 D K H + N H D + 2 S N H + 3 D F) + D V)

    In other decoders, each matrix that a token is multiplied by counts, and of the experts only
    those that the token uses. The attention term 2 S N H counts all pairs of tokens, also masked
    ones, since they are computed, too. The output head always counts, tied or not; embedding
    look-ups do not.

    Source: PaLM (arXiv 2204.02311, appendix B), with grouped heads, a gated feed-forward layer and
        the forward pass alone.
    """
    heads = config.num_attention_heads * (config.head_size + config.value_size)
    layers = config.num_hidden_layers * sequence_length * heads
    chosen = 0 if config.experts is None else config.experts.per_token
    for number in range(config.num_hidden_layers):
        for layer in block_layers(config, number).values():
            if layer.kind is LayerKind.LINEAR:
                layers += prod(layer.shape)
            elif layer.kind is LayerKind.EXPERTS:
                layers += chosen * prod(layer.shape[1:])
    head = config.hidden_size * config.vocab_size
    return 2 * batch_size * sequence_length * (layers + head)


def matmul_flops(function: Callable[..., Any], *args: Any) -> int:
    """Return the operations of all matrix multiplications and convolutions in one call.

    A multiply-add is two operations. The function is only traced, so `jax.ShapeDtypeStruct`s are
    enough as arguments. The body of a scan counts once per step; of a conditional, only the branch
    with the most operations counts.

    Raises:
        ArgumentError: a loop whose number of steps is only known when it runs has matrix
            multiplications, or there is a kernel that can't be inspected.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Any) -> int:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name in _PRODUCTS:
        return _PRODUCTS[name](equation)
    inner = [_count(jaxpr) for jaxpr in _jaxprs_in(params)]
    if name == "cond":
        return max(inner)
    total = sum(inner)
    if name == "scan":
        return total * int(params["length"])
    if name == "shard_map":
        shape = params["mesh"].shape
        return total * int(prod(shape[axis] for axis in params["newly_manual_axes"]))
    if name in ("while", "pallas_call") and (total or name == "pallas_call"):
        raise ArgumentError(
            path="matmul_flops",
            expected="matrix products whose number is known before the function runs",
            found=f"a {name} equation",
            next_step="override _flop in the model class",
        )
    return total


def _jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the functions that an equation calls; JAX exports this itself from 0.10 on."""
    for value in params.values():
        for entry in value if isinstance(value, tuple) else (value,):
            if isinstance(entry, ClosedJaxpr):
                yield entry.jaxpr
            elif isinstance(entry, Jaxpr):
                yield entry


def _outputs(equation: Any) -> int:
    return int(prod(equation.outvars[0].aval.shape))


def _dot(equation: Any) -> int:
    ragged = equation.params.get("ragged_dot_dimension_numbers")
    numbers = (
        equation.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    )
    (contracted, _), _ = numbers
    left = equation.invars[0].aval.shape
    return 2 * _outputs(equation) * int(prod(left[axis] for axis in contracted))


def _convolution(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    features_out = equation.params["dimension_numbers"].rhs_spec[0]
    each = int(prod(size for axis, size in enumerate(kernel) if axis != features_out))
    return 2 * _outputs(equation) * each


_PRODUCTS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _dot,
}
