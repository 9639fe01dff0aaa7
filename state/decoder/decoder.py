"""The one decoder of all families: embedding, blocks, norm, output head."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from cairn.state.config import DecoderConfig
from cairn.state.decoder.attention import Angles, Attention
from cairn.state.decoder.linear import linear
from cairn.state.decoder.mlp import MLP
from cairn.state.decoder.norms import RMSNorm
from cairn.state.decoder.positions import rotary_angles
from cairn.state.errors import ArgumentError
from cairn.state.module import CausalLMOutput, EasyDeLBaseModule, KVCache, LossConfig
from cairn.state.placement import DECODER_AXES


class Block(nnx.Module):
    """Attention and feed-forward layer, each normalised before and added to the residual stream."""

    def __init__(self, config: DecoderConfig, **options: Any) -> None:
        eps, param_dtype = config.rms_norm_eps, options["param_dtype"]
        self.input_layernorm = RMSNorm(config.hidden_size, eps=eps, param_dtype=param_dtype)
        self.self_attn = Attention(config, **options)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, eps=eps, param_dtype=param_dtype
        )
        self.mlp = MLP(config, **options)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        angles: Angles,
        mask: Bool[Array, "B T S"],
        cache: KVCache | None,
        layer: int | jax.Array,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """The residual stream after this block."""
        attended, cache = self.self_attn(self.input_layernorm(x), angles, mask, cache, layer)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(nnx.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, config: DecoderConfig, **options: Any) -> None:
        self.config = config
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=options["dtype"],
            param_dtype=options["param_dtype"],
            embedding_init=jax.nn.initializers.normal(config.initializer_range),
            embedding_metadata={"axes": DECODER_AXES["embed_tokens"]},
            rngs=options["rngs"],
        )
        self.layers = nnx.List([Block(config, **options) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, param_dtype=options["param_dtype"]
        )

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        attention_mask: Array | None,
        position_ids: Array | None,
        cache: KVCache | None,
        stacked_layers: Any = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """The last hidden states, and the cache with the new tokens."""
        batch, tokens = input_ids.shape
        if cache is None:
            causal = jnp.tril(jnp.ones((tokens, tokens), jnp.bool_))
            mask = jnp.broadcast_to(causal[None, :, :], (batch, tokens, tokens))
            if attention_mask is not None:
                mask = mask & attention_mask.astype(jnp.bool_)[:, None, :]
            default_positions = jnp.arange(tokens, dtype=jnp.int32)[None, :]
        else:
            cache.check_room(tokens)
            if attention_mask is not None:
                cache = cache.mask_tokens(attention_mask)
            mask = cache.visible(tokens)
            default_positions = cache.positions(tokens)
        positions = default_positions if position_ids is None else position_ids
        positions = jnp.broadcast_to(positions, (batch, tokens))
        angles = rotary_angles(positions, self.config.rope, self.config.head_size)
        x = self.embed_tokens(input_ids)
        x, cache = self._blocks(x, angles, mask, cache, stacked_layers)
        return self.norm(x), None if cache is None else cache.advance(tokens)

    def stack_layers(self) -> list[Any]:
        """Every leaf of the layers as one array over all of them: what a scan goes through.

        Layers that are adapted differently (some quantized, say) can't be in one array: each run
        of layers that are alike has its own.
        """
        return [
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.state, alike))
            for _, alike in self._runs_of_layers()
        ]

    def _runs_of_layers(self) -> list[tuple[Any, list[Block]]]:
        runs = itertools.groupby(self.layers, key=nnx.graphdef)
        return [(graphdef, list(alike)) for graphdef, alike in runs]

    def _blocks(
        self, x: jax.Array, angles: Angles, mask: jax.Array, cache: KVCache | None, stacked: Any
    ) -> tuple[jax.Array, KVCache | None]:
        def run(
            graphdef: Any, state: Any, carry: tuple[Any, Any], layer: int | jax.Array
        ) -> tuple[jax.Array, KVCache | None]:
            block = nnx.merge(graphdef, state)
            out: tuple[jax.Array, KVCache | None] = block(carry[0], angles, mask, carry[1], layer)
            return out

        if self.config.remat:
            run = jax.checkpoint(run, static_argnums=(0,))
        if not self.config.scan_layers:
            for layer, block in enumerate(self.layers):
                graphdef, state = nnx.split(block)
                x, cache = run(graphdef, state, (x, cache), jnp.int32(layer))
            return x, cache
        # Only inside of the traced function are the layers' leaves one array each.
        stacked = self.stack_layers() if stacked is None else stacked
        first = 0
        for (graphdef, alike), states in zip(self._runs_of_layers(), stacked, strict=True):

            def body(
                carry: tuple[Any, Any], this: tuple[Any, jax.Array], graphdef: Any = graphdef
            ) -> tuple[Any, None]:
                return run(graphdef, this[0], carry, this[1]), None

            indices = jnp.arange(first, first + len(alike), dtype=jnp.int32)
            (x, cache), _ = jax.lax.scan(body, (x, cache), (states, indices))
            first += len(alike)
        return x, cache


class DecoderForCausalLM(EasyDeLBaseModule):
    """A decoder with an output head: the model class of every family."""

    config: DecoderConfig

    def __init__(
        self,
        config: DecoderConfig,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """Makes new weights from `rngs` (seed 0 by default).

        Args:
            config: shape and options.
            dtype: dtype of the computation.
            param_dtype: dtype of the parameters.
            precision: matrix multiplication precision, None for JAX's default.
            rngs: source of the initial weights; not kept.
        """
        super().__init__(config, dtype, param_dtype, precision, rngs)
        options = {
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "precision": precision,
            "rngs": nnx.Rngs(0) if rngs is None else rngs,
        }
        self.model = Decoder(config, **options)
        if not config.tie_word_embeddings:
            self.lm_head = linear(
                config,
                config.hidden_size,
                config.vocab_size,
                axes=DECODER_AXES["lm_head"],
                use_bias=False,
                **options,
            )

    def __call__(  # type: ignore[override]  # names what the base class takes as **kwargs
        self,
        input_ids: Array,
        attention_mask: Array | None = None,
        position_ids: Array | None = None,
        labels: Array | None = None,
        cache: KVCache | None = None,
        loss_config: LossConfig | None = None,
        logits_to_keep: int | None = None,
        stacked_layers: Any = None,
    ) -> CausalLMOutput:
        """Logits of every token, and the loss if labels are given.

        Args:
            input_ids: token ids (batch, tokens).
            attention_mask: 1 for tokens, 0 for padding.
            position_ids: position of each token; by default its index, as in transformers, or
                with a cache its distance from the row's first token.
            labels: the tokens themselves, -100 where they don't count; they are shifted here.
            cache: keys and values of earlier tokens; a new one comes back.
            loss_config: parts of the loss; plain cross entropy by default. Static under jit.
            logits_to_keep: logits of only this many last tokens. Static under jit.
            stacked_layers: what `model.stack_layers()` gave, so that a loop of calls on a model
                with `scan_layers` stacks its layers once; by default they are stacked here.

        Raises:
            ArgumentError: shapes that don't go together, ids that are no integers, a cache without
                room for the tokens (outside of jit, where its length is known), or labels and
                `logits_to_keep`.
        """
        _check_shapes(input_ids, attention_mask=attention_mask, labels=labels)
        if logits_to_keep is not None and (labels is not None or logits_to_keep < 1):
            raise ArgumentError(
                path="logits_to_keep", expected="1 or more, and no labels", found=logits_to_keep
            )
        hidden, cache = self.model(input_ids, attention_mask, position_ids, cache, stacked_layers)
        if logits_to_keep is not None:
            hidden = hidden[:, -logits_to_keep:]
        logits = self._head(hidden)
        if labels is None:
            return CausalLMOutput(logits=logits, cache=cache)
        loss, metrics = self.compute_loss(labels=labels, logits=logits, config=loss_config)
        return CausalLMOutput(logits=logits, loss=loss, cache=cache, metrics=metrics)

    def prepare_inputs_for_generation(
        self, input_ids: Array, max_length: int, attention_mask: Array | None = None
    ) -> dict[str, Any]:
        """The forward pass's arguments for the prompt: logits of the last token, layers stacked."""
        inputs = super().prepare_inputs_for_generation(input_ids, max_length, attention_mask)
        taken = inspect.signature(type(self).__call__).parameters
        if "logits_to_keep" in taken:
            inputs["logits_to_keep"] = 1
        if "stacked_layers" in taken and self.config.scan_layers:
            inputs["stacked_layers"] = self.model.stack_layers()
        return inputs

    def _head(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        if not self.config.tie_word_embeddings:
            logits: jax.Array = self.lm_head(hidden)
            return logits
        embedding = self.model.embed_tokens.embedding[...].astype(hidden.dtype)
        return jnp.einsum("BTD,VD->BTV", hidden, embedding, precision=self.precision)


def _check_shapes(input_ids: jax.Array, **others: jax.Array | None) -> None:
    if input_ids.ndim != 2:
        raise ArgumentError(
            path="input_ids", expected="shape (batch, tokens)", found=f"shape {input_ids.shape}"
        )
    if not jnp.issubdtype(input_ids.dtype, jnp.integer):
        raise ArgumentError(path="input_ids", expected="integers", found=f"{input_ids.dtype}")
    for name, array in others.items():
        if array is not None and array.shape != input_ids.shape:
            raise ArgumentError(
                path=name,
                expected=f"the shape of input_ids, {input_ids.shape}",
                found=f"shape {array.shape}",
            )
