"""The one decoder of all families: embedding, blocks, norm, output head."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.decoder_layers import block_layers, decoder_layers, layers_below
from cairn.interop.errors import ArgumentError
from cairn.state.models.base import EasyDeLBaseModule
from cairn.state.models.decoder.attention import Angles, Attention
from cairn.state.models.decoder.latent_attention import LatentAttention
from cairn.state.models.decoder.layers import make_layer
from cairn.state.models.decoder.mlp import MLP, MixtureOfExperts
from cairn.state.models.decoder.per_layer import PerLayer, Run, find_runs, make_per_layer
from cairn.state.models.decoder.positions import rotary_angles
from cairn.state.models.kv_cache import KVCache, causal_mask
from cairn.state.models.loss import LossConfig
from cairn.state.models.outputs import CausalLMOutput
from cairn.state.models.router_loss import load_balancing_loss


class Block(nnx.Module):
    """Attention and feed-forward layer with norms; `DecoderConfig.block` says in which order."""

    def __init__(self, config: DecoderConfig, layer: int, **options: Any) -> None:
        layers = block_layers(config, layer)
        self.parallel = config.block == "parallel"
        self.scale = config.residual_scale
        for name in ("input_layernorm", "attention_output_norm"):
            if name in layers:
                setattr(self, name, make_layer(layers[name], config, **options))
        own = layers_below(layers, "self_attn")
        self.self_attn = (
            Attention(config, own, **options)
            if config.latent is None
            else LatentAttention(config, config.latent, own, **options)
        )
        for name in ("post_attention_layernorm", "mlp_output_norm"):
            if name in layers:
                setattr(self, name, make_layer(layers[name], config, **options))
        experts, own = config.experts, layers_below(layers, "mlp")
        self.mlp = (
            MixtureOfExperts(config, experts, own, **options)
            if experts is not None and config.has_experts(layer)
            else MLP(config, own, **options)
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        angles: Angles | None,
        mask: Bool[Array, "B T S"],
        cache: KVCache | None,
        layer: int | jax.Array,
    ) -> tuple[Float[Array, "B T D"], KVCache | None, Float[Array, "B T E"] | None]:
        """Return the residual stream after this block, the cache, and its router's logits.

        The logits are None in a block without experts.
        """
        inputs = self._normed("input_layernorm", x)
        attended, cache = self.self_attn(inputs, angles, mask, cache, layer)
        attended = self._normed("attention_output_norm", attended) * self.scale
        if self.parallel:
            inputs = self._normed("post_attention_layernorm", x, otherwise=inputs)
        else:
            x = x + attended
            inputs = self._normed("post_attention_layernorm", x)
        router = None
        if isinstance(self.mlp, MixtureOfExperts):
            output, router = self.mlp(inputs)
        else:
            output = self.mlp(inputs)
        x = x + self._normed("mlp_output_norm", output) * self.scale
        return (x + attended if self.parallel else x), cache, router

    def _normed(self, name: str, x: jax.Array, otherwise: jax.Array | None = None) -> jax.Array:
        norm = getattr(self, name, None)
        if norm is None:
            return x if otherwise is None else otherwise
        normed: jax.Array = norm(x)
        return normed


class Decoder(nnx.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, config: DecoderConfig, **options: Any) -> None:
        self.config = config
        layers = layers_below(decoder_layers(config), "model")
        for name in ("embed_tokens", "embed_positions"):
            if name in layers:
                setattr(self, name, make_layer(layers[name], config, **options))
        numbers = range(config.num_hidden_layers)
        self.layers = nnx.List([Block(config, number, **options) for number in numbers])
        self.norm = make_layer(layers["norm"], config, **options)

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        attention_mask: Array | None,
        position_ids: Array | None,
        cache: KVCache | None,
        stacked_layers: Any = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None, list[Float[Array, "B T E"]]]:
        """Return the last hidden states, the cache with the new tokens, and the routers' logits."""
        batch, tokens = input_ids.shape
        if cache is None:
            self._check_length(tokens)
            mask = causal_mask(tokens, None)
            mask = jnp.broadcast_to(mask[None, :, :], (batch, tokens, tokens))
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
        seen = self._per_layer(positions, mask, cache)
        x = self.embed_tokens(input_ids)
        if self.config.embedding_scale != 1.0:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.config.learned_positions:
            x = x + self.embed_positions(positions)
        x, cache, routers = self._blocks(x, seen, cache, stacked_layers)
        return self.norm(x), None if cache is None else cache.advance(tokens), routers

    def _check_length(self, tokens: int) -> None:
        longest = self.config.max_position_embeddings
        if self.config.learned_positions and tokens > longest:
            raise ArgumentError(
                path="input_ids",
                expected=f"at most {longest} tokens, the positions that the model has learned",
                found=tokens,
            )

    def _per_layer(
        self, positions: jax.Array, mask: jax.Array, cache: KVCache | None
    ) -> tuple[PerLayer, PerLayer]:
        """Return each layer's rotary angles and attention mask."""
        config = self.config
        numbers = range(config.num_hidden_layers)
        ropes = [config.rope_of(number) for number in numbers]
        size = config.rotary_size
        angles: dict[Any, Any] = {
            rope: rotary_angles(positions, rope, size) for rope in {*ropes} if rope is not None
        }
        if None in ropes:
            still = next(iter(angles.values()), None)
            # A layer without rotary positions among layers with them gets angles of zero.
            angles[None] = None if still is None else (still[0] * 0 + 1, still[1] * 0)
        windows = [config.has_window(number) for number in numbers]
        masks = {False: mask, True: mask}
        if any(windows):
            tokens = positions.shape[1]
            slots = causal_mask(tokens, config.sliding_window, cache)
            masks[True] = mask & slots[None, :, :]
        return make_per_layer(ropes, angles), make_per_layer(windows, masks)

    def stack_layers(self) -> list[Any]:
        """Return the layers' states with each leaf stacked over layers, for a scan.

        Only layers of equal structure are stacked with each other. The result has one entry per
        run of layers, see `per_layer.Run`, with one stacked state for each place in a turn.
        """
        return [
            [
                jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.state, alike))
                for alike in run.by_place
            ]
            for run in self._runs_of_layers()
        ]

    def _runs_of_layers(self) -> list[Run]:
        return find_runs([nnx.graphdef(block) for block in self.layers], list(self.layers))

    def _blocks(
        self,
        x: jax.Array,
        seen: tuple[PerLayer, PerLayer],
        cache: KVCache | None,
        stacked: Any,
    ) -> tuple[jax.Array, KVCache | None, list[jax.Array]]:
        angles, masks = seen

        def run(
            graphdef: Any, state: Any, carry: tuple[Any, Any], shown: tuple[Any, Any], layer: Any
        ) -> tuple[jax.Array, KVCache | None, jax.Array | None]:
            block = nnx.merge(graphdef, state)
            out: tuple[jax.Array, KVCache | None, jax.Array | None]
            out = block(carry[0], *shown, carry[1], layer)
            return out

        if self.config.remat:
            run = jax.checkpoint(run, static_argnums=(0,))
        routers: list[jax.Array] = []
        if not self.config.scan_layers:
            for layer, block in enumerate(self.layers):
                graphdef, state = nnx.split(block)
                shown = angles.of(layer), masks.of(layer)
                x, cache, logits = run(graphdef, state, (x, cache), shown, jnp.int32(layer))
                routers += [] if logits is None else [logits]
            return x, cache, routers
        # Stacked here, in the traced function, so that the model itself keeps unstacked leaves.
        stacked = self.stack_layers() if stacked is None else stacked
        for turns, states in zip(self._runs_of_layers(), stacked, strict=True):

            def body(
                carry: tuple[Any, Any], this: tuple[Any, jax.Array], turns: Run = turns
            ) -> tuple[Any, list[Any]]:
                router_logits = []
                for place, (graphdef, state) in enumerate(
                    zip(turns.graphdefs, this[0], strict=True)
                ):
                    layer = this[1] + place
                    shown = angles.of(layer), masks.of(layer)
                    x, cache, logits = run(graphdef, state, carry, shown, layer)
                    carry = x, cache
                    router_logits += [] if logits is None else [logits]
                return carry, router_logits

            firsts = jnp.asarray(turns.firsts, jnp.int32)
            (x, cache), router_logits = jax.lax.scan(body, (x, cache), (states, firsts))
            routers += [logits for turn in zip(*router_logits, strict=True) for logits in turn]
        return x, cache, routers


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
        """Make new weights from `rngs` (seed 0 by default).

        Args:
            config: sizes and options of the decoder.
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
            self.lm_head = make_layer(decoder_layers(config)["lm_head"], config, **options)

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
        """Return logits of every token, and the loss if labels are given.

        Args:
            input_ids: token ids (batch, tokens).
            attention_mask: 1 for tokens, 0 for padding.
            position_ids: position of each token; by default its index, as in transformers, or
                with a cache its distance from the row's first token.
            labels: the tokens themselves, -100 where they don't count; they are shifted here.
            cache: keys and values of earlier tokens; the outputs have a new one with the tokens of
                this call.
            loss_config: parts of the loss; plain cross entropy by default. Static under jit.
            logits_to_keep: return logits of this many last tokens only; None for all. Static under
                jit.
            stacked_layers: the result of `model.stack_layers()`, so that a loop of calls on a
                model with `scan_layers` stacks its layers once; None stacks them in this call.

        Raises:
            ArgumentError: shapes differ, ids are no integers, the cache has no room for the tokens
                (checked outside of jit only, where its length is known), or both labels and
                `logits_to_keep` are given.
        """
        _check_shapes(input_ids, attention_mask=attention_mask, labels=labels)
        if logits_to_keep is not None and (labels is not None or logits_to_keep < 1):
            raise ArgumentError(
                path="logits_to_keep", expected="1 or more, and no labels", found=logits_to_keep
            )
        hidden, cache, routers = self.model(
            input_ids, attention_mask, position_ids, cache, stacked_layers
        )
        if logits_to_keep is not None:
            hidden = hidden[:, -logits_to_keep:]
        logits = self._head(hidden)
        experts, balance = self.config.experts, None
        if experts is not None and routers:
            balance = load_balancing_loss(routers, experts.count, experts.per_token, attention_mask)
        if labels is None:
            return CausalLMOutput(logits=logits, cache=cache, auxiliary_loss=balance)
        loss, metrics = self.compute_loss(
            labels=labels, logits=logits, config=loss_config, auxiliary_loss=balance
        )
        return CausalLMOutput(
            logits=logits, loss=loss, cache=cache, metrics=metrics, auxiliary_loss=balance
        )

    def prepare_inputs_for_generation(
        self, input_ids: Array, max_length: int, attention_mask: Array | None = None
    ) -> dict[str, Any]:
        """Return the forward pass's arguments for the prompt.

        They request the last token's logits only, and have the layers stacked if they are scanned.
        """
        inputs = super().prepare_inputs_for_generation(input_ids, max_length, attention_mask)
        taken = inspect.signature(type(self).__call__).parameters
        if "logits_to_keep" in taken:
            inputs["logits_to_keep"] = 1
        if "stacked_layers" in taken and self.config.scan_layers:
            inputs["stacked_layers"] = self.model.stack_layers()
        return inputs

    def _head(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        config = self.config
        logits: jax.Array
        if config.tie_word_embeddings:
            embedding = self.model.embed_tokens.embedding[...].astype(hidden.dtype)
            logits = jnp.einsum("BTD,VD->BTV", hidden, embedding, precision=self.precision)
        else:
            logits = self.lm_head(hidden)
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_soft_cap is not None:
            logits = jnp.tanh(logits / config.logit_soft_cap) * config.logit_soft_cap
        return logits


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
