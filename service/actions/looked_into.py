"""What was looked into last, kept for the next request: what steps hold, and statistics of tensors.

Of a step of many leaves it takes seconds to read; statistics are kept by what they are of, so that
what two steps share is read once.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Final

from cairn.storage.arrays import Statistics
from cairn.storage.reading import CheckpointReader
from cairn.storage.runs import LeafRecord, Manifest, Run, StepContents, StepIndex, StepInfo
from cairn.storage.store import StoreURI

LEAVES: Final = 100_000
"""Most leaves that are kept, of all steps together; one and a half kilobytes each."""

STATISTICS: Final = 4096
"""Statistics that are kept; a kilobyte each."""


@dataclass(frozen=True)
class OpenStep:
    """A listed step.

    Attributes:
        uri: Its folder in its run.
        manifest: Its manifest.
        manifest_digest: That of it; nothing else has it.
        contents: What the manifest names.
    """

    uri: StoreURI
    manifest: Manifest
    manifest_digest: str | None
    contents: StepContents

    @cached_property
    def leaves(self) -> list[LeafRecord]:
        """Every leaf, by item and path."""
        return sorted(self.contents.leaves, key=attrgetter("item", "path"))

    @cached_property
    def _by_path(self) -> dict[tuple[str, str], LeafRecord]:
        return {(leaf.item, leaf.path): leaf for leaf in self.leaves}

    def leaf(self, item: str, path: str) -> LeafRecord | None:
        """A leaf; None if the step has no such one."""
        return self._by_path.get((item, path))

    def reader(self) -> CheckpointReader:
        """What reads its values, for one request: it keeps open whatever it has read.

        Raises:
            StorageError: As `CheckpointReader.open`.
        """
        if isinstance(self.contents, StepIndex):
            return CheckpointReader.of(self.uri, self.manifest, self.contents)
        return CheckpointReader.open(self.uri, self.manifest)


class OpenSteps:
    """The steps that were asked for last. Safe for use by many threads."""

    def __init__(self, leaves: int = LEAVES) -> None:
        """Of at most so many leaves; a step that has more is kept alone."""
        self._leaves = leaves
        self._steps: OrderedDict[tuple[str, str], OpenStep] = OrderedDict()
        self._opening: dict[tuple[str, str], threading.Lock] = {}
        self._lock = threading.Lock()

    def open(self, run: Run, info: StepInfo) -> OpenStep:
        """A step that was just seen to be listed.

        Raises:
            StepNotFoundError: It has no manifest.
            CorruptionError, UnsupportedFormatError: Its manifest or its index can't be read.
            StoreUnavailableError: The store gives no answer.
        """
        uri = run.step_uri(info)
        if info.manifest_digest is None:
            return _opened(run, info)
        key = (str(uri), info.manifest_digest)
        with self._lock:
            opening = self._opening.setdefault(key, threading.Lock())
        with opening:  # of many that ask at once, one reads
            with self._lock:
                known = self._steps.get(key)
            try:
                found = known or _opened(run, info)
            finally:
                with self._lock:
                    self._opening.pop(key, None)
            with self._lock:
                self._keep(key, found)
        return found

    def _keep(self, key: tuple[str, str], step: OpenStep) -> None:
        self._steps[key] = step
        self._steps.move_to_end(key)
        while len(self._steps) > 1 and self._count() > self._leaves:
            self._steps.popitem(last=False)

    def _count(self) -> int:
        return sum(len(step.contents.leaves) for step in self._steps.values())


def _opened(run: Run, info: StepInfo) -> OpenStep:
    manifest = run.manifest(info)
    contents = run.contents(info)
    return OpenStep(run.step_uri(info), manifest, info.manifest_digest, contents)


class KnownStatistics:
    """The statistics that were asked for last. Safe for use by many threads."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Statistics] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, content: Hashable, read: Callable[[], Statistics]) -> Statistics:
        """Those of some content, which are read if they are not known.

        Args:
            content: Another for everything that has others.
            read: Finds them.
        """
        with self._lock:
            known = self._found.get(content)
        found = read() if known is None else known
        with self._lock:
            self._found[content] = found
            self._found.move_to_end(content)
            while len(self._found) > STATISTICS:
                self._found.popitem(last=False)
        return found
