"""FlopsMixin: how many floating point operations a forward pass takes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from cairn.state.decoder.config import DecoderConfig
from cairn.state.errors import ArgumentError
from cairn.state.jaxpr_flops import matmul_flops

if TYPE_CHECKING:
    from cairn.state.config import EDPretrainedConfig

__all__ = ["FlopsMixin", "decoder_flops"]


class FlopsMixin:
    """Floating point operations of any model: in closed form for the decoder, else counted."""

    if TYPE_CHECKING:
        config: EDPretrainedConfig

    def flops_per_token(self, batch_size: int, sequence_length: int) -> float:
        """Operations of the forward pass per token; training takes about three times as many.

        Args:
            batch_size: rows.
            sequence_length: tokens of each row.

        Raises:
            ArgumentError: as `_flop`.
        """
        tokens = batch_size * sequence_length
        return self._flop(self.config, batch_size, sequence_length) / max(tokens, 1)

    def _flop(self, config: Any, batch_size: int, sequence_length: int) -> int:
        """Operations of one forward pass over a batch: matrix products, a multiply-add is two.

        With a DecoderConfig this is `decoder_flops`, without adapters. Any other model's forward
        pass is traced on shapes alone, and its matrix products and convolutions are counted, scans
        with all of their steps. What is elementwise (norms, softmax) does not count in either.

        Args:
            config: the model's own, or another of its class.
            batch_size: rows.
            sequence_length: tokens of each row.

        Raises:
            ArgumentError: sizes below 1, a forward pass without `input_ids`, or one whose number
                of operations is not known before it runs.
        """
        if batch_size < 1 or sequence_length < 1:
            raise ArgumentError(
                path="batch_size and sequence_length",
                expected="1 or more",
                found=f"{batch_size} and {sequence_length}",
            )
        if isinstance(config, DecoderConfig):
            return decoder_flops(config, batch_size, sequence_length)
        return self._counted_flop(config, batch_size, sequence_length)

    def _counted_flop(self, config: Any, batch_size: int, sequence_length: int) -> int:
        from cairn.state.models import abstract_model, module_settings

        name = type(self).__name__
        if "input_ids" not in inspect.signature(type(self).__call__).parameters:
            raise ArgumentError(
                path=f"{name}._flop",
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
    """Operations of one forward pass of the decoder: matrix products, a multiply-add is two.

    With B rows of S tokens, L layers, model size D, N heads and K key/value heads of size H, feed-
    forward size F and vocabulary V::

        2 B S (L (D N H + 2 D K H + N H D + 2 S N H + 3 D F) + D V)

    The attention term 2 S N H counts every pair of tokens, though half of them are masked: that is
    what is computed. The output head counts whether tied or not; looking up embeddings is free.

    Source: PaLM (arXiv 2204.02311, appendix B), with grouped heads, a gated feed-forward layer and
        the forward pass alone.
    """
    model, head = config.hidden_size, config.head_size
    queries, shared = config.num_attention_heads * head, config.kv_heads * head
    projections = 2 * model * queries + 2 * model * shared
    attention = 2 * sequence_length * queries
    feed_forward = 3 * model * config.intermediate_size
    layers = config.num_hidden_layers * (projections + attention + feed_forward)
    return 2 * batch_size * sequence_length * (layers + model * config.vocab_size)
