"""Sources of pretrained weights: a folder in any store, the hub, a GGUF file.

A tensor is read when `read`, `rows` or `boxes` asks for it.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cairn.interop import registry
from cairn.interop.config.auto import AutoEasyDeLConfig
from cairn.interop.config.base import EDPretrainedConfig
from cairn.interop.config.decoder import OURS_ALONE, DecoderConfig
from cairn.interop.conversion.rules import RuleTable
from cairn.interop.conversion.tensor_streams import FLOAT_NAMES, float_dtype
from cairn.interop.errors import ConfigError, ConversionError
from cairn.interop.families.family import get_family
from cairn.interop.weights.dequantized import (
    QUANTIZATION_KEY,
    Dequantized,
    QuantizationMethod,
    quantization_method,
)
from cairn.interop.weights.easydel_folder import (
    WEIGHTS_FILE,
    easydel_config,
    easydel_rules,
    unread_files,
)
from cairn.interop.weights.gguf_reading import GGUFFile
from cairn.interop.weights.hub_folder import find_folder
from cairn.interop.weights.safetensors_folder import SafetensorsFolder
from cairn.interop.weights.source_folder import SourceFolder, parse_json, refuse_hub_options
from cairn.interop.weights.text_model import (
    RenamedTensors,
    has_text_model,
    is_headless,
    text_config,
    text_tensors,
)
from cairn.interop.weights.torch_folder import TorchFolder
from cairn.interop.weights.weight_files import (
    BIN_FILE,
    BIN_INDEX_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    WeightFiles,
    find_weight_files,
)
from cairn.interop.weights.weight_source import RowSource, WeightSource, equal_tensors
from cairn.storage.errors import NotFoundError
from cairn.storage.runs.records.layout import RUN_FILE
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI, parse_uri

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION_FILE,
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files beside the weights that are kept and exported unchanged."""
_TEMPLATES = "additional_chat_templates"
_OTHER_TOKENIZER = re.compile(
    r"tekken\.json|tiktoken\.model|.*\.tiktoken|tokenization_.*\.py|spiece\.model|vocab\.txt"
)
"""Tokenizer files of other forms, which are not kept."""


@dataclass(frozen=True)
class PretrainedWeights:
    """A pretrained model: its config, and the source of its weights.

    Attributes:
        path: the name or path that the caller gave, for messages.
        config: its configuration, tokenizer files included.
        weights: source of its tensors.
        gguf: the opened GGUF file; None for other forms.
        is_easydel: whether an older release of EasyDeL saved it.
    """

    path: str
    config: EDPretrainedConfig
    weights: WeightSource
    gguf: GGUFFile | None = None
    is_easydel: bool = False

    def own_rules(self, paths: Iterable[str]) -> RuleTable | None:
        """Return the rule table for GGUF's or EasyDeL's tensor names; None for Hugging Face's.

        Args:
            paths: paths of the model's leaves.
        """
        if self.is_easydel:
            return easydel_rules(paths, self.weights.shapes)
        if self.gguf is None or not isinstance(self.config, DecoderConfig):
            return None
        return self.gguf.rules(self.config)


