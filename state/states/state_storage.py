"""Saves and loads of a training state, as a mixin of EasyDeLState."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, SupportsIndex

from cairn.interop.names import TaskType
from cairn.interop.partition_axis import MESH_AXES
from cairn.state.checkpointing.save_handle import SaveHandle
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
from cairn.storage.runs.records.annotations import Better

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
        better: Mapping[str, Better] | None = None,
        labels: Mapping[str, str] | None = None,
        extras: Mapping[str, Any] | None = None,
        iterators: Mapping[str, Any] | None = None,
        compression: Compression | None = None,
        deadline: float | None = None,
        merge_lora: bool = False,
    ) -> SaveHandle:
        """Save the state as a checkpoint of a run; return once the arrays may be donated.

        All processes must call this. One save is in flight at a time: the next one waits for it. A
        failure in the background is raised by the next save, by `wait()`, or at the exit of the
        process, which waits until the save is durable.

        Args:
            save_directory: URI or path of the run; the first save creates it.
            float_dtype: dtype to store floating parameters in; None keeps their dtypes. Optimizer
                state and added fields always keep theirs.
            verbose: whether to print progress to stderr.
            mismatch_allowed: False raises if the model differs from what its config describes.
            save_optimizer: whether to store the optimizer state, if there is one.
            enable: False saves nothing; None and True save.
            step: number of the checkpoint; None for the state's step. If you pass it, the call
                does not wait for the device to finish that training step.
            wait: whether to return only once the checkpoint is durable.
            overwrite: allow a step that is not above the latest: replace it, and supersede later
                ones.
            metrics: numbers to store with the checkpoint, by name.
            better: "min" or "max" by the name of a metric: whether lower or higher is better. Lists
                of runs then show its best value, and "best:METRIC" finds the step.
            labels: texts to store with the checkpoint, by name.
            extras: JSON to store with the checkpoint; a loaded state has it as `state.extras`.
            iterators: iterators of training data, by name, whose positions to store for
                `load_state(iterators=...)`; see `Checkpointer.save`.
            compression: "zstd" stores floating weights in about a tenth less space and takes
                several times as long; None stores the bytes as they are.
            deadline: maximum seconds for this call: for the previous save, for the store, and with
                `wait` until the checkpoint is durable. After that it raises, and the previous save
                goes on. None waits while the previous save makes progress; a store that does not
                respond for 90 s counts as no progress.
            merge_lora: whether to store also the model with its adapters merged. `load_state` loads
                the model, adapters and optimizer state; `from_pretrained` and exports use the
                merged model. The merged weights are computed in this call, and need memory until
                they are written.

        Returns:
            A handle with `wait()`, `done`, `error`, `step` and `uri`.

        Raises:
            StepExistsError: if the run has this step or a later one, and `overwrite` is False.
            TreeStructureError: if the model differs from its config and `mismatch_allowed=False`.
            ConfigError: if `load_state` could never load the state, for example because the
                config's `model_type` is unknown. If this is only found by building the model, in
                the background, the first save fails (`wait` raises SaveError), and each later call
                raises ConfigError.
            UnsupportedFormatError: if `compression` is unknown.
            UnsupportedLeafError: if the state of an iterator can't be stored.
            ArgumentError: if `extras` is not JSON, if a flag is no bool, if `merge_lora` is given
                and there are no adapters or they can't be merged, or if arguments other than
                `metrics` and `better` differ between processes; raised on every process. Of these
                two, those of process 0 are stored.
            SaveError: if the previous save failed, or is still under way at the deadline.
            StoreUnavailableError: if the store does not respond in time; nothing is saved.
            TimeoutError: with `wait`, if the step is not durable at the deadline; the save goes on.
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
            better=better,
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

        `LoadOptions` describes all arguments in full. Further ones are `step`, `damaged` ("refuse",
        or "skip" to resume from the newest undamaged step if the latest has a record of damage),
        `tx`, `tx_init`, `optimizer` ("require" or "skip"), `fields`, `mesh`, `model_class`,
        `iterators` (set in place to their saved positions), and for the hub `revision`, `token` and
        `local_files_only`.

        Args:
            load_directory: "run" (its latest step), "run@alias", "run/steps/N", each a path or a
                URI; a Hugging Face folder, a GGUF file, or "hf://owner/name" for the hub.
            device: the device for all leaves if nothing is sharded: a device, or a platform such
                as "cpu"; None for this process's default device.
            dtype: dtype of the computation; None for the stored one.
            param_dtype: dtype to cast floating leaves to; None keeps the stored dtypes, but makes
                Hugging Face weights float32.
            precision: precision of matrix multiplications; None for the stored one.
            sharding_axis_dims: number of devices along each mesh axis.
            sharding_dcn_axis_dims: number of slices along each mesh axis, or of processes if
                devices have no slices; `sharding_axis_dims` are then devices of one slice.
            sharding_axis_names: names of the mesh axes.
            partition_axis: mesh axes of each logical axis, a PartitionAxis; None for the stored
                one.
            shard_attention_computation: False replicates heads and tokens in attention.
            shard_fns: functions by the path of a leaf, each of which returns its leaf with another
                sharding.
            backend: the devices to load onto: "cpu", "gpu" or "tpu".
            platform: the same, or "jax" for JAX's default devices.
            config_kwargs: fields of the model's config to change.
            model_task: AUTO_BIND, or the task that the model class must have.
            auto_shard_model: whether to shard over the mesh of `sharding_axis_dims`.
            partition_rules: pairs of a regular expression and a PartitionSpec; None for the
                config's rules, else those that follow from the model's axis names.
            quantization_platform: platform that quantizes weights: None, "jax", or the platform in
                use; the values are the same on each.
            quantization_method: "nf4", "8bit", "a8bit", "a8q", "a4q" or "aqt": quantize weights
                while loading, a few at a time, with the same result as `model.quantize` after
                loading. A stored optimizer state of floating weights must then be skipped
                (optimizer="skip"); that of adapters is loaded. None quantizes nothing.
            quantization_block_size: number of inputs that share a scale, -1 for all of them.
            quantization_pattern: regular expression, searched in the "/"-joined path of each
                layer; None for all layers.
            quantize_tensors: False says explicitly that nothing is quantized; then a
                `quantization_method` is refused.
            verbose: whether to print progress to stderr.
            **kwargs: the further arguments named above; any other name raises an error that
                suggests a similar one.

        Returns:
            The state; its `extras` are those of the save.

        Raises:
            StepDamagedError: if no step is named and the latest is damaged; names one to load.
            FileNotFoundError: if there is no such run, alias, step or folder.
            ValueError: if arguments contradict each other or can't take effect, or if the
                checkpoint does not fit the model, the optimizer or the iterators; all differences
                are listed.
            CorruptionError: if stored bytes fail their checksum.
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
        """Return a new state, at step 0, of a model with pretrained weights.

        Args:
            source: a Hugging Face folder, a GGUF file, a hub id ("owner/name", "hf://owner/name"),
                or a checkpoint of a run.
            model_class: class of the model; None for `DecoderForCausalLM`, or for a checkpoint the
                stored one.
            tx: the optimizer, whose state is initialised; None for that of `tx_init`, if given.
            tx_init: JSON that rebuilds `tx`.
            **arguments: arguments of the model's `from_pretrained`; for a checkpoint, of
                `load_state`.
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

        A job can call this at its first start and at every restart.

        Args:
            uri: the run, or a checkpoint of it.
            create: function that returns the first state.
            **arguments: arguments of `load_state`.

        Raises:
            StepDamagedError: the latest step is damaged; `damaged="skip"` resumes from the newest
                undamaged step.
            FileNotFoundError: as in `load_state`, except for a run without checkpoints.
            ValueError: as in `load_state`; or the folder is no run, but has other checkpoints.
            CorruptionError: as in `load_state`; or records of the run are lost, so that it can't
                be known whether there are checkpoints.
        """
        return cls.load_state(uri, **arguments) if run_has_saved(uri) else create()

    def load_optimizer(self, load_directory: str | os.PathLike[str]) -> Self:
        """Return the state with the optimizer state of a checkpoint, sharded like its parameters.

        Raises:
            OptimizerNotFoundError: if the checkpoint has no optimizer state; it is a
                FileNotFoundError.
            NotFoundError: if there is no such checkpoint; it is a FileNotFoundError.
            ArgumentError: if the folder has pickle files, which are never read.
            TreeMismatchError: if the stored optimizer state does not fit; lists all differences.
        """
        loaded: Self = load_optimizer_into(self, load_directory)
        return loaded

    def to_torch(self, *, float_dtype: Any = None) -> dict[str, Any]:
        """Return the state's weights as PyTorch tensors, by their names in `transformers`.

        Args:
            float_dtype: dtype to cast floating weights to; quantized weights are dequantized to
                it. None keeps the dtypes.

        Raises:
            ArgumentError: PyTorch is not installed.
            ConversionError: the model has adapters, or is quantized and there is no `float_dtype`.
        """
        # Not `state.model`: the user may have changed that module, but not the state.
        whole: Any = self
        weights: dict[str, Any] = whole.merge(whole.graphstate).to_torch(float_dtype=float_dtype)
        return weights

    def to_pytorch(self, *, float_dtype: Any = None) -> Any:
        """Return the state's weights as a `transformers` model, in evaluation mode.

        Args:
            float_dtype: dtype to cast floating weights to, as in `to_torch`.

        Raises:
            ArgumentError: transformers or PyTorch is not installed.
            ConversionError: the model has adapters, or is quantized and there is no `float_dtype`.
            ConfigError: the family can't express the model's options.
        """
        whole: Any = self
        return whole.merge(whole.graphstate).to_pytorch(float_dtype=float_dtype)
