"""The decoder as a Linen model, through Flax's own bridge."""

import functools
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.core import unfreeze
from flax.nnx.bridge import wrappers

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.frozen import FrozenJSON
from cairn.interop.errors import ArgumentError
from cairn.state.adapters.models import abstract_model, build_model, module_settings
from cairn.state.models.base import EasyDeLBaseModule
from cairn.state.models.decoder.decoder import DecoderForCausalLM
from cairn.state.models.generation import GenerationOutput
from cairn.state.models.kv_cache import KVCache
from cairn.state.models.linen_model import EDPretrainedModel
from cairn.state.models.outputs import CausalLMOutput
from cairn.state.paths import rebuild

__all__ = ["LinenDecoderForCausalLM", "linen_decoder"]


def linen_decoder(config: DecoderConfig, settings: Any) -> linen.Module:
    """Return `DecoderForCausalLM` as a Linen module.

    `module.init(key, input_ids)` returns new parameters, as a tree like that of the NNX module, in
    which layers have numbers as keys. `module.apply({"params": params}, ...)` takes the arguments
    of the NNX module's call.

    Args:
        config: sizes and options of the decoder.
        settings: result of `cairn.state.adapters.models.module_settings`.
    """
    return nnx.bridge.to_linen(_build, config, settings=FrozenJSON(settings), metadata_fn=None)


