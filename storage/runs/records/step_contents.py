"""What a step holds: its leaves and its files, wherever that is written down."""

import abc

from typing_extensions import override

from cairn.storage.runs.records.manifest import LeafRecord, Manifest, ObjectRecord, SharedFiles

__all__ = ["InlineContents", "StepContents"]


class StepContents(abc.ABC):
    """The leaves and the files of one step."""

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
        """Which of the files the step shares with which earlier ones."""


class InlineContents(StepContents):
    """As the manifest of a step has it that Cairn did not save."""

    def __init__(self, manifest: Manifest) -> None:
        """Of a manifest without an index."""
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
