"""EasyBridgeMixin: models in and out of Hugging Face's formats."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cairn.interop.config.base import EDPretrainedConfig
from cairn.interop.conversion.tensor_streams import float_dtype, whole
from cairn.interop.errors import ArgumentError, ConversionError
from cairn.interop.weights.files import GENERATION_FILE, PretrainedWeights, open_pretrained
from cairn.interop.weights.source_folder import parse_json
from cairn.state.adapters.quantization_request import DEFAULT_BLOCK_SIZE, QuantizationRequest
from cairn.state.checkpointing.processes import agreement
from cairn.state.models.hub.hf_folder import model_streams, write_folder
from cairn.state.models.hub.peft_folder import read_adapter, write_adapter
from cairn.state.models.hub.pretrained import load_weights, placement
from cairn.state.states.load_options import LoadOptions
from cairn.state.states.progress import print_progress
from cairn.state.states.state_load import is_run, load_module
from cairn.storage.store.uri import StoreURI


class EasyBridgeMixin:
    """Loads pretrained weights, and exports weights to PyTorch, a folder, a store or the hub."""

    if TYPE_CHECKING:
        config: EDPretrainedConfig

    @classmethod
    def _class_for(cls, config: EDPretrainedConfig) -> type[Any]:
        """Return the class that `from_pretrained` builds for a config: this one."""
        return cls

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | StoreURI,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        auto_shard_model: bool = True,
        mesh: Mesh | None = None,
        partition_rules: Any = None,
        sharding_axis_dims: Sequence[int] | None = None,
        sharding_axis_names: Sequence[str] | None = None,
        device: Any = None,
        config_kwargs: Mapping[str, Any] | None = None,
        quantization_platform: Any = None,
        quantization_method: Any = None,
        quantization_block_size: int = DEFAULT_BLOCK_SIZE,
        quantization_pattern: str | None = None,
        quantize_tensors: bool = True,
        revision: str | None = None,
        token: str | None = None,
        local_files_only: bool = False,
        text_only: bool = False,
        verbose: bool = False,
    ) -> Self:
        """Return a model with pretrained weights, which are read and placed slice by slice.

        A process reads the slices that its devices hold, each once. In a job of several processes
        all must call this, unless `mesh` has devices of one process only.

        If config.json ties the output head to the embedding, but the files have different weights
        for the two, both are loaded, untied, and a warning says so.

        Weights that were published quantized (`quantization_config` in config.json: FP8 as in
        DeepSeek V3, MXFP4 as in gpt-oss) are dequantized, one by one; the model and its exports
        have floating weights. If there are no safetensors, `pytorch_model.bin` is read, which needs
        torch; files that could run code are refused.

        Args:
            pretrained_model_name_or_path: a folder or a *.gguf file, here or in a store
                ("gs://bucket/folder"); a Cairn run or one of its checkpoints ("run",
                "run@alias", "run/steps/N"); or a hub id such as "org/name", also as
                "hf://org/name".
            dtype: dtype of the computation.
            param_dtype: dtype of the floating weights. None keeps the stored dtypes; dequantized
                weights then get the dtype that config.json names.
            precision: precision of matrix multiplications; None for JAX's default.
            auto_shard_model: whether to shard the weights over the mesh; False puts all of them on
                one device.
            mesh: the mesh; None for that of `sharding_axis_dims` over all devices.
            partition_rules: pairs of a regular expression and a PartitionSpec; None for the
                config's rules, else those that follow from the axis names of the parameters.
            sharding_axis_dims: shape of the config's mesh.
            sharding_axis_names: axis names of that mesh.
            device: the device without `auto_shard_model`; None for the first one.
            config_kwargs: keys that replace those of config.json (for a run, fields of the saved
                config), or options of Cairn such as `scan_layers`.
            quantization_platform: platform that quantizes weights: None, "jax", or the platform in
                use; the values are the same on each.
            quantization_method: "nf4", "8bit", "a8bit", "a8q", "a4q" or "aqt": quantize each
                weight once it is placed, with the same result as `quantize` after loading. None
                quantizes nothing.
            quantization_block_size: number of inputs that share a scale, -1 for all of them.
            quantization_pattern: regular expression, searched in the "/"-joined path of each
                layer; None for all layers.
            quantize_tensors: False says explicitly that nothing is quantized; then a
                `quantization_method` is refused.
            revision: branch, tag or commit on the hub; refused for other sources.
            token: token for the hub; refused for other sources.
            local_files_only: whether to read a hub id from the local cache only.
            text_only: whether to load only the text model of a model that has one in `text_config`
                of config.json, such as a vision model; without this, such a model is refused.
            verbose: whether to print progress to stderr.

        Raises:
            ArgumentError: arguments contradict each other, or do not fit the weights, or torch is
                needed and not installed.
            NotFoundError: the source does not exist, or has no weights in a supported format.
            ConfigError: the family is unknown, or config.json has options that are not supported.
            ConversionError: tensors are missing, unexpected, or of a wrong shape or type; all are
                listed. Or a file holds more than tensors, or is inconsistent.
            CorruptionError: a safetensors file does not fit its header.
            ShardingError: the mesh does not divide some weights; all are listed.
        """
        axes = {
            "sharding_axis_dims": sharding_axis_dims,
            "sharding_axis_names": sharding_axis_names,
        }
        mesh_options: dict[str, Any] = {
            name: tuple(value) for name, value in axes.items() if value is not None
        }
        request = QuantizationRequest(
            method=quantization_method,
            block_size=quantization_block_size,
            pattern=quantization_pattern,
            tensors=quantize_tensors,
            platform=quantization_platform,
        )
        if is_run(pretrained_model_name_or_path):
            arguments = LoadOptions(
                device=jax.local_devices()[0] if device is None else device,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                auto_shard_model=auto_shard_model,
                mesh=mesh,
                partition_rules=partition_rules,
                config_kwargs=config_kwargs,
                verbose=verbose,
                quantization_platform=quantization_platform,
                quantization_method=quantization_method,
                quantization_block_size=quantization_block_size,
                quantization_pattern=quantization_pattern,
                quantize_tensors=quantize_tensors,
                revision=revision,
                token=token,
                local_files_only=local_files_only,
                **mesh_options,
            )
            run = str(pretrained_model_name_or_path)
            return cast(Self, load_module(run, arguments, expected_class=cls))
        find = partial(
            open_pretrained,
            pretrained_model_name_or_path,
            config_kwargs={**(config_kwargs or {}), **mesh_options},
            revision=revision,
            token=token,
            local_files_only=local_files_only,
            dequantized_dtype=float_dtype(param_dtype, argument="param_dtype"),
            text_only=text_only,
        )
        if auto_shard_model and (mesh is None or mesh.is_multi_process):
            # Processes read in step with each other, so all must have found the same weights.
            pretrained = agreement.all_or_none(find, same=_same, error=ArgumentError)
        else:
            pretrained = find()
        print_progress(
            verbose, f"loading {len(pretrained.weights.shapes)} tensors from {pretrained.path}"
        )
        place = placement(
            pretrained.config,
            mesh=mesh,
            partition_rules=partition_rules,
            auto_shard_model=auto_shard_model,
            device=device,
        )
        model = load_weights(
            cls._class_for(pretrained.config),
            pretrained,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            place=place,
            quantization=None if request.method is None else request.settings,
        )
        return cast(Self, model)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str] | StoreURI,
        max_shard_size: int | str = "5GB",
        *,
        float_dtype: Any = None,
    ) -> list[str]:
        """Write config.json, safetensors and tokenizer files that transformers loads.

        Leaves are copied to the host one after the other. In a job of several processes all must
        call this; process 0 writes. Weights of an earlier save (`model.safetensors`, its shards,
        their index) are removed; other files of the folder stay. If the model's class belongs to no
        family, all of its variables except random streams are written, such as BatchNorm averages.

        Args:
            save_directory: the folder, local or in a store.
            max_shard_size: maximum bytes of tensors per file, as a number or a text such as "5GB".
            float_dtype: dtype to cast floating weights to; quantized weights are dequantized to
                it. None keeps the dtypes.

        Returns:
            The names of the files written.

        Raises:
            ConversionError: the model has adapters; or there is no `float_dtype`, and it is
                quantized, or has weights of several dtypes that become one tensor.
            ConfigError: the family can't express the model's options.
            StorageError: the store is full, unreachable or forbids the write.
        """
        return write_folder(
            cast(Any, self), save_directory, max_shard_size, float_dtype=float_dtype
        )

    def save_adapter(
        self,
        save_directory: str | os.PathLike[str] | StoreURI,
        *,
        base_model_name_or_path: str | None = None,
    ) -> list[str]:
        """Write the model's adapters for `peft`'s `PeftModel.from_pretrained(base, dir)`.

        The model's other weights are not written. In a job of several processes all must call this;
        process 0 writes.

        Args:
            save_directory: the folder, local or in a store.
            base_model_name_or_path: hub id or folder of the model without adapters, which
                `AutoPeftModel` then loads, too; None: not recorded.

        Returns:
            The names of the files written.

        Raises:
            ArgumentError: the model has no adapters.
            ConversionError: the model is of no supported family, or the family's transformers model
                has no module for some adapters.
            StorageError: the store is full, unreachable or forbids the write.
        """
        return write_adapter(
            cast(Any, self), save_directory, base_model_name_or_path=base_model_name_or_path
        )

    def load_adapter(
        self,
        name_or_path: str | os.PathLike[str] | StoreURI,
        *,
        revision: str | None = None,
        token: str | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """Load the adapters of a folder that `save_adapter` or `peft` wrote into the model.

        Values and dtypes are those of the file. The model gets adapters on the layers for which the
        file has some; if it already has adapters on just these layers, their values are replaced.
        The dropout with which the adapters were trained is not applied.

        Args:
            name_or_path: a folder, local or in a store, or a hub id.
            revision: branch, tag or commit on the hub.
            token: token for the hub.
            local_files_only: whether to read a hub id from the local cache only.

        Returns:
            The model itself, changed in place; its other weights are unchanged.

        Raises:
            NotFoundError: the source does not exist, or has no safetensors (pickled adapters are
                never read).
            ConversionError: the adapter is more than plain LoRA, has ranks or scales that differ
                between layers, or does not fit the model; all problems are listed.
            ArgumentError: the model has other adapters.
        """
        read_adapter(
            cast(Any, self),
            name_or_path,
            revision=revision,
            token=token,
            local_files_only=local_files_only,
        )
        return self

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload model",
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        max_shard_size: int | str = "5GB",
        float_dtype: Any = None,
    ) -> str:
        """Upload the files that `save_pretrained` writes; return the URL of the commit.

        In a job of several processes all must call this; process 0 uploads.

        Args:
            repo_id: "name" or "org/name"; the repository is created if it does not exist.
            commit_message: message of the commit.
            private: whether a new repository is private; None for the account's default.
            token: token for the hub; None for the stored one, or HF_TOKEN.
            revision: branch to commit to; None for the main branch.
            max_shard_size: maximum bytes of tensors per file, as in `save_pretrained`.
            float_dtype: dtype to cast floating weights to, as in `save_pretrained`.
        """
        from huggingface_hub import HfApi

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size, float_dtype=float_dtype)

            def upload() -> str:
                api = HfApi(token=token)
                repository = api.create_repo(repo_id, private=private, exist_ok=True)
                commit = api.upload_folder(
                    repo_id=repository.repo_id,
                    folder_path=folder,
                    commit_message=commit_message,
                    revision=revision,
                )
                return str(commit.commit_url)

            return agreement.agree(upload)

    def to_torch(self, *, float_dtype: Any = None) -> dict[str, Any]:
        """Return the weights as PyTorch tensors, for transformers' `load_state_dict(strict=True)`.

        Dtypes stay the same, including bfloat16. Tied weights are returned under both names and
        share memory.

        Args:
            float_dtype: dtype to cast floating weights to; quantized weights are dequantized to
                it. None keeps the dtypes.

        Raises:
            ArgumentError: PyTorch is not installed.
            ConversionError: the model has adapters; or there is no `float_dtype`, and it is
                quantized, or has weights of several dtypes that become one tensor.
        """
        torch = _module("torch")
        table, sources = model_streams(cast(Any, self), float_dtype_name=float_dtype)
        tensors = {}
        for source in sources:
            stream = whole(source)
            # torch does not support NumPy's bfloat16: pass the bits as integers.
            bits = torch.from_numpy(stream.view(f"u{stream.dtype.itemsize}"))
            tensors[source.name] = bits.view(getattr(torch, stream.dtype.name))
        aliases = {alias: tensors[name] for alias, name in table.aliases.items()}
        return tensors | aliases

    def to_pytorch(self, *, float_dtype: Any = None) -> Any:
        """Return the `transformers` model with these weights, in evaluation mode.

        Its generation settings are those of the model's generation_config.json, else of its
        config.json.

        Args:
            float_dtype: dtype to cast floating weights to, as in `to_torch`.

        Raises:
            ArgumentError: transformers or PyTorch is not installed.
            ConversionError: the model has adapters; or there is no `float_dtype`, and it is
                quantized, or has weights of several dtypes that become one tensor.
            ConfigError: the family can't express the model's options.
        """
        torch, transformers = _module("torch"), _module("transformers")
        tensors = self.to_torch(float_dtype=float_dtype)
        data = self.config.to_hf()
        usual_settings = transformers.GenerationConfig.from_model_config(dict(data))
        config = transformers.AutoConfig.for_model(data.pop("model_type"), **data)
        floating = [t.dtype for t in tensors.values() if t.is_floating_point()]
        usual = max(set(floating), key=floating.count, default=torch.float32)
        kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        # The tensors become the parameters: transformers neither initialises nor copies any.
        model, info = kind.from_pretrained(
            None, config=config, state_dict=tensors, dtype=usual, output_loading_info=True
        )
        problems = [f"{what}: {name}" for what, names in info.items() for name in sorted(names)]
        if problems:
            raise ConversionError(
                path=kind.__name__,
                expected="a tensor for each of its parameters",
                found=f"{len(problems)} problem(s)",
                next_step="compare config.to_hf() with the names that to_torch() gives",
                problems=problems,
            )
        model.name_or_path = model.config.name_or_path = ""
        raw = self.config.tokenizer_files.get(GENERATION_FILE)
        model.generation_config = (
            usual_settings
            if raw is None
            else transformers.GenerationConfig.from_dict(parse_json(raw, GENERATION_FILE))
        )
        return model.eval()


def _same(pretrained: PretrainedWeights) -> dict[str, list[Any]]:
    """Return the parts that must be equal on all processes: config, and shapes and dtypes."""
    weights = pretrained.weights
    dtypes = {name: str(dtype) for name, dtype in weights.dtypes.items()}
    return {"from_pretrained": [pretrained.config.to_dict(), dict(weights.shapes), dtypes]}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ArgumentError(
            path=name,
            expected=f"the package {name!r}",
            found="it is not installed",
            next_step="pip install 'cairn-checkpoints[torch]'",
        ) from exc
