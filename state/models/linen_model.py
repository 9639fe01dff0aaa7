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
from cairn.interop.placement.rules import axis_units
from cairn.state.adapters.models import abstract_model
from cairn.state.errors import NotInitializedError
from cairn.state.models.base import EasyDeLBaseModule
from cairn.state.models.linen_twin import linen_model, make_twin
from cairn.state.paths import named_leaves, rebuild
from cairn.state.sharding.report import leaf_bytes
from cairn.state.sharding.rules import check_rules, plan
from cairn.state.states.easydel_state import EasyDeLState
from cairn.storage.store.uri import StoreURI

__all__ = ["EDPretrainedModel", "model_markdown"]


_PLAIN = (bool, int, float, str, type(None))
_OF_A_MODEL = frozenset({"seed"})
"""Attributes that say how one model was made, and do not affect what it computes."""


class EDPretrainedModel:
    """A Linen module, its configuration and its parameters.

    The parameters are a nested dict at `params`; every method that needs them accepts others as
    `params=`, so that a function of them can be differentiated and compiled. A subclass defines
    the module's call (`__call__`), its embeddings, and its caches:

        class MyModel(EDPretrainedModel):
            module_class = MyModule   # MyModule(config, dtype=dtype) is the Linen module

            def __call__(self, input_ids, params=None):
                params = self.params if params is None else params
                return self.module.apply({"params": params}, input_ids)

    That is all it takes to train, save, load and export it: `to_easydel_state` makes a state, which
    `EasyDeLState.load_state` finds again by the class's name once the class is defined, and
    `save_pretrained` writes the parameters under their own names, dots between them. A class with
    an `__init__` of its own needs no `module_class`: it is made as
    `MyModel(config, dtype=..., _do_init=False)`. A module that can't run without other collections
    than its parameters, such as the averages of a BatchNorm, is refused there.

    Attributes:
        module_class: the Linen module's class, or a function that makes it; called with the config
            and `dtype=`.
        module: the Linen module.
        input_shape: shape of the input that the module is initialised with: (batch, tokens).
        seed: of the initial parameters.
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
            config: shape and options.
            module: takes integers of `input_shape`; its `params` are the model's. By default the
                module that `module_class` makes.
            input_shape: of the input that the module is initialised with.
            seed: of the initial parameters.
            dtype: dtype of the computation, as the module has it.
            _do_init: make new parameters. If False, the model is abstract: pass parameters to each
                call, or set `params`.
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
            input_shape: by default the model's.
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
            partition_rules: pairs of a regular expression and a PartitionSpec; by default the
                config's, else the axis names that the module gives its parameters
                (`linen.with_partitioning`), be they logical or a mesh's own.
            mesh: by default the config's.

        Raises:
            ShardingError: if leaves do not fit; lists all of them.
        """
        rules = check_rules(partition_rules)
        if rules is None:
            rules = check_rules(self.config.get_partition_rules())
        mesh = self.mesh if mesh is None else mesh
        axis = self.config.partition_axis
        axis_rules = None if axis is None else axis.axis_rules()
        tree = self.params_with_axes()
        report = plan(
            tree, mesh, rules=rules, axis_rules=axis_rules, units=axis_units(self.config)
        ).raise_for_problems()
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
        """Return this model as an NNX module, around the same arrays.

        Raises:
            ArgumentError: if the config alone does not give this model's module or plain
                attributes.
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
        settings = {"dtype": self.dtype.name, "param_dtype": self._param_dtype(params).name}
        graphdef, state = nnx.split(abstract_model(self.nnx_class(), self.config, settings))
        model: EasyDeLBaseModule = nnx.merge(
            graphdef, rebuild(state, self._fitting(params), path="params")
        )
        return model

    @classmethod
    def from_nnx(cls, model: EasyDeLBaseModule) -> Self:
        """Return the Linen form of an NNX module, around the same arrays.

        Raises:
            ArgumentError: if it is no NNX form of this class.
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
        """Return the class of the NNX form, which loads, saves and trains it."""
        if cls._nnx_class is None:
            raise NotImplementedError(f"{cls.__name__} does not define nnx_class")
        return cls._nnx_class

    # -- generation ----------------------------------------------------------------------------

    def can_generate(self) -> bool:
        """Return whether the model makes caches, and so can generate text."""
        return type(self).init_cache is not EDPretrainedModel.init_cache

    def prepare_inputs_for_generation(
        self, input_ids: jax.Array, max_length: int, attention_mask: jax.Array | None = None
    ) -> dict[str, Any]:
        """Return the arguments of the first call of a generation, without the prompt.

        Args:
            input_ids: integers (batch, tokens).
            max_length: prompt and new tokens together.
            attention_mask: 1 for tokens, 0 for padding, which is on the left.

        Returns:
            `past_key_values`, an empty cache; `attention_mask` (batch, max_length), which is 1 for
            every slot that may be attended to, those of new tokens included; `position_ids` of the
            prompt.

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
            outputs: of the last call; they carry the `cache`.
            inputs: the last call's arguments.
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
            params: by default the model's.
            tx: an optimizer; its state is made where the parameters are.
            **create_arguments: more arguments of `EasyDeLState.create`.
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
        """Return the model with its matrices in int8 (method "8bit"); this one stays as it is.

        The new model runs, generates and saves a state; it can't be trained.

        Args:
            params: by default the model's.
            group_size: inputs that share a scale, -1 for all.
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
            save_directory: a folder, here or in a store.
            params: by default the model's.
            max_shard_size: most bytes of tensors per file ("5GB").
            float_dtype: cast floating weights to this; None keeps their dtypes.

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
        """Return a model with pretrained weights; each is read and placed alone.

        Args:
            pretrained_model_name_or_path: a folder or a *.gguf file, here or in a store, or a hub
                id such as "org/name".
            **arguments: those of `EasyDeLBaseModule.from_pretrained`: `dtype`, `param_dtype`,
                `precision`, `auto_shard_model`, `mesh`, `partition_rules`, `sharding_axis_dims`,
                `sharding_axis_names`, `device`, `config_kwargs` and others.

        Raises:
            FileNotFoundError: as `EasyDeLBaseModule.from_pretrained`.
            ValueError: as `EasyDeLBaseModule.from_pretrained`.
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
        """Return the configuration and the module as text for people."""
        fields = "\n".join(f"  {key} = {value}" for key, value in self.config.to_dict().items())
        return f"{self!r}\n{fields}"

    # -- inside --------------------------------------------------------------------------------

    def _init_variables(self, rng: jax.Array, input_shape: tuple[int, ...]) -> Any:
        variables = self.module.init(rng, jnp.zeros(input_shape, jnp.int32))
        return unfreeze(variables.get("params", {}))

    def needed_collections(self) -> dict[str, list[str]]:
        """Return the variables that the module needs besides parameters and caches, by collection.

        Collections that it only writes to, as `sow` does, are not included.
        """
        if type(self)._init_variables is not EDPretrainedModel._init_variables:
            return {}  # who initialises it with other inputs says what is of it
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
        """Return the abstract parameters; those with axis names are `nnx.Param`s with them."""
        boxed = jax.eval_shape(lambda: self._init_variables(jax.random.key(0), self.input_shape))

        def with_axes(node: Any) -> Any:
            if not _is_box(node):
                return node
            names = getattr(node, "names", None)
            return node.unbox() if names is None else nnx.Param(node.unbox(), axes=tuple(names))

        return jax.tree.map(with_axes, boxed, is_leaf=_is_box)

    def _fitting(self, params: Any) -> Any:
        """Return the given parameters, or else the model's, in the model's own tree.

        Raises:
            TreeStructureError: if they are not exactly the model's; lists every difference.
        """
        if params is None:
            return self.params
        path = f"params of {type(self).__name__}"
        return rebuild(self.params_shape_tree, params, path=path)

    def _param_dtype(self, params: Any) -> np.dtype[Any]:
        """Return the most common dtype of the floating parameters."""
        tree = self.params if params is None else params
        dtypes = [np.dtype(leaf.dtype) for leaf in jax.tree.leaves(tree)]
        floating = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
        return max(dict.fromkeys(floating), key=floating.count, default=np.dtype(np.float32))

    def _undefined(self, name: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not define {name}")


def _is_box(node: Any) -> bool:
    return isinstance(node, meta.AxisMetadata)


def model_markdown(name: str, config: Mapping[str, Any], params: Any) -> str:
    """Return a Markdown page about a model.

    Args:
        name: its title.
        config: JSON.
        params: arrays or ShapeDtypeStructs. Leaves whose paths differ only in numbers, as those of
            a decoder's layers do, and that are alike share a row.
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
