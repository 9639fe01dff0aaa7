"""A run with a history, copied for each trial; what befalls records of a copy, and what it answers.

The history has restarts, a way back, steps that were overwritten, the latest among them, deleted
steps, aliases that moved and one that was deleted, labels. Each save holds another number, so that
the wrong one of two copies of a step is seen.
"""

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np

from cairn import (
    Alias,
    Annotation,
    Checkpointer,
    CheckpointReader,
    Lease,
    Manifest,
    ObjectStore,
    Run,
    RunInfo,
    StepInfo,
    StorageError,
    StoreURI,
    Tombstone,
    delete_alias,
    delete_step,
    find_deletable_step,
    parse_ref,
    promote_step,
    roll_back,
)
from cairn.storage.runs.records.layout import (
    ALIASES,
    ANNOTATIONS,
    ATTEMPTS,
    MANIFESTS,
    RUN_FILE,
    TRASH,
    annotation_file,
    manifest_file,
    trash_file,
)
from cairn.storage.runs.resolution import resolve_step
from cairn.storage.store.records import Record, RecordLocation
from tests.gcs.plugin import Gcs
from tests.storage.records import LEASE_FILE, AttemptRecord, put_record

KINDS: Final[dict[str, type[Record]]] = {
    RUN_FILE: RunInfo,
    LEASE_FILE: Lease,
    ATTEMPTS: AttemptRecord,
    MANIFESTS: Manifest,
    ALIASES: Alias,
    ANNOTATIONS: Annotation,
    TRASH: Tombstone,
}
"""By how their names begin."""

STEPS: Final = (10, 20, 30, 40, 50, 60, 65, 70)
ALIAS_NAMES: Final = ("production", "candidate", "retired")

UNTOLD: Final = (ANNOTATIONS, TRASH)
"""Nothing tells that such a record was there, nor of these and of an alias that they have changed
since: the documentation says so, and it is no trial."""


_NEVER_WRITTEN: Final = (
    "attempts/99.json",
    "manifests/99.7.json",
    "manifests/70.99.json",
    "manifests/30.6.json",
    "trash/20.3.json",
    "aliases/other.json",
)
"""What no run of this history has, whatever attempts its steps were saved in."""

_WAIT_SECONDS: Final = 60.0


class Damage(NamedTuple):
    """What befalls records.

    Attributes:
        how: for people.
        bytes: what is in their place then, by name; None: nothing.
    """

    how: str
    bytes: dict[str, bytes | None]


class Template:
    """The run that is copied.

    Attributes:
        run: as it was written.
        records: its records by name.
        older: what each record was before, oldest first.
        answers: what `answers` gives.
        tell_of_each_other: the lease names the step that was reported durable last, and nothing
            else does. The documentation says so; what befalls both is no trial.
        never_written: where a record never was, and a copy of another may turn up.
    """

    def __init__(self, root: StoreURI, double: Gcs | None = None) -> None:
        """Below `root`, in the bucket of `double` if one is given."""
        self._root, self._double = root, double
        self._numbers, self._values = itertools.count(1), itertools.count(1.0)
        self.run = run = Run.create(root / "template", labels={"team": "a"})
        self.records: dict[str, bytes] = {}
        self.older: dict[str, list[bytes]] = {}
        self._job((10, False), (20, False), (30, False))
        roll_back(run, 10, by="me")
        self._job((20, False), (40, False))
        promote_step(run, 20, "production", expect=None)
        self._job((20, True), (50, False))
        self._job((50, True), (60, False))
        promote_step(run, 50, "production", expect=1)
        for alias in ("candidate", "retired"):
            promote_step(run, 60, alias, expect=None)
        self._look()
        delete_alias(run, "retired", expect=1)
        for loss in (1.0, 0.5):
            name = annotation_file(60, run.step(60).attempt)
            put_record(run.objects, name, Annotation(metrics={"loss": loss}))
        self._job((65, False), (70, False))
        for step in (10, 65):
            delete_step(run, find_deletable_step(run, step), by="me")
        self._look()
        self.answers = answers(run)
        latest = (70, run.step(70).attempt)
        self.tell_of_each_other = frozenset({LEASE_FILE, manifest_file(*latest)})
        self.never_written = (*_NEVER_WRITTEN, trash_file(*latest))

    def _job(self, *steps: tuple[int, bool]) -> None:
        self._look()
        with Checkpointer(self.run.uri, writer_id="job") as checkpointer:
            for step, overwrite in steps:
                items = {"model": {"w": np.full(4, next(self._values))}}
                checkpointer.save(step, items, meta={}, overwrite=overwrite).wait(_WAIT_SECONDS)
                self._look()

    def _look(self) -> None:
        for name in self.run.objects.list():
            if name.count("/") < 2 and name.endswith(".json"):
                found = self.run.objects.read(name)
                before = self.records.get(name)
                assert found is not None
                if before not in (None, found.value):
                    self.older.setdefault(name, []).append(before)
                self.records[name] = found.value

    @contextlib.contextmanager
    def copy(self, damage: Damage) -> Iterator[Run]:
        """A copy that was damaged, and that nobody has looked at; it is removed afterwards."""
        target = self._root / f"copy-{next(self._numbers)}"
        self._copy_files(target)
        objects = ObjectStore(target)
        for name, value in damage.bytes.items():
            if value is None:
                objects.delete(name)
            else:
                objects.write(name, value)
        try:
            yield Run(target, objects=ObjectStore(target))
        finally:
            if self._double is None:
                shutil.rmtree(target.local_path)

    def _copy_files(self, target: StoreURI) -> None:
        if self._double is None:
            source = self.run.uri.local_path
            shutil.copytree(source, target.local_path, copy_function=os.link)
            return
        bucket = self._double.server.store.bucket(self._double.bucket)
        above = f"{self.run.uri.path}/"
        for stored in bucket.all():
            if stored.name.startswith(above):
                name = f"{target.path}/{stored.name.removeprefix(above)}"
                bucket.link(stored, bucket, name, fields=stored.fields)