class LinenDecoderForCausalLM(EDPretrainedModel):
    """The decoder of all families, for code that is written for Linen.

    It has the layers of `DecoderForCausalLM`, not a second implementation: `to_nnx` and `from_nnx`
    convert between the two without copying an array.

        model = LinenDecoderForCausalLM.from_pretrained("org/name")
        state = TrainState.create(params=model.params, tx=tx, apply_fn=model)
        loss = model(input_ids, labels=input_ids, params=state.params).loss
    """

    config: DecoderConfig

    def __init__(
        self,
        config: DecoderConfig,
        module: linen.Module | None = None,
        input_shape: tuple[int, ...] = (1, 1),
        seed: int = 0,
        dtype: Any = jnp.float32,
        _do_init: bool = True,
        *,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        settings: Any = None,
    ) -> None:
        """Make the model.

        Args:
            config: sizes and options of the decoder.
            module: the Linen module; None for the result of `linen_decoder`.
            input_shape: (batch, tokens) of the input that the module is initialised with.
            seed: seed of the initial parameters.
            dtype: dtype of the computation.
            _do_init: whether to make new parameters; False leaves the model without.
            param_dtype: dtype of the parameters.
            precision: precision of matrix multiplications; None for JAX's default.
            settings: a result of `cairn.state.adapters.models.module_settings`, instead of `dtype`,
                `param_dtype` and `precision`.
        """
        if settings is None:
            settings = {
                "dtype": np.dtype(dtype).name,
                "param_dtype": np.dtype(param_dtype).name,
                "precision": precision.name.lower()
                if isinstance(precision, jax.lax.Precision)
                else precision,
            }
        self.settings = FrozenJSON(settings, name="settings")
        module = linen_decoder(config, self.settings) if module is None else module
        dtype = self.settings.get("dtype") or dtype
        super().__init__(config, module, input_shape, seed, dtype, _do_init)

    def __call__(  # type: ignore[override]  # names what the base class takes as **inputs
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        labels: jax.Array | None = None,
        past_key_values: KVCache | None = None,
        params: Any = None,
    ) -> CausalLMOutput:
        """Return logits of every token, and the loss if labels are given. The call is compiled.

        Args:
            input_ids: token ids (batch, tokens).
            attention_mask: 1 for tokens, 0 for padding: (batch, tokens), or with a cache
                (batch, slots of the cache), as `prepare_inputs_for_generation` extends it.
            position_ids: position of each token.
            labels: the tokens themselves, -100 where they don't count.
            past_key_values: keys and values of earlier tokens; the outputs have a new cache.
            params: the parameters; None for the model's own.

        Raises:
            ArgumentError: shapes differ.
            TreeStructureError: if the paths or shapes of `params` are not those of the model's;
                lists all differences.
        """
        if past_key_values is not None and attention_mask is not None:
            slots = past_key_values.valid.shape
            if attention_mask.shape == slots:
                valid = attention_mask.astype(jnp.bool_)
                past_key_values, attention_mask = past_key_values.replace(valid=valid), None
        inputs = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "labels": labels,
            "cache": past_key_values,
        }
        present = {name: value for name, value in inputs.items() if value is not None}
        outputs: CausalLMOutput = _forward(self.module, self._fitting(params), input_ids, present)
        return outputs

    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        params: Any = None,
        **arguments: Any,
    ) -> GenerationOutput:
        """Continue each prompt; the arguments are those of `DecoderForCausalLM.generate`."""
        return self.to_nnx(params).generate(input_ids, attention_mask, **arguments)

    # -- parts ---------------------------------------------------------------------------------

    def get_input_embeddings(self, params: Any = None) -> Any:
        """Return the matrix that tokens are looked up in, (vocabulary, hidden)."""
        return self._fitting(params)["model"]["embed_tokens"]["embedding"]

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the input embeddings; if they are tied, the output embeddings too.

        Raises:
            ArgumentError: if the shape is not (vocabulary, hidden).
        """
        self._set(("model", "embed_tokens", "embedding"), self._matrix(value))

    def get_output_embeddings(self, params: Any = None) -> Any:
        """Return the matrix that computes logits, (vocabulary, hidden).

        If the embeddings are tied, that is the input embeddings.

        Raises:
            ArgumentError: if the matrix is quantized.
        """
        if self.config.tie_word_embeddings:
            return self.get_input_embeddings(params)
        kernel = self._fitting(params)["lm_head"]["kernel"]
        if isinstance(kernel, dict):
            raise self._quantized("get_output_embeddings")
        return kernel.T

    def set_output_embeddings(self, value: Any) -> None:
        """Replace the output embeddings; if they are tied, the input embeddings too.

        Raises:
            ArgumentError: if the shape is not (vocabulary, hidden), or the model's own matrix is
                quantized.
        """
        if self.config.tie_word_embeddings:
            self.set_input_embeddings(value)
            return
        if isinstance(self.params["lm_head"]["kernel"], dict):
            raise self._quantized("set_output_embeddings")
        self._set(("lm_head", "kernel"), self._matrix(value).T)

    def get_decoder(self, params: Any = None) -> dict[str, Any]:
        """Return the parameters of embedding, layers and final norm: all but the output head."""
        decoder: dict[str, Any] = self._fitting(params)["model"]
        return decoder

    def set_decoder(self, value: Any) -> None:
        """Replace the parameters of embedding, layers and final norm.

        Raises:
            TreeStructureError: if their paths or shapes are not those of the decoder's; lists all
                differences.
        """
        self.params = {**self.params, "model": value}

    def init_cache(self, batch_size: int, max_length: int) -> KVCache:
        """Return an empty cache with room for `max_length` tokens in each row.

        Raises:
            ArgumentError: if a size is below 1.
        """
        cache: KVCache = nnx.merge(*self._graph).init_operations_cache(batch_size, max_length)
        return cache

    # -- the NNX form --------------------------------------------------------------------------

    def to_nnx(self, params: Any = None) -> DecoderForCausalLM:
        """Return this model as an NNX module that shares its arrays.

        Args:
            params: the parameters; None for the model's own.
        """
        graphdef, state = self._graph
        leaves = rebuild(state, self._fitting(params), path="params")
        model: DecoderForCausalLM = nnx.merge(graphdef, leaves)
        return model

    @classmethod
    def from_nnx(cls, model: EasyDeLBaseModule) -> Self:
        """Return a decoder as a Linen model that shares its arrays.

        Raises:
            ArgumentError: if the model is no `DecoderForCausalLM`.
        """
        if not isinstance(model, DecoderForCausalLM):
            raise ArgumentError(
                path=f"{cls.__name__}.from_nnx",
                expected="a DecoderForCausalLM",
                found=type(model).__name__,
            )
        linen = cls(model.config, settings=module_settings(model), _do_init=False)
        linen.params = nnx.to_pure_dict(nnx.state(model))
        return linen

    @classmethod
    def nnx_class(cls) -> type[DecoderForCausalLM]:
        """Return the NNX class that `from_pretrained` uses to load the weights."""
        return DecoderForCausalLM

    @functools.cached_property
    def _graph(self) -> tuple[Any, Any]:
        """Static structure and abstract state of the NNX form."""
        split: tuple[Any, Any] = nnx.split(
            abstract_model(DecoderForCausalLM, self.config, self.settings)
        )
        return split

    def _init_variables(self, rng: jax.Array, input_shape: tuple[int, ...]) -> Any:
        variables = unfreeze(self.module.init(rng, jnp.zeros(input_shape, jnp.int32)))
        # The bridge makes one collection per type of Variable: quantized weights have their own.
        return functools.reduce(_merged, variables.values())

    def params_with_axes(self) -> Any:
        """Return the abstract parameters as `nnx.Param`s, whose metadata has the axis names."""
        return _as_dict(self._graph[1])

    def _matrix(self, value: Any) -> Any:
        expected = (self.config.vocab_size, self.config.hidden_size)
        if np.shape(value) != expected:
            raise ArgumentError(
                path="embeddings",
                expected=f"shape {expected}, (vocabulary, hidden)",
                found=f"shape {np.shape(value)}",
            )
        return jnp.asarray(value)

    def _set(self, path: tuple[str, ...], value: Any) -> None:
        def put(tree: dict[str, Any], rest: tuple[str, ...]) -> dict[str, Any]:
            inner = value if len(rest) == 1 else put(tree[rest[0]], rest[1:])
            return {**tree, rest[0]: inner}

        self.params = put(self.params, path)

    def _quantized(self, method: str) -> ArgumentError:
        return ArgumentError(
            path=f"{type(self).__name__}.{method}",
            expected="a floating output head",
            found="a quantized one",
            next_step="use the model that was quantized",
        )


@functools.partial(jax.jit, static_argnums=0)
def _forward(module: linen.Module, params: Any, input_ids: jax.Array, inputs: Any) -> Any:
    return module.apply({"params": params}, input_ids, **inputs)


def _build(config: DecoderConfig, *, settings: Any, rngs: nnx.Rngs) -> DecoderForCausalLM:
    """Return the NNX module that the bridge wraps.

    Only an initialisation needs weights. When the Linen module is applied, the caller passes all
    weights, so the module is abstract.
    """
    outer = wrappers.current_linen_module()
    if outer is not None and not outer.is_initializing():
        abstract: DecoderForCausalLM = abstract_model(DecoderForCausalLM, config, settings)
        return abstract
    built: DecoderForCausalLM = build_model(DecoderForCausalLM, config, settings, rngs)
    return built


def _merged(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the union of two nested dicts that have no leaf in common."""
    both = {**first, **second}
    return {
        key: _merged(first[key], second[key]) if key in first and key in second else value
        for key, value in both.items()
    }


def _as_dict(node: Any) -> Any:
    """Return an NNX State as nested plain dicts, with its Variables as they are."""
    if isinstance(node, nnx.Variable):
        return node
    return {key: _as_dict(inner) for key, inner in node.items()}
