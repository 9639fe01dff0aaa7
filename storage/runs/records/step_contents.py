"""Leaves and files of a step, from its index or from its manifest."""

import abc

from typing_extensions import override

from cairn.storage.runs.records.manifest import LeafRecord, Manifest, ObjectRecord, SharedFiles

__all__ = ["InlineContents", "StepContents"]


class StepContents(abc.ABC):
    """Leaves and files of one step."""

    @property
    @abc.abstractmethod
    def leaves(self) -> tuple[LeafRecord, ...]:
        """Every leaf of every item."""

    @property
    @abc.abstractmethod
    def objects(self) -> tuple[ObjectRecord, ...]:
        """Every file that was saved with the step, by name."""

    @property
    @abc.abstractmethod
    def shared_files(self) -> tuple[SharedFiles, ...]:
        """Files that the step shares with earlier ones."""


class InlineContents(StepContents):
    """Leaves and files of a step that Cairn did not save, as its manifest lists them."""

    def __init__(self, manifest: Manifest) -> None:
        """Create it from a manifest without an index."""
        self._manifest = manifest

    @property
    @override
    def leaves(self) -> tuple[LeafRecord, ...]:
        return self._manifest.inline_leaves

    @property
    @override
    def objects(self) -> tuple[ObjectRecord, ...]:
        return self._manifest.inline_objects

    @property
    @override
    def shared_files(self) -> tuple[SharedFiles, ...]:
        return ()
