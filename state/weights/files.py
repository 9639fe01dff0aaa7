"""Where pretrained weights come from: a folder of safetensors in any store, the hub, a GGUF file.

JAX-free. Tensors are read one by one, when they are asked for.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cairn.state.config import OURS_ALONE, AutoEasyDeLConfig, DecoderConfig, EDPretrainedConfig
from cairn.state.conversion import Array, RuleTable, Shape
from cairn.state.errors import ConfigError, ConversionError
from cairn.state.families import get_family
from cairn.state.weights.easydel_folder import (
    WEIGHTS_FILE,
    easydel_config,
    easydel_rules,
    left_behind,
)
from cairn.state.weights.gguf import GGUFFile
from cairn.state.weights.hub_folder import find_folder
from cairn.state.weights.source_folder import SourceFolder, parse_json, refuse_hub_options
from cairn.storage.errors import NotFoundError
from cairn.storage.runs import RUN_FILE
from cairn.storage.safetensors import SafetensorsHeader, read_header, read_tensor
from cairn.storage.store import StoreURI, open_files, parse_uri

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
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
"""Files beside the weights that an export carries along unchanged."""

_COMPARED_ELEMENTS = 4 << 20
"""Numbers of a tensor that are compared with another's at a time."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,254}")


class WeightSource(Protocol):
    """Tensors by name."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor's shape."""
        ...

    @property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """The dtype that `read` gives each tensor."""
        ...

    def read(self, name: str) -> Array:
        """One tensor, whole."""
        ...


