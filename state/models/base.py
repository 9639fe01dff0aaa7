"""EasyDeLBaseModule: base of every NNX model, whatever its layers are.

A subclass must define only `__init__` (its layers) and `__call__` (its forward pass). If its
`__call__` has no argument `labels`, calls may still pass `labels`: this class computes the loss and
adds it to the outputs.
"""

import inspect
from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from cairn.interop.config.base import EDPretrainedConfig
from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.dtypes import floating_dtype
from cairn.interop.errors import ArgumentError
from cairn.interop.names import TaskType
from cairn.state.adapters.quantized_weight import PackedParam
from cairn.state.model_classes import register, shipped_decoder
from cairn.state.models.adaptation import ModuleAdaptationMixin
from cairn.state.models.calls import ModuleCallMixin
from cairn.state.models.flops import FlopsMixin
from cairn.state.models.generation import EasyGenerationMixin
from cairn.state.models.hub.bridge import EasyBridgeMixin
from cairn.state.models.loss import LossConfig, causal_lm_loss, with_loss
from cairn.state.models.operation_cache import OperationCacheMixin
from cairn.state.models.sharding import ModuleShardingMixin
from cairn.state.paths import named_leaves, own_variables, rebuild
from cairn.state.sharding.mesh import mesh_of
from cairn.state.states.easydel_state import EasyDeLState

__all__ = ["EasyDeLBaseModule"]