def open_pretrained(
    name_or_path: str | os.PathLike[str] | StoreURI,
    *,
    config_kwargs: Mapping[str, Any] | None = None,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    dequantized_dtype: np.dtype[Any] | None = None,
    text_only: bool = False,
) -> PretrainedWeights:
    """Return a pretrained model; its config is read, but no weights yet.

    From the hub, config.json is fetched first, and nothing more if it is refused; then the model's
    safetensors, their index, and `TOKENIZER_FILES`. Without safetensors, files of `torch.save` are
    read.

    Args:
        name_or_path: a folder, a *.gguf file, a store URI of either, or a hub id, also as
            "hf://org/name".
        config_kwargs: keys that replace those of config.json, or our own options, such as
            `scan_layers` and `sharding_axis_dims`.
        revision: branch, tag or commit of a hub id.
        token: access token of the hub.
        local_files_only: use only the local cache for a hub id.
        dequantized_dtype: dtype of weights that were published quantized; None: the one that
            config.json gives the model.
        text_only: load only the text model of a multimodal model.

    Raises:
        NotFoundError: there is no such model.
        ArgumentError: a hub argument is given for a local path; or torch is needed, and
            not installed.
        ConfigError: the family is unknown, or its options or the weights' quantization are not
            supported.
        ConversionError: files can't be read.
    """
    text = str(name_or_path)
    if text.endswith(".gguf"):
        refuse_hub_options(f"the file {text}", revision=revision, token=token)
        return _open_gguf(text, config_kwargs)
    folder = find_folder(
        text,
        config_file=CONFIG_FILE,
        revision=revision,
        token=token,
        local_files_only=local_files_only,
    )
    raw = folder.read_bytes(CONFIG_FILE)
    if raw is None:
        is_run = RUN_FILE in folder.names()
        raise NotFoundError(
            path=folder.uri,
            expected=f"a model's folder, with {CONFIG_FILE}",
            found="a run" if is_run else f"{', '.join(folder.names()[:8]) or 'nothing'}",
            next_step="EasyDeLState.load_state loads a run's checkpoints"
            if is_run
            else "give the folder that holds config.json and the weights",
        )
    data = parse_json(raw, f"{folder.uri}/{CONFIG_FILE}")
    is_easydel = WEIGHTS_FILE in folder.names()
    both = sorted({SINGLE_FILE, INDEX_FILE} & {*folder.names()})
    if is_easydel and both:
        raise ConversionError(
            path=folder.uri,
            expected=f"{WEIGHTS_FILE}, or weights of transformers",
            found=f"both: {WEIGHTS_FILE} and {', '.join(both)}",
            next_step="remove those that are not the model's",
        )
    method = None
    part = has_text_model(data)
    if part:
        data = _text_model_config(data, f"{folder.uri}/{CONFIG_FILE}", text_only=text_only)
    if is_easydel:
        data = _easydel_keys(folder, data)
    elif registry.is_family(data.get("model_type")):
        data, config_kwargs, method = _quantization(data, config_kwargs, str(folder.uri))
    config = _config(data, config_kwargs)
    folder.fetch([INDEX_FILE, *TOKENIZER_FILES])
    contents = {name: folder.read_bytes(name) for name in TOKENIZER_FILES if name in folder.names()}
    files = {name: content for name, content in contents.items() if content is not None}
    _warn_of_unread_tokenizers(folder)
    if is_easydel:
        weights: RowSource = SafetensorsFolder(WeightFiles(folder, (WEIGHTS_FILE,)))
        config = _with_tokenizer(config, files)
        return PretrainedWeights(str(folder.uri), config, weights, is_easydel=True)
    weights = _weights(folder, config)
    if part:
        weights = text_tensors(weights, str(folder.uri))
        if is_headless(weights):
            config = config.replace(tie_word_embeddings=True)
    if method is not None:
        dtype = dequantized_dtype or _dtype(data)
        weights = Dequantized(weights, method, dtype, str(folder.uri))
    is_tied = bool((config_kwargs or {}).get("tie_word_embeddings"))
    config = _untied_where_different(config, weights, str(folder.uri), is_tied=is_tied)
    config = _with_tokenizer(config, files)
    weights = _with_tied_names(config, _with_base_prefix(config, weights))
    return PretrainedWeights(str(folder.uri), config, weights)


def _text_model_config(data: dict[str, Any], path: str, *, text_only: bool) -> dict[str, Any]:
    """Return the text model's part of a multimodal model's config.json.

    Raises:
        ConfigError: `text_only` is False, or the text model can't be loaded alone.
    """
    text = text_config(data, path)
    if not text_only:
        raise ConfigError(
            path=path,
            expected="a model of text alone",
            found=f"{data.get('model_type')!r}, whose text model is a {text['model_type']!r}",
            next_step="pass text_only=True: the text model is loaded, and the rest left out",
        )
    return text


