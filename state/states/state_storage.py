"""Storage of a training state: the part of EasyDeLState that saves and loads."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, SupportsIndex

from cairn.interop.names import TaskType
from cairn.interop.placement.rules import MESH_AXES
from cairn.state.checkpointing.saves.save_handle import SaveHandle
from cairn.state.model_classes import module_class, shipped_decoder
from cairn.state.states.checkpoint import run_has_saved
from cairn.state.states.load_options import LoadOptions
from cairn.state.states.optimizers import given_optimizer
from cairn.state.states.state_load import (
    is_pretrained,
    load_easydel_state,
    load_module,
    load_optimizer_into,
    may_be_hub_id,
)
from cairn.state.states.state_save import StateSaveOptions, save_easydel_state
from cairn.storage.arrays.data_files import Compression

__all__ = ["StateStorageMixin"]


class StateStorageMixin:
    """Mixin that saves and loads through `state_save` and `state_load`."""

    def save_state(
        self,
        save_directory: str | os.PathLike[str],
        float_dtype: Any = None,
        verbose: bool = True,
        mismatch_allowed: bool = True,
        save_optimizer: bool = True,
        enable: bool | None = None,
        *,
        step: SupportsIndex | None = None,
        wait: bool = False,
        overwrite: bool = False,
        metrics: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        extras: Mapping[str, Any] | None = None,
        iterators: Mapping[str, Any] | None = None,
        compression: Compression | None = None,
        deadline: float | None = None,
        merge_lora: bool = False,
    ) -> SaveHandle:
        """Save the state as a checkpoint of a run; return as soon as the state may change again.

        Every process takes part. One save is in flight at a time: the next one waits for it. A
        failure in the background is raised by the next save, by `wait()`, or at the end of the
        process, which waits until the save is durable.

        Args:
            save_directory: URI or path of the run; the first save creates it.
            float_dtype: dtype to store floating parameters in; None keeps theirs. Optimizer state
                and added fields keep their dtypes.
            verbose: say on stderr what is saved and when it is durable.
            mismatch_allowed: False raises if the model differs from what its config describes.
            save_optimizer: store the optimizer state too, if there is one.
            enable: False skips this save; None and True save.
            step: number of the checkpoint, by default the state's step. If you pass it, the call
                does not wait for the device to finish that step.
            wait: return only once the checkpoint is durable.
            overwrite: replace this step, and supersede later ones.
            metrics: numbers to keep with the checkpoint.
            labels: texts to keep with the checkpoint.
            extras: JSON that `load_state` gives back as `state.extras`.
            iterators: of training data, by name: their positions are saved with the step, for
                `load_state(iterators=...)`; see `Checkpointer.save`.
            compression: "zstd" stores floating weights in about a tenth less space and takes
                several times as long; None stores the bytes as they are.
            deadline: how many seconds this call may take: for the previous save, for the store,
                and with `wait` for the checkpoint to be durable. Past them it raises, and the
                previous save goes on. None waits while there is progress: the call gives up on a
                store that does not answer for 90 s.
            merge_lora: store the model with its adapters merged too, beside the model, the adapters
                and the optimizer state. `load_state` continues from the latter; `from_pretrained`
                and exports take the merged model. This call computes the merged weights, and they
                stay in memory until they are written.

        Returns:
            A handle with `wait()`, `done`, `error`, `step` and `uri`.

        Raises:
            StepExistsError: if the run has this step or a later one, and not `overwrite`.
            TreeStructureError: if the model differs from its config and `mismatch_allowed=False`.
            ConfigError: if `load_state` could never load it, such as for a config whose
                `model_type` is unknown. An error that only building the model shows fails the first
                save (SaveError from `wait`); each later save raises it here.
            UnsupportedFormatError: if `compression` is unknown.
            UnsupportedLeafError: if the state of an iterator can't be stored.
            ArgumentError: if `extras` is not JSON, if a flag is no bool, if `merge_lora` comes
                without adapters or with adapters that can't be merged, or if `enable`, `step`,
                `labels`, `extras` or another argument differs between processes; on every process.
                `metrics` may differ: those of process 0 are stored.
            SaveError: if the previous save failed, or is still under way at the deadline.
            StoreUnavailableError: if the store gives no answer in time; nothing is saved.
            TimeoutError: with `wait`, if it is not durable at the deadline; the save goes on.
        """
        options = StateSaveOptions(
            float_dtype=float_dtype,
            verbose=verbose,
            mismatch_allowed=mismatch_allowed,
            save_optimizer=save_optimizer,
            enable=enable,
            step=step,
            wait=wait,
            overwrite=overwrite,
            metrics=metrics,
            labels=labels,
            extras=extras,
            iterators=iterators,
            compression=compression,
            deadline=deadline,
            merge_lora=merge_lora,
        )
        return save_easydel_state(self, save_directory, options)

    @classmethod
    def load_state(
        cls,
        load_directory: str | os.PathLike[str],
        device: Any = None,
        dtype: Any = None,
        param_dtype: Any = None,
        precision: Any = None,
        sharding_axis_dims: Sequence[int] = (1, -1, 1, 1),
        sharding_dcn_axis_dims: Sequence[int] | None = None,
        sharding_axis_names: Sequence[str] = MESH_AXES,
        partition_axis: Any = None,
        shard_attention_computation: bool = True,
        shard_fns: Mapping[Any, Callable[..., Any]] | None = None,
        backend: Any = None,
        platform: Any = None,
        config_kwargs: Mapping[str, Any] | None = None,
        model_task: TaskType | str = TaskType.AUTO_BIND,
        auto_shard_model: bool = False,
        partition_rules: Any = None,
        quantization_platform: Any = None,
        quantization_method: Any = None,
        quantization_block_size: int = 128,
        quantization_pattern: str | None = None,
        quantize_tensors: bool = True,
        verbose: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Load a state from a run's checkpoint, or from Hugging Face weights.

        `LoadOptions` describes each argument in full. Besides those below there are `step`,
        `damaged` ("refuse", or "skip" to resume from the newest sound step if the latest is known
        to be damaged), `tx`, `tx_init`, `optimizer` ("require" or "skip"), `fields`, `mesh`,
        `model_class`, `iterators` (set in place to their saved positions), and for the hub
        `revision`, `token` and `local_files_only`.

        Args:
            load_directory: "run" (its latest step), "run@alias", "run/steps/N", each a path or a
                URI; a Hugging Face folder, a GGUF file, or "hf://owner/name" for the hub.
            device: where everything goes if it is not sharded: a device, or a platform such as
                "cpu"; None is this process's default device.
            dtype: dtype of the computation; None keeps the stored one.
            param_dtype: a dtype casts floating leaves; None keeps the stored ones, and makes those
                of Hugging Face weights float32.
            precision: of matrix products; None keeps the stored one.
            sharding_axis_dims: devices along each mesh axis.
            sharding_dcn_axis_dims: slices, or else processes, along each mesh axis;
                `sharding_axis_dims` are then those of one slice.
            sharding_axis_names: names of the mesh axes.
            partition_axis: a PartitionAxis: which mesh axes carry which logical axis.
            shard_attention_computation: False keeps heads and tokens of attention whole on every
                device.
            shard_fns: functions, by the path of a leaf, each of which places its leaf.
            backend: the devices to load onto: "cpu", "gpu" or "tpu".
            platform: the same, or "jax" for whatever there is.
            config_kwargs: fields of the model's config to change.
            model_task: AUTO_BIND, or what the model class must be for.
            auto_shard_model: shard over the mesh of `sharding_axis_dims`.
            partition_rules: pairs of a regular expression and a PartitionSpec.
            quantization_platform: where weights are quantized: None, "jax", or the platform in
                use; the numbers are the same on each.
            quantization_method: "nf4", "8bit", "a8bit", "a8q", "a4q" or "aqt": quantize while
                loading, a few weights at a time. The result is what loading and then
                `model.quantize` gives. The optimizer state of float weights must be left out
                (optimizer="skip"); that of adapters stays. None keeps what is stored.
            quantization_block_size: inputs that share a scale, -1 for all of them.
            quantization_pattern: regular expression, searched in the "/"-joined path of each
                layer; None for all layers.
            quantize_tensors: False is the explicit form of no quantization_method, and contradicts
                one.
            verbose: say on stderr what is loaded.
            **kwargs: the arguments named above; any other is refused, with the known one that it
                is like.

        Returns:
            The state; its `extras` are what the save kept.

        Raises:
            StepDamagedError: if no step is named and the latest is damaged; it names one to load.
            FileNotFoundError: if there is no such run, alias, step or folder.
            ValueError: if arguments contradict each other or cannot act, or if the checkpoint does
                not fit the model, the optimizer and the iterators; all that differs is listed.
            CorruptionError: if stored bytes fail their check.
        """
        arguments = LoadOptions.checked(
            kwargs,
            device=device,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            sharding_axis_dims=sharding_axis_dims,
            sharding_dcn_axis_dims=sharding_dcn_axis_dims,
            sharding_axis_names=sharding_axis_names,
            partition_axis=partition_axis,
            shard_attention_computation=shard_attention_computation,
            shard_fns=shard_fns,
            backend=backend,
            platform=platform,
            config_kwargs=config_kwargs,
            model_task=model_task,
            auto_shard_model=auto_shard_model,
            partition_rules=partition_rules,
            quantization_platform=quantization_platform,
            quantization_method=quantization_method,
            quantization_block_size=quantization_block_size,
            quantization_pattern=quantization_pattern,
            quantize_tensors=quantize_tensors,
            verbose=verbose,
        )
        return load_easydel_state(cls, load_directory, arguments)

    @classmethod
    def load(cls, load_directory: str | os.PathLike[str], **arguments: Any) -> Self:
        """Load a state; older name of `load_state`."""
        return cls.load_state(load_directory, **arguments)

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        model_class: type[Any] | None = None,
        tx: Any = None,
        tx_init: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> Self:
        """Return a fresh state, at step 0, around a model from its `from_pretrained`.

        Args:
            source: a Hugging Face folder, a GGUF file, a hub id ("owner/name", "hf://owner/name"),
                or a checkpoint of a run.
            model_class: class of the model, by default the one decoder (or the one stored).
            tx: an optimizer, whose state is initialized; by default that of `tx_init`.
            tx_init: JSON that rebuilds `tx`.
            **arguments: those of the model's `from_pretrained`, or of `load_state` for a
                checkpoint.
        """
        if is_pretrained(source) or may_be_hub_id(source):
            model = module_class(model_class or shipped_decoder()).from_pretrained(
                source, **arguments
            )
        else:
            model = load_module(source, LoadOptions.checked(arguments, model_class=model_class))
        tx, tx_init = given_optimizer(tx, tx_init)
        state_class: Any = cls
        created: Self = state_class.create(
            model=model, tx=tx, tx_init=tx_init, init_opt_state=tx is not None
        )
        return created

    @classmethod
    def load_or_create(
        cls, uri: str | os.PathLike[str], create: Callable[[], Self], **arguments: Any
    ) -> Self:
        """Load the latest checkpoint of a run, or create a first state if the run has none yet.

        The same line serves the first start of a job and every restart.

        Args:
            uri: the run, or a checkpoint of it.
            create: makes the first state.
            **arguments: those of `load_state`.

        Raises:
            StepDamagedError: as `load_state`; `damaged="skip"` resumes from the newest sound step.
            FileNotFoundError: as `load_state`, but not for a run without any checkpoint.
            ValueError: as `load_state`; or the folder is no run, and holds other checkpoints.
            CorruptionError: as `load_state`; or lost records of the run leave open what was saved.
        """
        return cls.load_state(uri, **arguments) if run_has_saved(uri) else create()

    def load_optimizer(self, load_directory: str | os.PathLike[str]) -> Self:
        """Return the state with the optimizer state of a checkpoint, placed like its parameters.

        Raises:
            OptimizerNotFoundError: if the checkpoint holds none (FileNotFoundError).
            NotFoundError: if there is no such checkpoint (FileNotFoundError).
            ArgumentError: if the folder holds pickle files; they are never read.
            TreeMismatchError: if the stored optimizer state does not fit; lists every leaf.
        """
        loaded: Self = load_optimizer_into(self, load_directory)
        return loaded

    def to_torch(self, *, float_dtype: Any = None) -> dict[str, Any]:
        """Return the state's weights as PyTorch tensors, by their names in `transformers`.

        Args:
            float_dtype: cast floating weights to this, and make quantized ones floating again.

        Raises:
            ArgumentError: PyTorch is not installed.
            ConversionError: the model has adapters, or is quantized and there is no `float_dtype`.
        """
        # Not `state.model`: what its user did to that module is not in the state.
        whole: Any = self
        weights: dict[str, Any] = whole.merge(whole.graphstate).to_torch(float_dtype=float_dtype)
        return weights

    def to_pytorch(self, *, float_dtype: Any = None) -> Any:
        """Return the state's weights as a `transformers` model, in evaluation mode.

        Args:
            float_dtype: as in `to_torch`.

        Raises:
            ArgumentError: transformers or PyTorch is not installed.
            ConversionError: the model has adapters, or is quantized and there is no `float_dtype`.
            ConfigError: the family can't express the model's options.
        """
        whole: Any = self
        return whole.merge(whole.graphstate).to_pytorch(float_dtype=float_dtype)
