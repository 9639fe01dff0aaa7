"""What is done to a run, each as a caller does it, with what a later look must find.

A verb has a folder, which `prepare` fills once and which is copied for each case. `begin` is what
the caller has behind it when the disk starts to fail; the function that it gives is the verb, and
is called again as a caller tries again.
"""

import contextlib
import functools
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np

from cairn import (
    AliasNotFoundError,
    Checkpointer,
    Damage,
    LeaseHeldError,
    PreconditionFailedError,
    RetentionPolicy,
    Run,
    StepExistsError,
    StepNotFoundError,
    adopt,
    annotate_run,
    annotate_step,
    apply_retention,
    collect_garbage,
    create_run,
    delete_alias,
    delete_step,
    fork_run,
    open_files,
    parse_uri,
    promote_step,
    repair_run,
    roll_back,
    undelete_step,
    verify_step,
)
from cairn.storage.runs.annotate import note_verified
from cairn.storage.runs.records.exports import (
    ExportFile,
    ExportKey,
    ExportManifest,
    publish_export,
)
from cairn.storage.runs.rollback import take_over
from cairn.storage.store.clock import utc_now
from tests.faults.forked import Forked, Told
from tests.storage.records import DEAD_AFTER_SECONDS, begin_attempt

Act = Callable[[], Any]
BY: Final = "ann"
JOB: Final = "job"
OTHER: Final = "other"
KEY: Final = "key"


@dataclass(frozen=True)
class Verb:
    """One verb.

    Attributes:
        name: in reports.
        prepare: fills the folder.
        begin: gives the verb itself.
        already: what a second call raises where the first has done it all.
        in_parts: it changes several things, of which some may be done.
        imports: modules that take seconds to import; for each case they are there already.
        around: what runs while the verb is walked; what it gives is in the file `given`.
    """

    name: str
    prepare: Callable[[Path], None]
    begin: Callable[[Path], AbstractContextManager[Act]]
    already: tuple[type[Exception], ...] = ()
    in_parts: bool = False
    imports: tuple[str, ...] = ()
    around: Callable[[Path], AbstractContextManager[str]] = lambda _: contextlib.nullcontext("")


late: timedelta = timedelta()


def clock() -> datetime:
    """The caller's: what a killed one had announced ends by itself after a quarter of an hour."""
    return utc_now() + late


def days_later() -> datetime:
    """A clock by which every writer that was killed is dead, and every tombstone has expired."""
    return utc_now() + timedelta(seconds=30 * DEAD_AFTER_SECONDS)


def _save(checkpointer: Checkpointer, step: int, key: str, **options: Any) -> None:
    tree = {"w": np.full(8, step, np.float32)}
    checkpointer.save(step, {"model": tree}, meta={KEY: key}, **options).wait()


def nothing(folder: Path) -> None:
    """No run yet."""


def three_steps(folder: Path) -> None:
    """A run with the steps 1, 2 and 3, and an alias of the second."""
    with Checkpointer(folder / "run", writer_id=JOB) as checkpointer:
        for step in (1, 2, 3):
            _save(checkpointer, step, f"old {step}", labels={"by": "test"}, metrics={"loss": step})
    promote_step(Run.open(folder / "run"), 2, "serving", by=BY, expect=None)


def _without(name: str, folder: Path) -> None:
    three_steps(folder)
    (folder / "run" / name).unlink()


def _deleted(folder: Path) -> None:
    three_steps(folder)
    run = Run.open(folder / "run")
    delete_step(run, run.step(1), by=BY, grace=0)


def _left_behind(folder: Path) -> None:
    """A tombstone that has expired, and a step of a writer that was killed."""
    _deleted(folder)
    writer = Checkpointer(folder / "run", writer_id=JOB)
    _save(writer, 4, "old 4")
    source = folder / "run/attempts"
    shutil.copytree(source / "2/4", source / "2/5")  # the lease is kept: it was killed here


def _held(folder: Path) -> None:
    """A run that another writer holds for longer than any walk takes."""
    three_steps(folder)
    run = Run.open(folder / "run")
    begin_attempt(run.objects, writer=OTHER, base_step=3, ttl=DEAD_AFTER_SECONDS)