def _warn_of_unread_tokenizers(folder: SourceFolder) -> None:
    """Warn if the folder has tokenizer files that are not kept."""
    names = folder.names()
    behind = [name for name in names if _OTHER_TOKENIZER.fullmatch(name)]
    behind = [] if "tokenizer.json" in names else behind
    behind += [f"{_TEMPLATES}/"] if folder.has_folder(_TEMPLATES) else []
    if behind:
        warnings.warn(
            f"{folder.uri}: of the tokenizer only {', '.join(TOKENIZER_FILES)} come along; left "
            f"behind: {', '.join(behind)}. Exports lack them: copy them there, or save the "
            "tokenizer as a tokenizer.json whose tokenizer_config.json has all templates",
            stacklevel=3,
        )


def _weights(folder: SourceFolder, config: EDPretrainedConfig) -> RowSource:
    """Return the source of a folder's weights: its safetensors, else its files of `torch.save`.

    Raises:
        NotFoundError: the folder has neither.
    """
    spare: tuple[str, ...] = ()
    if isinstance(config, DecoderConfig):
        spare = get_family(config.model_type).rules(config).tolerated
    files = find_weight_files(folder, single=SINGLE_FILE, index=INDEX_FILE, dispensable=spare)
    if files is not None:
        return SafetensorsFolder(files)
    files = find_weight_files(folder, single=BIN_FILE, index=BIN_INDEX_FILE, dispensable=spare)
    if files is not None:
        return TorchFolder(files)
    others = [name for name in folder.names() if name.endswith((".bin", ".pt", ".pth"))]
    raise NotFoundError(
        path=folder.uri,
        expected=f"{SINGLE_FILE} or {INDEX_FILE}; or else {BIN_FILE} or {BIN_INDEX_FILE}",
        found=f"other weights ({', '.join(others)})" if others else "neither",
        next_step="convert the model with transformers' save_pretrained: pickle that can run code "
        "is never read"
        if others
        else "give the folder that holds the weights",
    )


def _easydel_keys(folder: SourceFolder, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's entries of an EasyDeL config.json; warn of keys and files not read."""
    kept, dropped = easydel_config(data)
    behind = unread_files(folder.names())
    behind += [f"{CONFIG_FILE}'s {', '.join(dropped)}"] if dropped else []
    if behind:
        warnings.warn(
            f"{folder.uri}: only the weights that EasyDeL saved are loaded; left behind: "
            f"{'; '.join(behind)}. Pickle that can run code is never read: make the optimizer anew",
            stacklevel=3,
        )
    return kept


def _quantization(
    data: dict[str, Any], updates: Mapping[str, Any] | None, path: str
) -> tuple[dict[str, Any], dict[str, Any], QuantizationMethod | None]:
    """Return config.json and its updates, both without quantization, and the method or None."""
    plain, changes = dict(data), dict(updates or {})
    quantization = plain.pop(QUANTIZATION_KEY, None)
    quantization = changes.pop(QUANTIZATION_KEY, quantization)
    method = (
        None
        if quantization is None
        else quantization_method(quantization, path=f"{path}/{CONFIG_FILE}")
    )
    return plain, changes, method


def _dtype(data: Mapping[str, Any]) -> np.dtype[Any]:
    """Return the dtype that config.json gives the weights; bfloat16 if it gives no known one."""
    said = data.get("dtype") or data.get("torch_dtype")
    name = said if said in FLOAT_NAMES else "bfloat16"
    return np.dtype(float_dtype(name, argument="dtype"))


def _open_gguf(text: str, config_kwargs: Mapping[str, Any] | None) -> PretrainedWeights:
    if "://" not in text or text.startswith("file://"):
        uri = parse_uri(text)
        return _read_gguf(GGUFFile(uri.local_path), text, config_kwargs)
    uri = parse_uri(text)
    # The file stays mapped after its name is removed.
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, uri.name)
        open_files(uri.parent).copy(uri.name, open_files(parse_uri(folder)), local.name)
        return _read_gguf(GGUFFile(local), text, config_kwargs)