@dataclass(frozen=True)
class Pretrained:
    """A model as it was found.

    Attributes:
        path: what was asked for, for messages.
        config: its configuration, tokenizer files included.
        weights: its tensors.
        gguf: the file itself, if it is a GGUF file.
        of_easydel: an older release of EasyDeL has saved it.
    """

    path: str
    config: EDPretrainedConfig
    weights: WeightSource
    gguf: GGUFFile | None = None
    of_easydel: bool = False

    def own_rules(self, ours: Iterable[str]) -> RuleTable | None:
        """The table against names that are not Hugging Face's: GGUF's, or EasyDeL's.

        Args:
            ours: paths of our leaves.
        """
        if self.of_easydel:
            return easydel_rules(ours, self.weights.shapes)
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
) -> Pretrained:
    """Finds a model and reads its config; no weights yet.

    Of the hub config.json is fetched first, and nothing more if it is refused; then the files that
    are read: the safetensors that make the model, their index, and `TOKENIZER_FILES`.

    Args:
        name_or_path: a folder, a *.gguf file, a store URI of either, or a hub id, also as
            "hf://org/name".
        config_kwargs: keys that replace those of config.json, or options of ours such as
            `scan_layers` and `sharding_axis_dims`.
        revision: branch, tag or commit of a hub id.
        token: of the hub.
        local_files_only: take a hub id from the local cache alone.

    Raises:
        NotFoundError: nothing is there.
        ArgumentError: something is asked of the hub for what is not there.
        ConfigError: its family is unknown, or its options can't be had.
        ConversionError: its files can't be read.
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
            else "give the folder that holds config.json and the safetensors files",
        )
    data = parse_json(raw, f"{folder.uri}/{CONFIG_FILE}")
    of_easydel = WEIGHTS_FILE in folder.names()
    both = sorted({SINGLE_FILE, INDEX_FILE} & {*folder.names()})
    if of_easydel and both:
        raise ConversionError(
            path=folder.uri,
            expected=f"{WEIGHTS_FILE}, or weights of transformers",
            found=f"both: {WEIGHTS_FILE} and {', '.join(both)}",
            next_step="remove those that are not the model's",
        )
    config = _config(_of_easydel(folder, data) if of_easydel else data, config_kwargs)
    folder.fetch([INDEX_FILE, *TOKENIZER_FILES])
    found = {name: folder.read_bytes(name) for name in TOKENIZER_FILES if name in folder.names()}
    files = {name: content for name, content in found.items() if content is not None}
    if of_easydel:
        weights = SafetensorsFolder(folder, [WEIGHTS_FILE])
        config = config.replace(tokenizer_files=files)
        return Pretrained(str(folder.uri), config, weights, of_easydel=True)
    weights = SafetensorsFolder(folder)
    asked = bool((config_kwargs or {}).get("tie_word_embeddings"))
    config = _as_tied_as_its_weights(config, weights, str(folder.uri), asked=asked)
    config = config.replace(tokenizer_files=files)
    return Pretrained(str(folder.uri), config, _of_whole_model(config, weights))


class SafetensorsFolder:
    """The tensors of a folder: `model.safetensors`, or the shards that its index names.

    Beside `model.safetensors` an index counts for nothing once its shards are gone.
    """

    def __init__(self, folder: SourceFolder, names: Sequence[str] | None = None) -> None:
        """Reads the headers.

        Args:
            folder: where they are.
            names: of the files; None: as Hugging Face calls them.

        Raises:
            NotFoundError: no safetensors, or a shard that the index names is not there.
            ConversionError: the index can't be read, a tensor is in two files, or there are shards
                and one file.
        """
        self._folder = folder
        self._where: dict[str, str] = {}
        self._headers: dict[str, SafetensorsHeader] = {}
        names = self._file_names() if names is None else names
        folder.fetch(names)
        for name in names:
            files, rel = folder.locate(name)
            header = self._headers[name] = read_header(files, rel)
            twice = sorted(set(header.tensors) & set(self._where))
            if twice:
                raise ConversionError(
                    path=f"{folder.uri}/{name}",
                    expected="every tensor in one file",
                    found=f"{', '.join(twice[:5])} in {self._where[twice[0]]} as well",
                    next_step="remove files of an earlier export from the folder",
                )
            self._where.update(dict.fromkeys(header.tensors, name))

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor's shape."""
        return {name: self._entry(name).shape for name in self._where}

    @property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """Every tensor's dtype."""
        return {name: self._entry(name).dtype for name in self._where}

    def read(self, name: str) -> Array:
        """One tensor, whole."""
        file_name = self._where[name]
        files, rel = self._folder.locate(file_name)
        found: Array = read_tensor(files, rel, name, header=self._headers[file_name])
        return found

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same values; read a part at a time."""
        shape = self._entry(one).shape
        if shape != self._entry(other).shape or not shape:
            return False
        rows = max(1, _COMPARED_ELEMENTS // max(1, math.prod(shape[1:])))
        return all(
            np.array_equal(
                self._rows(one, (low, min(low + rows, shape[0]))),
                self._rows(other, (low, min(low + rows, shape[0]))),
                equal_nan=True,
            )
            for low in range(0, shape[0], rows)
        )

    def _rows(self, name: str, rows: tuple[int, int]) -> Array:
        """Rows of a tensor, in a dtype that holds every stored number as it is."""
        file_name = self._where[name]
        files, rel = self._folder.locate(file_name)
        header = self._headers[file_name]
        return read_tensor(files, rel, name, header=header, rows=rows).astype(np.float64)

    def _entry(self, name: str) -> Any:
        return self._headers[self._where[name]].tensors[name]

    def _file_names(self) -> list[str]:
        names = self._folder.names()
        raw = self._folder.read_bytes(INDEX_FILE)
        if raw is not None:
            indexed = self._indexed(raw)
            if SINGLE_FILE not in names or indexed == [SINGLE_FILE]:
                return indexed
            if set(indexed) <= set(names):
                raise ConversionError(
                    path=self._folder.uri,
                    expected=f"{SINGLE_FILE}, or {INDEX_FILE} with its files",
                    found=f"both: {SINGLE_FILE} and {', '.join(indexed[:4])}",
                    next_step="remove those that are not the model's",
                )
        if SINGLE_FILE in names:
            # An index whose files are gone is of an earlier save; transformers ignores it too.
            return [SINGLE_FILE]
        pickled = [n for n in names if n.endswith((".bin", ".pt", ".pth"))]
        raise NotFoundError(
            path=self._folder.uri,
            expected=f"{SINGLE_FILE} or {INDEX_FILE}",
            found=f"pickled weights ({', '.join(pickled)})" if pickled else "neither",
            next_step="convert the model with transformers' save_pretrained: pickle is never read"
            if pickled
            else "give the folder that holds the weights",
        )

    def _indexed(self, raw: bytes) -> list[str]:
        path = f"{self._folder.uri}/{INDEX_FILE}"
        mapping = parse_json(raw, path).get("weight_map")
        values = list(mapping.values()) if isinstance(mapping, dict) else []
        texts = {name for name in values if isinstance(name, str)}
        bad = [name for name in values if not isinstance(name, str)]
        bad += sorted(name for name in texts if not _PLAIN_NAME.fullmatch(name))
        if not values or bad:
            raise ConversionError(
                path=path,
                expected='a "weight_map" from tensor names to file names of this folder',
                found=f"the file names {bad[:3]}" if bad else "none",
                next_step="take the folder again from its source",
            )
        return sorted(texts)


def _of_easydel(folder: SourceFolder, data: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json of EasyDeL's says of the model; a warning names all that is not read."""
    known, dropped = easydel_config(data)
    behind = left_behind(folder.names())
    behind += [f"{CONFIG_FILE}'s {', '.join(dropped)}"] if dropped else []
    if behind:
        warnings.warn(
            f"{folder.uri}: only the weights that EasyDeL saved are loaded; left behind: "
            f"{'; '.join(behind)}. Pickle can run code and is never read: make the optimizer anew",
            stacklevel=3,
        )
    return known