def _orbax(folder: Path) -> None:
    import orbax.checkpoint as ocp

    for step in (5, 10):
        with ocp.StandardCheckpointer() as writer:
            writer.save(folder / "theirs" / str(step), {"w": np.ones((4, 4), np.float32)})


def _verb(act: Callable[[Path], Any]) -> Callable[[Path], AbstractContextManager[Act]]:
    """A verb whose caller has nothing behind it."""

    @contextlib.contextmanager
    def begin(folder: Path) -> Iterator[Act]:
        yield functools.partial(act, folder)

    return begin


def _saved(folder: Path, step: int, key: str, **options: Any) -> None:
    """A job that begins, saves once and ends."""
    with Checkpointer(folder / "run", writer_id=JOB) as checkpointer:
        _save(checkpointer, step, key, **options)


def _begin(checkpointer: Checkpointer, folder: Path) -> None:
    """The first save of a job, which one that starts again does not repeat."""
    begun = folder / "begun"
    if not begun.exists():
        _save(checkpointer, 4, "old 4")
        begun.touch()


@contextlib.contextmanager
def _next_save(folder: Path) -> Iterator[Act]:
    with Checkpointer(folder / "run", writer_id=JOB) as checkpointer:
        _begin(checkpointer, folder)
        yield lambda: _save(checkpointer, 5, "new 5")


@contextlib.contextmanager
def _going_back(folder: Path) -> Iterator[Act]:
    with Checkpointer(folder / "run", writer_id=JOB) as checkpointer:
        _begin(checkpointer, folder)
        yield lambda: _save(checkpointer, 2, "new 2", overwrite=True)


def _run(folder: Path) -> Run:
    return Run.open(folder / "run")


def _promote(folder: Path, alias: str, expect: int | None) -> None:
    promote_step(_run(folder), 3, alias, by=BY, expect=expect)


def _delete(folder: Path) -> None:
    run = _run(folder)
    delete_step(run, run.all_states()[0], by=BY, clock=clock)


def _retain(folder: Path) -> list[str]:
    found = apply_retention(_run(folder), RetentionPolicy(keep_last=1), by=BY, clock=clock)
    return [f"deleted {step}.{attempt}" for step, attempt in found.deleted] + [
        f"error {text}" for text in [*found.errors, *found.in_use.values()]
    ]


def _collect(folder: Path) -> None:
    collect_garbage(_run(folder), by=BY, clock=days_later)


def _fork(folder: Path) -> None:
    run = _run(folder)
    fork_run(run, run.step(2), parse_uri(folder / "forked"), by=BY)


def _repair(folder: Path) -> list[str]:
    run = Run(parse_uri(folder / "run"))
    return [f"left {one.name}" for one in repair_run(run, by=BY, dry_run=False) if not one.done]


def _note(folder: Path, damage: Damage | None) -> None:
    run = _run(folder)
    note_verified(run, run.step(1), damage=damage, by=BY)


def _verify(folder: Path) -> list[str]:
    run = _run(folder)
    return [f"damage {text}" for text in verify_step(run, 1).problems]


def _adopt(folder: Path) -> list[str]:
    return [f"problem {text}" for text in adopt(folder / "theirs", folder / "adopted").problems]


def _export(folder: Path) -> None:
    """As a job does: the files first, and then the manifest that has them count."""
    run = _run(folder)
    manifest = run.manifest(run.step(1))
    identity: dict[str, Any] = {"step": 1, "attempt": 1, "kind": "gather", "options": {}}
    identity |= {"source": manifest.digest(), "rule_version": 1}
    key, name = ExportKey.of(**identity), f"op-{secrets.token_hex(4)}"
    with open_files(run.uri).open_write(f"{key.try_folder(name)}/a.txt", read_back=True) as file:
        file.write(b"whole")
    files = (ExportFile(name="a.txt", size=5, crc32c="f8d3e7b5"),)
    made = ExportManifest(**identity, folder=name, created="2026-11-21T12:00:00Z", files=files)
    publish_export(run.objects, key, made)


def _save_llama(told: Told, run: str) -> None:
    from tests.service.jobs import save_llama

    save_llama(run, (1, 2))
    told.tell("ready")