def _config(data: dict[str, Any], updates: Mapping[str, Any] | None) -> EDPretrainedConfig:
    keys = dict(updates or {})
    options = {name: keys.pop(name) for name in OURS_ALONE if name in keys}
    other = [
        f"{key}={keys[key]!r}, where the file says {data.get(key)!r}"
        for key in ("architectures", "auto_map", "model_type")
        if key in keys and keys[key] != data.get(key)
    ]
    if other:
        raise ConfigError(
            path="config_kwargs",
            expected="options of the model that is there",
            found=f"another architecture: {'; '.join(other)}",
            next_step="give the folder of that model",
        )
    read = AutoEasyDeLConfig.hf_keys(data)
    unread = {
        name
        for name in keys.keys() - data.keys() - read
        if not name.endswith("_token_id") and keys[name] is not None
    }
    if unread:
        raise ConfigError(
            path="config_kwargs",
            expected="keys of config.json, or options of the model: "
            f"{', '.join(sorted(read | OURS_ALONE))}",
            found=f"unknown: {', '.join(sorted(unread))}",
            next_step="correct these names",
        )
    return AutoEasyDeLConfig.from_hf(data | keys).replace(**options)


def _with_tokenizer(config: EDPretrainedConfig, files: Mapping[str, bytes]) -> EDPretrainedConfig:
    """Return the config with the folder's tokenizer files; those that `config_kwargs` gave win."""
    return config.replace(tokenizer_files={**files, **config.tokenizer_files})


def _with_base_prefix(config: EDPretrainedConfig, weights: RowSource) -> RowSource:
    """Return a source with the family's names, even if only the base model was saved."""
    if not isinstance(config, DecoderConfig):
        return weights
    prefix = get_family(config.model_type).names_of(config).optional_prefix
    if not prefix or any(name.startswith((prefix, "lm_head.")) for name in weights.shapes):
        return weights
    return RenamedTensors(weights, {f"{prefix}{name}": name for name in weights.shapes})


def _with_tied_names(config: EDPretrainedConfig, weights: RowSource) -> RowSource:
    """Return a source in which a tied tensor has the name that the family's rules use.

    `safetensors.torch.save_model` writes only one of several tensors that share memory, under any
    of their names.
    """
    if not isinstance(config, DecoderConfig):
        return weights
    stored = weights.shapes.keys()
    aliases = get_family(config.model_type).rules(config).aliases
    named = {
        name: alias for alias, name in aliases.items() if alias in stored and name not in stored
    }
    if not named:
        return weights
    others = {name: name for name in stored if name not in named.values()}
    return RenamedTensors(weights, others | named)


def _untied_where_different(
    config: EDPretrainedConfig, weights: RowSource, path: str, *, is_tied: bool
) -> EDPretrainedConfig:
    """Return the config; untied if the weights that it ties are stored with different values.

    Raises:
        ConfigError: the weights differ, and the caller asked for tied weights (`is_tied`).
    """
    if not isinstance(config, DecoderConfig) or not config.tie_word_embeddings:
        return config
    aliases = get_family(config.model_type).rules(config).aliases
    differ = [
        f"{alias} differs from {name}"
        for alias, name in aliases.items()
        if {alias, name} <= weights.shapes.keys() and not equal_tensors(weights, alias, name)
    ]
    if not differ:
        return config
    if is_tied:
        raise ConfigError(
            path=path,
            expected="tied weights, as config_kwargs say (tie_word_embeddings=True)",
            found="; ".join(differ),
            next_step="leave tie_word_embeddings out, or remove the tensor from the files",
        )
    warnings.warn(
        f"{path}: expected tied weights, as config.json says (tie_word_embeddings=true); found "
        f"that {'; '.join(differ)}; they are loaded as two weights. Set tie_word_embeddings=false "
        "in config.json to say so",
        stacklevel=2,
    )
    return config.replace(tie_word_embeddings=False)


def _read_gguf(
    file: GGUFFile, path: str, config_kwargs: Mapping[str, Any] | None
) -> PretrainedWeights:
    config = _config(file.config().to_hf(), config_kwargs)
    return PretrainedWeights(path, _with_tokenizer(config, file.tokenizer_files()), file, file)