def answers(run: Run) -> dict[str, Any]:
    """What a run says of its steps; in place of an answer the error that it raises."""

    def load(info: StepInfo | None) -> tuple[int, int, float]:
        assert info is not None
        reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
        return info.step, info.attempt, float(reader.read("model", "w")[0])

    def open_step(number: int) -> tuple[int, int]:
        manifest = run.manifest(run.step(number))
        return manifest.step, manifest.attempt

    def aliased(name: str) -> tuple[int, int, float]:
        return load(resolve_step(run, parse_ref(f"{run.uri}@{name}")))

    asks: dict[str, Callable[[], Any]] = {
        "latest": lambda: load(run.latest()),
        **{f"step {step}": lambda step=step: open_step(step) for step in STEPS},
        **{f"@{name}": lambda name=name: aliased(name) for name in ALIAS_NAMES},
        "steps": lambda: {one.step: None if one.problem else one.attempt for one in run.steps()},
    }
    return {name: _outcome(ask) for name, ask in asks.items()}


def _outcome(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except StorageError as exc:
        return exc


def wrong_answers(found: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Answers that are neither what they were nor an error; steps that only a check can miss."""
    problems = []
    for name, answer in found.items():
        known = right[name]
        if isinstance(answer, StorageError):
            continue
        if name == "steps":
            extra = {step: one for step, one in answer.items() if one and known.get(step) != one}
            if extra:
                problems.append(f"lists {extra}, expected {known}")
        elif isinstance(known, StorageError) or answer != known:
            problems.append(f"{name} gives {answer}, expected {known}")
    return problems


def is_missing(found: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether something that is there is not told of, and no error says so."""
    listed = found["steps"]
    return not isinstance(listed, StorageError) and listed.keys() < right["steps"].keys()


def any_damages(template: Template, rng: Random) -> Damage:
    """One or two records: lost, cut, swapped, replaced by another or by what they were before."""
    first = any_damage(template, rng)
    if rng.random() < 0.5:
        return first
    while True:
        second = any_damage(template, rng)
        both = first.bytes | second.bytes
        if len(both) == len(first.bytes) + len(second.bytes) and not both.keys() >= (
            template.tell_of_each_other
        ):
            return Damage(f"{first.how}; {second.how}", both)


def any_damage(template: Template, rng: Random) -> Damage:
    """What befalls one record, or two that change places."""
    how = rng.choice(list(_HOW))
    return Damage(*_HOW[how](template, rng))


def _lost(template: Template, rng: Random) -> tuple[str, dict[str, bytes | None]]:
    name = rng.choice([name for name in template.records if not name.startswith(UNTOLD)])
    return f"{name} lost", {name: None}


def _cut(template: Template, rng: Random) -> tuple[str, dict[str, bytes | None]]:
    name, value = rng.choice(list(template.records.items()))
    size = rng.choice([0, rng.randrange(len(value)), len(value) - 1])
    return f"{name} cut to {size} bytes", {name: value[:size]}


def _swapped(template: Template, rng: Random) -> tuple[str, dict[str, bytes | None]]:
    one, other = rng.sample(_alike(template, rng), 2)
    records = template.records
    return f"{one} and {other} swapped", {one: records[other], other: records[one]}


def _copied(template: Template, rng: Random) -> tuple[str, dict[str, bytes | None]]:
    source = rng.choice(_alike(template, rng))
    targets = [
        name
        for name in (*template.records, *template.never_written)
        if _kind(name) == _kind(source)
    ]
    target = rng.choice([name for name in targets if name != source])
    return f"{source} copied to {target}", {target: template.records[source]}


def _foreign(template: Template, rng: Random) -> tuple[str, dict[str, bytes | None]]:
    """Of another run that has a record of the same name."""
    name, value = rng.choice(list(template.records.items()))
    record = KINDS[_kind(name)].parse(value, name)
    other = record.with_location(RecordLocation("f" * 32, name)).to_bytes()
    return f"{name} of another run", {name: other}


def _older(template: Template, rng: Random) -> tuple[str, dict[str, bytes | None]]:
    name = LEASE_FILE  # of the others nothing tells that they are old; see `UNTOLD`
    older = rng.choice(template.older[name])
    return f"{name} as it was", {name: older}


_HOW: Final = {one.__name__: one for one in (_lost, _cut, _swapped, _copied, _foreign, _older)}


def _kind(name: str) -> str:
    return next(start for start in KINDS if name.startswith(start))


def _alike(template: Template, rng: Random) -> list[str]:
    """Records of one kind of which there are several."""
    kind = rng.choice([ATTEMPTS, MANIFESTS, ALIASES, TRASH])
    return [name for name in template.records if _kind(name) == kind]


def one_bit(template: Template, rng: Random) -> Damage:
    """One bit of one record."""
    name, value = rng.choice(list(template.records.items()))
    bit = rng.randrange(8 * len(value))
    flipped = bytearray(value)
    flipped[bit // 8] ^= 1 << bit % 8
    return Damage(f"bit {bit} of {name}", {name: bytes(flipped)})
