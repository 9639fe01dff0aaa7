"""Comparison of three and more steps: `/compare/steps`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query, Request
from fastapi.responses import HTMLResponse
from pydantic import Field

from cairn.service.access.callers import Caller, Scope
from cairn.service.access.permission import Reader
from cairn.service.actions import checkpoints, tensors
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.step_meta import read_meta
from cairn.service.dashboard import addresses
from cairn.service.dashboard.charts.differences import entry_table, flatten
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import MAX_STEP, PlaneDependency
from cairn.service.schemas import PLAIN_PATTERN, Checkpoint
from cairn.storage.errors import InvalidURIError, NotFoundError, StepInFlightError, StorageError

MAX_STEPS: Final = 20
MAX_NAMES: Final = 200
"""Largest number of steps in the address of the page; the first `MAX_STEPS` are shown."""

router: Final = page_router(StorePage)

Steps = Annotated[
    list[Annotated[str, Field(max_length=300, pattern=PLAIN_PATTERN)]] | None,
    Query(alias="step", max_length=MAX_NAMES),
]


@dataclass(frozen=True)
class ComparedStep:
    """Step that is compared with others.

    Attributes:
        checkpoint: The step, as the catalog has it.
        config: Entries of its model's config.
        meta: Entries of the JSON that was saved with it.
        notes: Sentences about what could not be read.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    meta: Mapping[str, Any]
    notes: list[str]


@router.get("/compare/steps")
def compare_steps_page(
    request: Request,
    caller: Reader,
    plane: PlaneDependency,
    step: Steps = None,
    equal: bool = False,
) -> HTMLResponse:
    """Show the metrics, labels, configuration and metadata of steps beside each other."""
    names = list(dict.fromkeys(step or ()))
    opened = {name: _compared(plane, caller, name) for name in names[:MAX_STEPS]}
    compared = [one for one in opened.values() if one is not None]
    steps = [one.checkpoint for one in compared]
    better: dict[str, str] = {}
    for one in steps:
        better |= one.better
    sides: list[tuple[str, list[Mapping[str, Any]]]] = [
        ("Metrics", [one.metrics for one in steps]),
        ("Labels", [one.labels for one in steps]),
        ("Saved metadata (meta)", [one.meta for one in compared]),
        ("Configuration", [one.config for one in compared]),
    ]
    heads = _heads(steps)
    places = [(one.root, one.run, one.step) for one in steps]
    pairs = []
    for (head, step_name), (other_head, other_name) in pairwise(zip(heads, places, strict=True)):
        pairs.append((head, other_head, addresses.comparison(step_name, other_name)))
    kept = [("step", f"{root}/{run}/{number}") for root, run, number in places]
    switched = kept if equal else [*kept, ("equal", "true")]
    return page(
        request,
        "compare/steps.html",
        steps=steps,
        heads=heads,
        pairs=pairs,
        runs=list(dict.fromkeys((one.root, one.run) for one in steps)),
        missing=[name for name, one in opened.items() if one is None],
        left_out=max(0, len(names) - MAX_STEPS),
        most=MAX_STEPS,
        tables=[
            entry_table(title, entries, is_equal_shown=equal, better=better)
            for title, entries in sides
        ],
        notes=[note for one in compared for note in one.notes],
        is_equal_shown=equal,
        address=f"/compare/steps?{urlencode(switched)}",
    )


@router.get("/compare/steps/meta")
def meta_part(
    request: Request,
    caller: Reader,
    plane: PlaneDependency,
    step: Steps = None,
) -> HTMLResponse:
    """Show what differs in the JSON that was saved with steps."""
    names = list(dict.fromkeys(step or ()))[:MAX_STEPS]
    compared = [one for one in (_compared(plane, caller, name) for name in names) if one]
    return page(
        request,
        "compare/meta.html",
        table=entry_table(
            "Saved metadata (meta)", [one.meta for one in compared], is_equal_shown=False
        ),
        heads=_heads([one.checkpoint for one in compared]),
        notes=[note for one in compared for note in one.notes],
    )


def _heads(steps: Sequence[Checkpoint]) -> list[tuple[str, str]]:
    """Return the heads of a table's columns: the names of steps, and their addresses."""
    several_runs = len({(one.root, one.run) for one in steps}) > 1
    return [
        (f"{one.run} {one.step}" if several_runs else f"{one.step}", addresses.of(one))
        for one in steps
    ]


def _compared(plane: ControlPlane, caller: Caller, name: str) -> ComparedStep | None:
    """Return a step with its entries; None: there is no such step, or the caller can't read it."""
    root, _, rest = name.partition("/")
    run, _, number = rest.partition("/")
    is_number = number.isascii() and number.isdecimal() and int(number[:20]) <= MAX_STEP
    if not is_number or root not in caller.visible(plane.roots):
        return None
    caller.require(Scope.READ, root)
    try:
        checkpoint = checkpoints.get_checkpoint(plane, root, run, int(number), refresh=False)
    except (NotFoundError, StepInFlightError, InvalidURIError):
        return None
    try:
        opened = tensors.open_step(plane, root, run, int(number))
        meta = read_meta(opened)
    except StorageError as error:
        return ComparedStep(checkpoint, {}, {}, [f"{checkpoint.run} {checkpoint.step}: {error}"])
    entries, note = flatten(meta.without_config(opened))
    config, more = flatten({} if opened.manifest.model is None else opened.manifest.model.config)
    notes = [f"{checkpoint.run} {checkpoint.step}: {text}" for text in (note, more) if text]
    if meta.is_too_large:
        notes.append(
            f"{checkpoint.run} {checkpoint.step}: {meta.nbytes:,} bytes of metadata are too many"
        )
    return ComparedStep(checkpoint, config, entries, notes)