class EasyDeLBaseModule(
    nnx.Module,
    ModuleShardingMixin,
    ModuleAdaptationMixin,
    ModuleCallMixin,
    EasyGenerationMixin,
    EasyBridgeMixin,
    OperationCacheMixin,
    FlopsMixin,
):
    """Base of all models: configuration, graph, placement, dtype, loss, state.

    Attributes:
        config: the model's configuration; static and hashable.
        dtype: dtype of the computation.
        param_dtype: dtype of the parameters.
        precision: matrix multiplication precision, None for JAX's default.
    """

    model_task: ClassVar[TaskType] = TaskType.CAUSAL_LM
    config: EDPretrainedConfig

    def __init__(
        self,
        config: EDPretrainedConfig,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """Store the settings. `rngs` is for the subclass's layers; it is not kept."""
        self.config = config
        self.dtype = floating_dtype(dtype, argument="dtype")
        self.param_dtype = floating_dtype(param_dtype, argument="param_dtype")
        self.precision = _checked_precision(precision)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = cls.__dict__.get("__call__")
        if forward is not None and "labels" not in inspect.signature(forward).parameters:
            # Calls look `__call__` up on the class, so it is replaced there.
            cls.__call__ = with_loss(forward)  # type: ignore[method-assign]  # one per subclass
        register(cls)

    @classmethod
    def _class_for(cls, config: EDPretrainedConfig) -> type[Any]:
        """Return the class that `from_pretrained` builds for a config.

        That is this class; called on the base class, it is the decoder.

        Raises:
            ArgumentError: if this is the base class, and the config is of no supported family.
        """
        if cls is not EasyDeLBaseModule:
            return cls
        if isinstance(config, DecoderConfig):
            return shipped_decoder()
        raise ArgumentError(
            path="EasyDeLBaseModule.from_pretrained",
            expected="a model of a known family",
            found=f"model_type {config.model_type!r}",
            next_step="call from_pretrained on the model's own class",
        )

    def __call__(self, input_ids: jax.Array, **kwargs: Any) -> Any:
        """Run the forward pass; subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")

    # -- information ---------------------------------------------------------------------------

    @property
    def model_type(self) -> str:
        """The config's model type, such as "llama"."""
        return self.config.model_type

    @property
    def mesh(self) -> Mesh:
        """The mesh of the parameters' shardings; if they have none, the config's mesh."""
        return mesh_of(nnx.state(self)) or self.config.mesh

    @property
    def params(self) -> dict[str, Any]:
        """The parameters as a nested dict of arrays."""
        return self.split_params_dict()

    @property
    def graphtree_params_shape(self) -> dict[str, Any]:
        """The parameters' shapes and dtypes, as a nested dict of ShapeDtypeStructs."""
        shapes: dict[str, Any] = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.params
        )
        return shapes

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(prod(named.leaf.shape) for named in named_leaves(nnx.state(self, nnx.Param)))

    @property
    def module_dtype(self) -> np.dtype[Any]:
        """Dtype of most elements of the floating parameters; without any, `param_dtype`."""
        counts: dict[np.dtype[Any], int] = {}
        for named in named_leaves(nnx.state(self, nnx.All(nnx.Param, nnx.Not(PackedParam)))):
            if jnp.issubdtype(named.leaf.dtype, jnp.floating):
                dtype = np.dtype(named.leaf.dtype)
                counts[dtype] = counts.get(dtype, 0) + prod(named.leaf.shape)
        return max(counts, key=counts.__getitem__) if counts else self.param_dtype

    # -- graph ---------------------------------------------------------------------------------

    @property
    def trainable_filter(self) -> type[nnx.Variable[Any]]:
        """Type of the trained Variables: `nnx.LoRAParam` with adapters, else `nnx.Param`."""
        trainable: type[nnx.Variable[Any]] = nnx.LoRAParam if self.lora_is_enabled else nnx.Param
        return trainable

    @property
    def graphdef(self) -> Any:
        """Static structure of the module, without arrays."""
        return nnx.graphdef(self)

    @property
    def graphstate(self) -> nnx.State[Any, Any]:
        """Parameters that are trained; later changes of the module do not change them."""
        parameters: nnx.State[Any, Any] = own_variables(nnx.state(self, self.trainable_filter))
        return parameters

    @property
    def graphother(self) -> nnx.State[Any, Any]:
        """The module's state without `graphstate`; later changes of the module do not change it."""
        others: nnx.State[Any, Any] = own_variables(nnx.split(self, self.trainable_filter, ...)[2])
        return others

    def split_module(self) -> tuple[Any, nnx.State[Any, Any]]:
        """Return the module as (graphdef, state), unaffected by later changes of the module."""
        graphdef, state = nnx.split(self)
        return graphdef, own_variables(state)

    def merge_module(self, graphdef: Any, state: nnx.State[Any, Any]) -> Self:
        """Return a new module from the graphdef and the state that `split_module` returned."""
        merged: Self = nnx.merge(graphdef, state)
        return merged

    def split_params(self) -> nnx.State[Any, Any]:
        """Return the parameters as an NNX State; later changes of the module do not change it."""
        params: nnx.State[Any, Any] = own_variables(nnx.state(self, nnx.Param))
        return params

    def split_params_dict(self) -> dict[str, Any]:
        """Return the parameters as a nested dict of arrays."""
        pure: dict[str, Any] = nnx.to_pure_dict(self.split_params())
        return pure

    def merge_params(self, params: Any) -> Self:
        """Put parameters, an NNX State or a nested dict, into the module and return it.

        Raises:
            TreeStructureError: if their paths or shapes are not those of the module's parameters;
                lists all differences.
        """
        own = self.split_params()
        nnx.update(self, rebuild(own, params, path=f"parameters of {type(self).__name__}"))
        return self

    def merge_params_dict(self, params_dict: Mapping[Any, Any]) -> Self:
        """Put a nested dict of parameters into the module and return it.

        Raises:
            TreeStructureError: if their paths or shapes are not those of the module's parameters;
                lists all differences.
        """
        return self.merge_params(dict(params_dict))

    # -- dtype ---------------------------------------------------------------------------------

    def to_dtype(self, dtype: Any) -> Self:
        """Cast the floating leaves to a dtype, in place, and return the module.

        Integers and all parts of quantized weights stay as they are.

        Raises:
            ArgumentError: if there is no such dtype, or it is not floating.
        """
        target = floating_dtype(dtype, argument="dtype")

        def cast(leaf: Any) -> Any:
            return leaf.astype(target) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        nnx.update(self, jax.tree.map(cast, nnx.state(self, nnx.Not(PackedParam))))
        self.param_dtype = target
        return self

    def half(self) -> Self:
        """Cast the floating leaves to float16."""
        return self.to_dtype(jnp.float16)

    def float(self) -> Self:
        """Cast the floating leaves to float32."""
        return self.to_dtype(jnp.float32)

    # -- loss and state ------------------------------------------------------------------------

    def compute_loss(
        self,
        labels: jax.Array,
        logits: jax.Array,
        config: LossConfig | None = None,
        *,
        auxiliary_loss: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the loss of logits against labels, and its parts; see `causal_lm_loss`."""
        return causal_lm_loss(logits, labels, config, auxiliary_loss=auxiliary_loss)

    def to_state(
        self,
        optimizer: optax.GradientTransformation | None = None,
        **create_arguments: Any,
    ) -> EasyDeLState:
        """Return the training state of this model.

        Args:
            optimizer: the optimizer, whose state is initialised on the parameters' devices; None
                for a state without an optimizer.
            create_arguments: further arguments of `EasyDeLState.create`.
        """
        return EasyDeLState.create(
            model=self, tx=optimizer, init_opt_state=optimizer is not None, **create_arguments
        )


def _checked_precision(precision: Any) -> Any:
    """Return the precision unchanged, after a check.

    Raises:
        ArgumentError: JAX has no precision or algorithm of this name.
    """
    presets = jax.lax.DotAlgorithmPreset.__members__
    if isinstance(precision, str) and precision.upper() not in presets:
        try:
            jax.lax.Precision(precision)
        except ValueError as error:
            raise ArgumentError(
                path="precision",
                expected="None, 'default', 'high', 'highest', or an algorithm such as "
                "'BF16_BF16_F32'",
                found=repr(precision),
            ) from error
    return precision
