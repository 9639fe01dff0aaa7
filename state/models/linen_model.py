"""EDPretrainedModel: base of models in Flax Linen, which keeps parameters beside the module."""

import json
import os
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.core import meta, unfreeze
from flax.errors import FlaxError
from jax.sharding import Mesh, NamedSharding

from cairn.interop.config.base import EDPretrainedConfig
from cairn.interop.dtypes import floating_dtype
from cairn.interop.errors import ArgumentError
from cairn.state.adapters.models import abstract_model
from cairn.state.errors import NotInitializedError
from cairn.state.models.base import EasyDeLBaseModule
from cairn.state.models.hub.pretrained import most_common_float
from cairn.state.models.linen_twin import linen_model, make_twin
from cairn.state.paths import named_leaves, rebuild
from cairn.state.sharding.report import leaf_bytes
from cairn.state.sharding.rules import module_plan
from cairn.state.states.easydel_state import EasyDeLState
from cairn.storage.store.uri import StoreURI

__all__ = ["EDPretrainedModel", "model_markdown"]


_PLAIN = (bool, int, float, str, type(None))
_OF_A_MODEL = frozenset({"seed"})
"""Attributes that only say how a model was created, and do not affect its results."""


class EDPretrainedModel:
    """A Linen module, its configuration and its parameters.

    The parameters are a nested dict, `params`. Methods that use parameters accept others as
    `params=`, so that functions of the parameters can be differentiated and compiled. A subclass
    defines the call (`__call__`), and if needed embeddings and caches:

        class MyModel(EDPretrainedModel):
            module_class = MyModule   # MyModule(config, dtype=dtype) is the Linen module

            def __call__(self, input_ids, params=None):
                params = self.params if params is None else params
                return self.module.apply({"params": params}, input_ids)

    This is enough to train, save, load and export the model. `to_easydel_state` makes a training
    state; `EasyDeLState.load_state` loads it in a program that defines a class of this name.
    `save_pretrained` writes the parameters under their paths, joined by dots. A class with its own
    `__init__` needs no `module_class`, but must accept the call
    `MyModel(config, dtype=..., _do_init=False)`. For these uses, modules that need collections
    other than parameters, such as BatchNorm averages, are refused.

    Attributes:
        module_class: class of the Linen module, or a function that makes it; it is called with the
            config and `dtype=`.
        module: the Linen module.
        input_shape: shape (batch, tokens) of the input that the module is initialised with.
        seed: seed of the initial parameters.
        dtype: dtype of the computation.
    """

    module_class: ClassVar[Callable[..., linen.Module] | None] = None
    _own_module: linen.Module | None = None
    _nnx_class: ClassVar[type[EasyDeLBaseModule] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.nnx_class.__func__ is EDPretrainedModel.nnx_class.__func__:  # type: ignore[attr-defined]
            cls._nnx_class = make_twin(cls)

    def __init__(
        self,
        config: EDPretrainedConfig,
        module: linen.Module | None = None,
        input_shape: tuple[int, ...] = (1, 1),
        seed: int = 0,
        dtype: Any = jnp.float32,
        _do_init: bool = True,
    ) -> None:
        """Make the model.

        Args:
            config: sizes and options of the model.
            module: the Linen module, whose input is integers of `input_shape`; None for the one
                that `module_class` makes.
            input_shape: shape (batch, tokens) of the input that the module is initialised with.
            seed: seed of the initial parameters.
            dtype: dtype of the computation; must be the module's.
            _do_init: whether to make new parameters. If False, set `params` later, or pass
                parameters to each call.
        """
        self._config = config
        self.input_shape = tuple(input_shape)
        self.seed = seed
        self.dtype = floating_dtype(dtype, argument="dtype")
        if module is None:
            make = type(self).module_class
            if make is None:
                raise self._undefined("module_class")
            module = self._own_module = make(config, dtype=self.dtype)
        self.module = module
        self._params: Any = None
        if _do_init:
            self._params = self.init_weights(jax.random.key(seed))

    # -- parameters ----------------------------------------------------------------------------

    @property
    def config(self) -> EDPretrainedConfig:
        """The configuration."""
        return self._config

    @property
    def mesh(self) -> Mesh:
        """The mesh of the configuration."""
        return self.config.mesh

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the model.

        Raises:
            NotInitializedError: if the model was made with `_do_init=False` and has none yet.
        """
        if self._params is None:
            raise NotInitializedError(
                path=f"{type(self).__name__}.params",
                expected="parameters",
                found="none: the model was made with _do_init=False",
                next_step="pass params= to the call, or set model.params",
            )
        params: dict[str, Any] = self._params
        return params

    @params.setter
    def params(self, params: Any) -> None:
        self._params = self._fitting(params)

    @property
    def params_shape_tree(self) -> dict[str, Any]:
        """Shapes and dtypes of the parameters; nothing is computed."""
        if not hasattr(self, "_shapes"):
            tree = self.params_with_axes()
            self._shapes: dict[str, Any] = jax.tree.map(
                lambda leaf: leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf,
                tree,
                is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
            )
        return self._shapes

    @property
    def size(self) -> int:
        """Bytes of the parameters."""
        tree = self.params_shape_tree if self._params is None else self._params
        return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))

    def init_weights(self, rng: jax.Array, input_shape: tuple[int, ...] | None = None) -> Any:
        """Return new parameters.

        Args:
            rng: a JAX key.
            input_shape: shape of the input; None for the model's `input_shape`.
        """
        shape = self.input_shape if input_shape is None else tuple(input_shape)

        def init(rng: jax.Array) -> Any:
            return meta.unbox(self._init_variables(rng, shape))

        return jax.jit(init)(rng)

    def get_named_sharding(
        self, partition_rules: Any = None, mesh: Mesh | None = None
    ) -> dict[str, NamedSharding | Any]:
        """Return the parameters' tree with a NamedSharding in place of each leaf.

        Args:
            partition_rules: pairs of a regular expression and a PartitionSpec; None for the
                config's rules, else those that follow from the axis names of the parameters
                (`linen.with_partitioning`), which may be logical names or mesh axes.
            mesh: the mesh; None for the config's.

        Raises:
            ShardingError: if the mesh does not divide some leaves; lists all of them.
        """
        mesh = self.mesh if mesh is None else mesh
        report = module_plan(self.params_with_axes(), self.config, partition_rules, mesh)
        report.raise_for_problems()
        named: dict[str, Any] = report.shardings(self.params_shape_tree)
        return named

    # -- what a subclass defines ---------------------------------------------------------------

    def __call__(self, input_ids: jax.Array, *args: Any, params: Any = None, **inputs: Any) -> Any:
        """Run the forward pass; subclasses define it."""
        raise self._undefined("__call__")

    def get_input_embeddings(self, params: Any = None) -> Any:
        """Return the matrix that tokens are looked up in, (vocabulary, hidden)."""
        raise self._undefined("get_input_embeddings")

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the matrix that tokens are looked up in."""
        raise self._undefined("set_input_embeddings")

    def get_output_embeddings(self, params: Any = None) -> Any:
        """Return the matrix that gives logits, (vocabulary, hidden)."""
        raise self._undefined("get_output_embeddings")

    def set_output_embeddings(self, value: Any) -> None:
        """Replace the matrix that gives logits."""
        raise self._undefined("set_output_embeddings")

    def get_decoder(self, params: Any = None) -> Any:
        """Return the decoder's parameters."""
        raise self._undefined("get_decoder")

    def set_decoder(self, value: Any) -> None:
        """Replace the decoder's parameters."""
        raise self._undefined("set_decoder")

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        """Return an empty cache with room for `max_length` tokens in each row."""
        raise self._undefined("init_cache")

    def to_nnx(self, params: Any = None) -> EasyDeLBaseModule:
        """Return this model as an NNX module that shares its arrays.

        Args:
            params: the parameters; None for the model's own.

        Raises:
            ArgumentError: if a model made from the config alone has another module, or other plain
                attributes, than this one.
        """
        own: Any = type(self)
        rebuilt = linen_model(own, self.config, self.dtype)
        if self.module is not self._own_module and rebuilt.module != self.module:
            raise ArgumentError(
                path=f"{type(self).__name__}.to_nnx",
                expected=f"the module that {type(self).__name__}(config) makes: {rebuilt.module}",
                found=str(self.module),
                next_step="put what differs into the config, nothing else is saved; functions that "
                "are made anew each time differ too: define them once, or set module_class",
            )
        changed = [
            f"{name}={value!r}, and {getattr(rebuilt, name)!r} in the other"
            for name, value in sorted(vars(self).items())
            if type(value) in _PLAIN and name not in _OF_A_MODEL and not name.startswith("_")
            if hasattr(rebuilt, name) and getattr(rebuilt, name) != value
        ]
        if changed:
            raise ArgumentError(
                path=f"{type(self).__name__}.to_nnx",
                expected=f"the attributes that {type(self).__name__}(config) gets",
                found="; ".join(changed),
                next_step="put what differs into the config: nothing else is saved",
            )
        leaves = jax.tree.leaves(self.params if params is None else params)
        param_dtype = most_common_float(np.dtype(leaf.dtype) for leaf in leaves)
        settings = {"dtype": self.dtype.name, "param_dtype": param_dtype.name}
        graphdef, state = nnx.split(abstract_model(self.nnx_class(), self.config, settings))
        model: EasyDeLBaseModule = nnx.merge(
            graphdef, rebuild(state, self._fitting(params), path="params")
        )
        return model

    @classmethod
    def from_nnx(cls, model: EasyDeLBaseModule) -> Self:
        """Return an NNX form of this class as a Linen model that shares its arrays.

        Raises:
            ArgumentError: if the module is no NNX form of this class.
        """
        if not isinstance(model, cls.nnx_class()):
            raise ArgumentError(
                path=f"{cls.__name__}.from_nnx",
                expected=f"what to_nnx of a {cls.__name__} returns",
                found=type(model).__name__,
            )
        linen: Any = cls
        linen = linen(model.config, dtype=model.dtype, _do_init=False)
        linen.params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        same_class: Self = linen
        return same_class

    @classmethod
    def nnx_class(cls) -> type[EasyDeLBaseModule]:
        """Return the class of the NNX form, by which the model is loaded, saved and trained."""
        if cls._nnx_class is None:
            raise NotImplementedError(f"{cls.__name__} does not define nnx_class")
        return cls._nnx_class

    # -- generation ----------------------------------------------------------------------------

    def can_generate(self) -> bool:
        """Return whether the model can generate text: whether its class defines `init_cache`."""
        return type(self).init_cache is not EDPretrainedModel.init_cache

    def prepare_inputs_for_generation(
        self, input_ids: jax.Array, max_length: int, attention_mask: jax.Array | None = None
    ) -> dict[str, Any]:
        """Return the arguments of the first call of a generation, without the prompt.

        Args:
            input_ids: integers (batch, tokens).
            max_length: number of slots for prompt and new tokens together.
            attention_mask: 1 for tokens, 0 for padding, which is on the left.

        Returns:
            `past_key_values`: an empty cache. `attention_mask` (batch, max_length): 1 for slots
            that may be attended to, including those of new tokens. `position_ids`: positions of
            the prompt's tokens.

        Raises:
            ArgumentError: if `max_length` leaves no room for the prompt.
        """
        batch, tokens = input_ids.shape
        if max_length < tokens:
            raise ArgumentError(
                path="max_length", expected=f"{tokens} or more, the prompt", found=max_length
            )
        extended = jnp.ones((batch, max_length), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None, :], (batch, tokens))
        if attention_mask is not None:
            mask = attention_mask.astype(jnp.int32)
            extended = jax.lax.dynamic_update_slice(extended, mask, (0, 0))
            positions = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
        return {
            "past_key_values": self.init_cache(batch, max_length),
            "attention_mask": extended,
            "position_ids": positions,
        }

    def update_inputs_for_generation(self, outputs: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the next call of a generation, without the new tokens.

        Args:
            outputs: outputs of the last call, with the `cache`.
            inputs: arguments of the last call.
        """
        return {
            **inputs,
            "past_key_values": outputs.cache,
            "position_ids": inputs["position_ids"][:, -1:] + 1,
        }

    # -- other forms ---------------------------------------------------------------------------

    def to_easydel_state(
        self,
        params: Any = None,
        *,
        tx: optax.GradientTransformation | None = None,
        **create_arguments: Any,
    ) -> EasyDeLState:
        """Return a training state of this model.

        Args:
            params: the parameters; None for the model's own.
            tx: the optimizer, whose state is initialised on the parameters' devices; None for a
                state without one.
            **create_arguments: further arguments of `EasyDeLState.create`.
        """
        model = self.to_nnx(params)
        state: EasyDeLState = model.to_state(tx, **create_arguments)
        return state

    def to_pytorch(self, params: Any = None) -> Any:
        """Return the `transformers` model with these weights, in evaluation mode."""
        return self.to_nnx(params).to_pytorch()

    def to_8bit(
        self, params: Any = None, *, group_size: int = 64, quantization_pattern: str = ".*"
    ) -> Self:
        """Return a new model with its matrices quantized to int8 (method "8bit").

        It can run, generate, and save its state, but not be trained.

        Args:
            params: the parameters; None for the model's own.
            group_size: number of inputs that share a scale, -1 for all of them.
            quantization_pattern: regular expression, searched in each layer's path.
        """
        model = self.to_nnx(params)
        return self.from_nnx(model.quantize("8bit", group_size, quantization_pattern))

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str] | StoreURI,
        params: Any = None,
        max_shard_size: int | str = "5GB",
        *,
        float_dtype: Any = None,
    ) -> list[str]:
        """Write config.json, safetensors and tokenizer files that transformers loads.

        Args:
            save_directory: the folder, local or in a store.
            params: the parameters; None for the model's own.
            max_shard_size: maximum bytes of tensors per file, as a number or a text such as "5GB".
            float_dtype: dtype to cast floating weights to; None keeps their dtypes.

        Returns:
            The names of the files written.
        """
        return self.to_nnx(params).save_pretrained(
            save_directory, max_shard_size, float_dtype=float_dtype
        )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | StoreURI, **arguments: Any
    ) -> Self:
        """Return a model with pretrained weights, which are read and placed slice by slice.

        Args:
            pretrained_model_name_or_path: a folder or a *.gguf file, local or in a store, or a hub
                id such as "org/name".
            **arguments: those of `EasyDeLBaseModule.from_pretrained`: `dtype`, `param_dtype`,
                `precision`, `auto_shard_model`, `mesh`, `partition_rules`, `sharding_axis_dims`,
                `sharding_axis_names`, `device`, `config_kwargs` and others.

        Raises:
            FileNotFoundError: the source does not exist, or has no weights in a supported format.
            ValueError: for the other reasons of `EasyDeLBaseModule.from_pretrained`.
        """
        model = cls.nnx_class().from_pretrained(pretrained_model_name_or_path, **arguments)
        return cls.from_nnx(model)

    # -- text ----------------------------------------------------------------------------------

    def _md_info(self) -> str:
        """Return a page of Markdown: the configuration, and every parameter's shape and dtype."""
        name = f"{type(self).__name__} ({self.config.model_type or 'no model type'})"
        return model_markdown(name, self.config.to_dict(), self.params_shape_tree)

    def __repr__(self) -> str:
        elements = sum(prod(leaf.shape) for leaf in jax.tree.leaves(self.params_shape_tree))
        suffix = "" if self._params is not None else ", without params"
        return (
            f"{type(self).__name__}(model_type={self.config.model_type!r}, "
            f"{elements:,} parameters, dtype={self.dtype.name}{suffix})"
        )

    def __str__(self) -> str:
        """Return the model's `repr` and its configuration as readable text."""
        fields = "\n".join(f"  {key} = {value}" for key, value in self.config.to_dict().items())
        return f"{self!r}\n{fields}"

    # -- inside --------------------------------------------------------------------------------

    def _init_variables(self, rng: jax.Array, input_shape: tuple[int, ...]) -> Any:
        variables = self.module.init(rng, jnp.zeros(input_shape, jnp.int32))
        return unfreeze(variables.get("params", {}))

    def needed_collections(self) -> dict[str, list[str]]:
        """Return the paths of variables that the module needs besides parameters and caches.

        They are grouped by collection. Collections that the module only writes to, such as those
        of `sow`, are not included.
        """
        if type(self)._init_variables is not EDPretrainedModel._init_variables:
            return {}  # a class with its own initialisation decides itself
        inputs = jnp.zeros(self.input_shape, jnp.int32)
        key = jax.random.key(0)
        initial = jax.eval_shape(lambda: meta.unbox(unfreeze(self.module.init(key, inputs))))
        passed = {name: initial.pop(name) for name in ("params", "cache") if name in initial}
        needed = {name: [leaf.path for leaf in named_leaves(initial[name])] for name in initial}
        if not needed:
            return {}

        def run(variables: Any) -> None:
            self.module.apply(variables, inputs, rngs={"params": key})

        try:
            jax.eval_shape(run, passed)
        except FlaxError:
            return needed
        return {}

    def params_with_axes(self) -> Any:
        """Return the abstract parameters; those with axis names as `nnx.Param`s that have them."""
        boxed = jax.eval_shape(lambda: self._init_variables(jax.random.key(0), self.input_shape))

        def with_axes(node: Any) -> Any:
            if not _is_box(node):
                return node
            names = getattr(node, "names", None)
            return node.unbox() if names is None else nnx.Param(node.unbox(), axes=tuple(names))

        return jax.tree.map(with_axes, boxed, is_leaf=_is_box)

    def _fitting(self, params: Any) -> Any:
        """Return the given parameters in the structure of the model's tree; for None, the model's.

        Raises:
            TreeStructureError: if their paths or shapes are not those of the model's parameters;
                lists all differences.
        """
        if params is None:
            return self.params
        path = f"params of {type(self).__name__}"
        return rebuild(self.params_shape_tree, params, path=path)

    def _undefined(self, name: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not define {name}")


def _is_box(node: Any) -> bool:
    return isinstance(node, meta.AxisMetadata)


def model_markdown(name: str, config: Mapping[str, Any], params: Any) -> str:
    """Return a Markdown page about a model.

    Args:
        name: title of the page.
        config: the configuration as JSON.
        params: the parameters, arrays or ShapeDtypeStructs. Leaves of equal shape and dtype whose
            paths differ only in numbers, such as those of a decoder's layers, share a row.
    """
    rows: dict[tuple[str, tuple[int, ...], str], int] = {}
    elements = nbytes = 0
    for named in named_leaves(params):
        shape, dtype = tuple(np.shape(named.leaf)), str(named.leaf.dtype)
        path = "/".join("*" if part.isdigit() else part for part in named.path.split("/"))
        rows[path, shape, dtype] = rows.get((path, shape, dtype), 0) + 1
        elements += prod(shape)
        nbytes += leaf_bytes(named.leaf)
    settings = [f"| {key} | `{json.dumps(value)}` |" for key, value in config.items()]
    weights = [
        f"| `{path}` | {' x '.join(map(str, shape)) or 'scalar'} | {dtype} | {count} "
        f"| {prod(shape) * count:,} |"
        for (path, shape, dtype), count in rows.items()
    ]
    lines = [
        f"# {name}",
        "",
        f"{elements:,} parameters, {nbytes:,} bytes.",
        "",
        "## Configuration",
        "",
        "| field | value |",
        "| --- | --- |",
        *settings,
        "",
        "## Parameters",
        "",
        "| path | shape | dtype | how many | elements |",
        "| --- | --- | --- | ---: | ---: |",
        *weights,
        "",
    ]
    return "\n".join(lines)
