"""EasyBridgeMixin: models in and out of Hugging Face's formats."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import jax.numpy as jnp

from state.errors import ArgumentError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from state.config import EDPretrainedConfig
    from storage.uri import StoreURI

INDEX_FILE = "model.safetensors.index.json"


class EasyBridgeMixin:
    """Loads pretrained weights, and gives ours back to PyTorch, a folder, a store or the hub."""

    if TYPE_CHECKING:
        config: EDPretrainedConfig

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
        revision: str | None = None,
        token: str | None = None,
        local_files_only: bool = False,
        verbose: bool = False,
    ) -> Self:
        """A model with pretrained weights, each one read and placed by itself.

        Args:
            pretrained_model_name_or_path: a folder or a *.gguf file, here or in a store
                ("gs://bucket/folder"), or a hub id such as "org/name".
            dtype: of the computation.
            param_dtype: of the floating weights; None keeps the stored dtypes.
            precision: of matrix multiplications.
            auto_shard_model: spread the weights over the mesh; else all go to one device.
            mesh: the mesh; by default the config's.
            partition_rules: pairs of a regular expression and a PartitionSpec; by default the
                config's, else the axis names that the layers gave their parameters.
            sharding_axis_dims: mesh of the config.
            sharding_axis_names: axes of that mesh.
            device: the one device, without `auto_shard_model`; the first one by default.
            config_kwargs: keys that replace those of config.json, or options of ours such as
                `scan_layers`.
            revision: branch, tag or commit on the hub.
            token: of the hub.
            local_files_only: take a hub id from the local cache alone.
            verbose: say on stderr what is being loaded.

        Raises:
            NotFoundError: nothing is there, or no safetensors (pickled weights are never read).
            ConfigError: the family is unknown, or config.json asks for what can't be done.
            ConversionError: tensors are missing, unexpected, mis-shaped or of an unsupported
                type; all are listed.
            ShardingError: weights don't divide over the mesh; all are listed.
        """
        from state.pretrained import load_weights, placement
        from state.progress import say
        from state.weight_files import open_pretrained

        axes = {
            "sharding_axis_dims": sharding_axis_dims,
            "sharding_axis_names": sharding_axis_names,
        }
        given = {name: tuple(value) for name, value in axes.items() if value is not None}
        found = open_pretrained(
            pretrained_model_name_or_path,
            config_kwargs={**(config_kwargs or {}), **given},
            revision=revision,
            token=token,
            local_files_only=local_files_only,
        )
        say(verbose, f"loading {len(found.weights.shapes)} tensors from {found.path}")
        place = placement(
            found.config,
            mesh=mesh,
            partition_rules=partition_rules,
            auto_shard_model=auto_shard_model,
            device=device,
        )
        model = load_weights(
            _model_class(cls, found.config),
            found,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            place=place,
        )
        return cast(Self, model)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str] | StoreURI,
        max_shard_size: int | str = "5GB",
        *,
        float_dtype: Any = None,
    ) -> list[str]:
        """Writes config.json, safetensors and tokenizer files that transformers loads.

        Leaves go to the host one after the other. With several processes all must call this; the
        first one writes.

        Args:
            save_directory: a folder, here or in a store.
            max_shard_size: most bytes of tensors per file ("5GB").
            float_dtype: cast floating weights to this; None keeps their dtypes.

        Returns:
            The names of the files written.

        Raises:
            ConfigError: the family can't express the model's options.
            StorageError: the store refuses (full, forbidden, unreachable).
        """
        from state.hf_folder import write_folder

        return write_folder(
            cast(Any, self), save_directory, max_shard_size, float_dtype=float_dtype
        )

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
        """Uploads what `save_pretrained` writes; the URL of the commit.

        Args:
            repo_id: "name" or "org/name"; made if it is not there.
            commit_message: of the commit.
            private: for a new repository; None for the account's default.
            token: of the hub; else the stored one, or HF_TOKEN.
            revision: branch to commit to.
            max_shard_size: most bytes of tensors per file.
            float_dtype: cast floating weights to this.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size, float_dtype=float_dtype)
            repository = api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository.repo_id,
                folder_path=folder,
                commit_message=commit_message,
                revision=revision,
            )
        return str(commit.commit_url)

    def to_torch(self) -> dict[str, Any]:
        """The weights as PyTorch tensors, for `load_state_dict(strict=True)` of transformers.

        Every dtype stays as it is, bfloat16 included. Tied weights come under both names, sharing
        memory.

        Raises:
            ArgumentError: PyTorch is not installed.
        """
        from state.hf_folder import model_streams
        from state.tensor_streams import whole

        torch = _module("torch")
        table, sources = model_streams(cast(Any, self))
        tensors = {}
        for source in sources:
            stream = whole(source)
            # NumPy's bfloat16 is unknown to torch: the bits go over as integers.
            bits = torch.from_numpy(stream.view(f"u{stream.dtype.itemsize}"))
            tensors[source.name] = bits.view(getattr(torch, stream.dtype.name))
        aliases = {alias: tensors[name] for alias, name in table.aliases.items()}
        return tensors | aliases

    def to_pytorch(self) -> Any:
        """The `transformers` model with these weights, in evaluation mode.

        Raises:
            ArgumentError: transformers or PyTorch is not installed.
            ConfigError: the family can't express the model's options.
        """
        torch, transformers = _module("torch"), _module("transformers")
        tensors = self.to_torch()
        data = self.config.to_hf()
        config = transformers.AutoConfig.for_model(data.pop("model_type"), **data)
        floating = [t.dtype for t in tensors.values() if t.is_floating_point()]
        usual = max(set(floating), key=floating.count, default=torch.float32)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=usual)
        model.load_state_dict(tensors, strict=True)
        return model.eval()


def _model_class(cls: type[Any], config: EDPretrainedConfig) -> type[Any]:
    from state.base_module import EasyDeLBaseModule
    from state.decoder.config import DecoderConfig
    from state.decoder.decoder import DecoderForCausalLM

    if cls is not EasyDeLBaseModule:
        return cls
    if isinstance(config, DecoderConfig):
        return DecoderForCausalLM
    raise ArgumentError(
        path="EasyDeLBaseModule.from_pretrained",
        expected="a model of a known family",
        found=f"model_type {config.model_type!r}",
        next_step="call from_pretrained on the model's own class",
    )


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
