"""Stored checkpoint, opened for a load: its content, comparison with a target, and restores."""

import copy
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final, SupportsIndex

import jax
import jax.numpy as jnp
from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from cairn.counts import count_text
from cairn.interop.errors import ArgumentError
from cairn.interop.weights.export import MODEL_ITEM, served_item
from cairn.state.checkpointing.iterators import Positions, find_positions, warn_of_left
from cairn.state.checkpointing.leaf_forms import dtype_name, is_key_dtype
from cairn.state.checkpointing.load import agreed_checkpoint
from cairn.state.checkpointing.processes import agreement
from cairn.state.checkpointing.restore import (
    check_meta,
    read_meta,
    restore_item,
    restore_leaves,
)
from cairn.state.paths import named_leaves
from cairn.state.states.memory_kinds import in_memory
from cairn.storage.arrays.dtypes import dtype_named
from cairn.storage.errors import (
    NotACheckpointError,
    TreeMismatchError,
    UnsupportedFormatError,
)
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.runs.damage import OnDamage
from cairn.storage.runs.records.assets import read_asset
from cairn.storage.runs.records.layout import CheckpointRef, check_step, parse_ref
from cairn.storage.runs.records.manifest import LeafRecord, Manifest
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo

__all__ = ["StoredCheckpoint", "run_has_saved", "stored_float"]

META_FORMAT = "cairn.meta"
META_VERSION = 1


def run_has_saved(reference: str | os.PathLike[str]) -> bool:
    """Return whether the run has a checkpoint to resume from.

    All processes of a job must call this; they get the same result.

    Raises:
        ValueError: if the folder is no run, but has other checkpoints.
        CorruptionError: if records of the run are lost, so that it can't be known.
    """
    return agreement.agree(lambda: Run(parse_ref(os.fspath(reference)).run).has_saved())