@contextlib.contextmanager
def _plane(folder: Path) -> Iterator[str]:
    """The URL of a control plane that has a run with two steps."""
    from tests.service.planes import running_plane

    with Forked(_save_llama, str(folder / "store/llama")) as child:
        child.event(60.0)
    (folder / "data").mkdir()
    with running_plane(folder / "store", folder / "data") as (url, _):
        yield url


def _pulled(folder: Path, step: int) -> None:
    from cairn.service.client.client import Client
    from cairn.service.client.pull import pull

    with Client((folder / "given").read_text()) as client:
        pull(client, "llama", step, folder / "pulled", root="default", options={}, keep=0)


def _pulled_before(folder: Path) -> None:
    """Serves step 1; step 2 is exported already."""
    from cairn.service.client.client import Client

    _pulled(folder, 1)
    with Client((folder / "given").read_text()) as client:
        client.wait(client.convert("llama", 2).id)


def _take_over(folder: Path) -> None:
    take_over(_run(folder), 2, by=BY)


DAMAGE: Final = Damage(at="2026-11-21T12:00:00Z", leaves=("model/w",))

VERBS: Final = {
    one.name: one
    for one in (
        Verb(
            "create run",
            nothing,
            _verb(lambda folder: create_run(folder / "run", labels={"by": "test"}) and None),
            (PreconditionFailedError,),
        ),
        Verb(
            "save, a run's first",
            nothing,
            _verb(lambda folder: _saved(folder, 1, "new 1")),
            (StepExistsError,),
            in_parts=True,
        ),
        Verb(
            "save, of a job that starts",
            three_steps,
            _verb(lambda folder: _saved(folder, 4, "new 4")),
            (StepExistsError,),
        ),
        Verb("save, the next", three_steps, _next_save, (StepExistsError,)),
        Verb("save, going back", three_steps, _going_back),
        Verb(
            "promote, a new alias",
            three_steps,
            _verb(lambda folder: _promote(folder, "candidate", None)),
            (PreconditionFailedError,),
        ),
        Verb(
            "promote, a move",
            three_steps,
            _verb(lambda folder: _promote(folder, "serving", 1)),
            (PreconditionFailedError,),
        ),
        Verb(
            "delete alias",
            three_steps,
            _verb(lambda folder: delete_alias(_run(folder), "serving", by=BY, expect=1) and None),
            (AliasNotFoundError, PreconditionFailedError),
        ),
        Verb("delete step", three_steps, _verb(_delete), (StepNotFoundError,)),
        Verb(
            "undelete step",
            _deleted,
            _verb(lambda folder: undelete_step(_run(folder), 1, 1)),
            (StepNotFoundError,),
        ),
        Verb("retention", three_steps, _verb(_retain), in_parts=True),
        Verb("collect garbage", _left_behind, _verb(_collect), in_parts=True),
        Verb(
            "roll back",
            three_steps,
            _verb(lambda folder: roll_back(_run(folder), 1, by=BY, request="r") and None),
        ),
        Verb("take over", _held, _verb(_take_over), (PreconditionFailedError,)),
        Verb("fork", three_steps, _verb(_fork), in_parts=True),
        *(
            Verb(f"repair {name}", functools.partial(_without, name), _verb(_repair), already)
            for name, already in (
                ("run.json", ()),
                ("attempts/1.json", ()),
                ("lease.json", (LeaseHeldError,)),  # what it has mended keeps others out
                ("manifests/3.1.json", ()),
            )
        ),
        Verb(
            "annotate step",
            three_steps,
            _verb(lambda folder: annotate_step(_run(folder), 1, labels={"a": "b"}, by=BY) and None),
        ),
        Verb(
            "annotate run",
            three_steps,
            _verb(lambda folder: annotate_run(_run(folder), {"a": "b"}) and None),
        ),
        Verb("note sound", three_steps, _verb(lambda folder: _note(folder, None))),
        Verb("note damage", three_steps, _verb(lambda folder: _note(folder, DAMAGE))),
        Verb("verify", three_steps, _verb(_verify)),
        Verb("adopt", _orbax, _verb(_adopt), in_parts=True),
        Verb("publish export", three_steps, _verb(_export)),
        Verb(
            "pull",
            _pulled_before,
            _verb(lambda folder: _pulled(folder, 2)),
            in_parts=True,
            imports=("cairn.service.client.client", "cairn.service.client.pull"),
            around=_plane,
        ),
    )
}