def _open_gguf(text: str, config_kwargs: Mapping[str, Any] | None) -> Pretrained:
    if "://" not in text or text.startswith("file://"):
        uri = parse_uri(text)
        return _read_gguf(GGUFFile(uri.local_path), text, config_kwargs)
    uri = parse_uri(text)
    # Mapped into memory: once open, the file's name may go.
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, uri.name)
        open_files(uri.parent).copy(uri.name, open_files(parse_uri(folder)), local.name)
        return _read_gguf(GGUFFile(local), text, config_kwargs)


def _config(data: dict[str, Any], updates: Mapping[str, Any] | None) -> EDPretrainedConfig:
    given = dict(updates or {})
    ours = {name: given.pop(name) for name in OURS_ALONE if name in given}
    other = [
        f"{key}={given[key]!r}, where the file says {data.get(key)!r}"
        for key in ("architectures", "auto_map", "model_type")
        if key in given and given[key] != data.get(key)
    ]
    if other:
        raise ConfigError(
            path="config_kwargs",
            expected="options of the model that is there",
            found=f"another architecture: {'; '.join(other)}",
            next_step="give the folder of that model",
        )
    known = AutoEasyDeLConfig.hf_keys(data)
    unread = {
        name
        for name in given.keys() - data.keys() - known
        if not name.endswith("_token_id") and given[name] is not None
    }
    if unread:
        raise ConfigError(
            path="config_kwargs",
            expected="keys of config.json, or options of the model: "
            f"{', '.join(sorted(known | OURS_ALONE - {'tokenizer_files'}))}",
            found=f"unknown: {', '.join(sorted(unread))}",
            next_step="correct these names",
        )
    return AutoEasyDeLConfig.from_hf(data | given).replace(**ours)


@dataclass(frozen=True)
class _BaseModel:
    """Tensors of a model that was saved without its head, as they are named with it.

    Attributes:
        weights: as they lie.
        prefix: what their names lack.
    """

    weights: WeightSource
    prefix: str

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor's shape."""
        return {f"{self.prefix}{name}": shape for name, shape in self.weights.shapes.items()}

    @property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """Every tensor's dtype."""
        return {f"{self.prefix}{name}": dtype for name, dtype in self.weights.dtypes.items()}

    def read(self, name: str) -> Array:
        """One tensor, whole."""
        return self.weights.read(name.removeprefix(self.prefix))


def _of_whole_model(config: EDPretrainedConfig, weights: WeightSource) -> WeightSource:
    """The tensors by the names that the family gives them, also if the base model was saved."""
    if not isinstance(config, DecoderConfig):
        return weights
    prefix = get_family(config.model_type).names_of(config).optional_prefix
    if not prefix or any(name.startswith((prefix, "lm_head.")) for name in weights.shapes):
        return weights
    return _BaseModel(weights, prefix)


def _as_tied_as_its_weights(
    config: EDPretrainedConfig, weights: SafetensorsFolder, path: str, *, asked: bool
) -> EDPretrainedConfig:
    """The config, untied if the weights that it ties are there with different values.

    Raises:
        ConfigError: the caller asked for tied ones.
    """
    if not isinstance(config, DecoderConfig) or not config.tie_word_embeddings:
        return config
    aliases = get_family(config.model_type).rules(config).aliases
    differ = [
        f"{alias} differs from {name}"
        for alias, name in aliases.items()
        if {alias, name} <= weights.shapes.keys() and not weights.same(alias, name)
    ]
    if not differ:
        return config
    if asked:
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


def _read_gguf(file: GGUFFile, path: str, config_kwargs: Mapping[str, Any] | None) -> Pretrained:
    config = _config(file.config().to_hf(), config_kwargs)
    return Pretrained(path, config.replace(tokenizer_files=file.tokenizer_files()), file, file)