class _MetaFields(TypedDict, total=False):
    """Fields of a step's JSON item ("meta") that a load reads, and their types."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]

    step: int
    model_class: str | None
    model_module: str | None
    config: dict[str, Any] | None
    module: dict[str, Any] | None
    trainable: list[str] | None
    tx_init: dict[str, Any] | None
    hyperparameters: dict[str, Any] | None
    extras: dict[str, Any] | None
    fields: dict[str, Any] | None
    weak: dict[str, list[str]]
    memory_kinds: dict[str, dict[str, str]] | None
    python_numbers: dict[str, dict[str, str]]


_META_FIELDS: Final = TypeAdapter(_MetaFields)


class StoredCheckpoint:
    """Checkpoint of a run that `save_state` saved, opened for a load.

    Attributes:
        run: the run.
        info: the step.
        manifest: the step's manifest.
        meta: the JSON that `save_state` stored with the step.
        model_item: name of the item that the model is read from.
    """

    def __init__(self, run: Run, info: StepInfo) -> None:
        self.run = run
        self.info = info
        self.uri = run.step_uri(info)
        self.manifest: Manifest = run.manifest(info)
        self._reader = CheckpointReader.open(self.uri, self.manifest, whole=True)
        self.model_item = MODEL_ITEM
        self.meta: Mapping[str, Any] = read_meta(self._reader)
        self._check_meta()

    @classmethod
    def open(
        cls,
        reference: str | os.PathLike[str],
        *,
        step: SupportsIndex | None = None,
        damaged: OnDamage = "refuse",
    ) -> "StoredCheckpoint":
        """Open the checkpoint that "run", "run@alias" or "run/steps/N" names.

        All processes of a job must call this; they get the same checkpoint.

        Args:
            reference: the run, or one of its checkpoints.
            step: the step, if the reference names only the run; None for the latest.
            damaged: what to do if no step is named, and the latest is damaged; see `cairn.load`.

        Raises:
            StepDamagedError: if the latest step is damaged, and `damaged` is "refuse".
            InvalidURIError: if the reference is malformed, or names a step and `step` is given.
            NotFoundError: if there is no such run, alias or step.
            NotACheckpointError: if the step was not saved by `save_state`.
        """

        def named() -> CheckpointRef:
            ref = parse_ref(reference)
            if step is None:
                return ref
            number = check_step(step)
            named = (ref.alias, ref.best) != (None, None)
            if named or ref.step not in (None, number):
                raise ArgumentError(
                    path="step",
                    expected=f"no step= with {os.fspath(reference)!r}, which names one",
                    found=step,
                )
            return replace(ref, step=number)

        def same(ref: CheckpointRef) -> dict[str, str]:
            return {"load_directory": str(ref), "damaged": damaged}

        ref = agreement.all_or_none(named, same=same, error=ArgumentError)
        run, info = agreed_checkpoint(ref, damaged=damaged)
        return agreement.all_or_none(cls, run, info)

    def served(self) -> "StoredCheckpoint":
        """Return this checkpoint with the model for inference: the merged one, if it is stored.

        The merged model has neither adapters nor quantized weights.
        """
        served = copy.copy(self)
        served.model_item = served_item(self.items)
        if served.model_item != MODEL_ITEM:
            module = {**(self.meta.get("module") or {}), "lora": None, "quantization": None}
            served.meta = {**self.meta, "module": module, "trainable": None}
        return served

    @property
    def items(self) -> tuple[str, ...]:
        """Names of the stored items."""
        return self.manifest.items

    def leaves(self, item: str) -> dict[str, LeafRecord]:
        """Return the stored records of an item's leaves, by path."""
        contents = self._reader.contents
        assert contents is not None, "the reader was opened with the manifest"
        return {leaf.path: leaf for leaf in contents.leaves if leaf.item == item}

    def assets(self) -> dict[str, bytes]:
        """Return the small files stored with the model, such as a tokenizer's, by name.

        Raises:
            CorruptionError: if a file is missing or damaged.
        """
        return {asset.name: read_asset(self.run.objects, asset) for asset in self.manifest.assets}

    def is_weak(self, item: str, path: str, target: Any) -> bool:
        """Return whether a leaf was saved weakly typed.

        Older steps do not record it; then the target's weak type is returned.
        """
        if "weak" in self.meta:
            return path in self.meta["weak"].get(item, ())
        return bool(getattr(target, "weak_type", False))

    def place(self, item: str, path: str, place: Any) -> Any:
        """Return the sharding `place` in the memory kind that the leaf was saved from.

        It returns `place` unchanged if the step records no memory kinds, or if `place` is None.
        """
        kinds = self.meta.get("memory_kinds")
        if kinds is None or place is None:
            return place
        return in_memory(place, kinds.get(item, {}).get(path))

    def targets(self, item: str, tree: Any, *, stored_dtypes: bool = True) -> Any:
        """Return an abstract tree with the dtypes, weak types and memory kinds of the stored item.

        A leaf gets the stored dtype only if both dtypes are floating. Other differences remain, and
        `check` reports them.

        Args:
            item: name of the item.
            tree: abstract tree of the item.
            stored_dtypes: whether to use the stored dtypes; False keeps those of `tree`.
        """
        stored = self.leaves(item)

        def as_stored(path: str, leaf: Any) -> Any:
            record = stored.get(path)
            if record is None or is_key_dtype(leaf.dtype):
                return leaf
            dtype = stored_float(leaf, record) if stored_dtypes else leaf.dtype
            weak = self.is_weak(item, path, leaf)
            place = self.place(item, path, leaf.sharding)
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place, weak_type=weak)

        leaves = [as_stored(named.path, named.leaf) for named in named_leaves(tree)]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def check(self, targets: Mapping[str, Any], *, casts: frozenset[str] = frozenset()) -> None:
        """Check that targets fit the stored items.

        Args:
            targets: abstract trees, by item.
            casts: names of items whose floating leaves may have another floating dtype.

        Raises:
            TreeMismatchError: if a leaf is missing, unexpected, or of another shape or dtype; all
                leaves of all items are listed.
        """
        problems = [
            problem
            for item, tree in targets.items()
            for problem in self._problems(item, tree, item in casts)
        ]
        if problems:
            raise TreeMismatchError(
                "the checkpoint does not fit",
                path=self.uri,
                expected="the model and optimizer that are being loaded",
                found=count_text(len(problems), "leaf that differs", "leaves that differ"),
                next_step="load it with the config, model class and optimizer it was saved with",
                problems=problems,
            )

    def positions(self, iterators: Mapping[str, Any] | None, *, resumes: bool) -> Positions:
        """Return the stored positions of iterators. All processes of a job must call this.

        Args:
            iterators: iterators by name, as given to `save_state`.
            resumes: whether training continues; then a warning names stored positions that no
                iterator gets.

        Raises:
            IteratorMismatchError: if the step has no position for an iterator, or it does not fit;
                all are listed.
            CorruptionError: if stored bytes fail their checksum.
        """
        where = f"{self.run.uri}, step {self.info.step}"
        positions = agreement.all_or_none(
            find_positions, self._reader, iterators, where, same=Positions.same, error=ArgumentError
        )
        if resumes:
            warn_of_left(self._reader, iterators, where=where)
        return positions

    def restore(self, item: str, target: Any, *, cast: bool = False) -> Any:
        """Return an item, restored into the containers, dtypes and shardings of the target.

        Raises:
            TreeMismatchError: if the target does not fit.
            CorruptionError: if stored bytes fail their checksum.
        """
        return restore_item(self._reader, item, target, cast=cast)

    def restore_some(
        self, item: str, target: Any, paths: Collection[str], *, cast: bool = False
    ) -> dict[str, Any]:
        """Restore some leaves of an item; return them by path.

        Raises:
            TreeMismatchError: if the target does not fit.
            CorruptionError: if stored bytes fail their checksum.
        """
        return restore_leaves(self._reader, item, target, paths, cast=cast)

    def _problems(self, item: str, tree: Any, cast: bool) -> list[str]:
        stored = self.leaves(item)
        targets = {named.path: named.leaf for named in named_leaves(tree)}
        problems = [
            f"{item}/{path}: missing from the checkpoint, expected {_text(targets[path])}"
            for path in targets.keys() - stored.keys()
        ]
        problems += [
            f"{item}/{path}: unexpected in the checkpoint, stored as "
            f"{stored[path].dtype}{list(stored[path].shape)}"
            for path in stored.keys() - targets.keys()
        ]
        for path in targets.keys() & stored.keys():
            leaf, record = targets[path], stored[path]
            same_dtype = dtype_name(leaf.dtype) == record.dtype or (
                cast and jnp.issubdtype(leaf.dtype, jnp.floating) and _is_float_name(record.dtype)
            )
            if tuple(leaf.shape) != tuple(record.shape) or not same_dtype:
                problems.append(
                    f"{item}/{path}: expected {_text(leaf)}, "
                    f"stored as {record.dtype}{list(record.shape)}"
                )
        return sorted(problems)

    def _check_meta(self) -> None:
        if self.meta.get("format") != META_FORMAT:
            raise NotACheckpointError(
                path=self.uri,
                expected=f"meta of format {META_FORMAT!r}",
                found=repr(self.meta.get("format")),
                next_step="this step was not saved by save_state; `cairn.load` reads it",
            )
        if self.meta.get("version") != META_VERSION:
            raise UnsupportedFormatError(
                path=self.uri,
                expected=f"meta of version {META_VERSION}",
                found=f"version {self.meta.get('version')!r}",
                next_step="load it with the version of Cairn that saved it, or a newer one",
            )
        check_meta(self.meta, _META_FIELDS, path=self.uri)


def stored_float(target: Any, record: LeafRecord) -> Any:
    """Return a leaf's stored dtype if it and the target's are floating; else the target's."""
    floating = jnp.issubdtype(target.dtype, jnp.floating) and _is_float_name(record.dtype)
    return dtype_named(record.dtype) if floating else target.dtype


def _is_float_name(name: str) -> bool:
    return not name.startswith("key<") and jnp.issubdtype(dtype_named(name), jnp.floating)


def _text(leaf: Any) -> str:
    return f"{dtype_name(leaf.dtype)}{list(leaf.shape)}"
