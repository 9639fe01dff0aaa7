"""Listings of runs, checkpoints, operations and garbage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from rich.console import Console

from cairn.counts import count_text
from cairn.service.command.output.tables import Cell, print_table
from cairn.service.schemas import Checkpoint, Operation, Run, RunColumn
from cairn.service.sizes import Size

if TYPE_CHECKING:
    from cairn.storage.runs.gc import Garbage  # imports TensorStore


def list_runs(console: Console, runs: Iterable[Run]) -> None:
    """Print a table of runs, and of the columns that were asked for."""
    runs = list(runs)
    titles = ["root", "run", "latest", "checkpoints", "size", "created (UTC)", "forked from"]
    for column in runs[0].columns if runs else ():
        titles += [column.field, "at step"] if column.field.startswith("best.") else [column.field]
    print_table(console, titles, map(_run, runs))


def list_checkpoints(console: Console, checkpoints: Iterable[Checkpoint]) -> None:
    """Print a table of checkpoints."""
    titles = (
        *("step", "attempt", "state", "size", "leaves", "aliases", "created (UTC)", "iterators"),
        *("verified (UTC)", "metrics"),
    )
    print_table(console, titles, map(_checkpoint, checkpoints))


def name_problems(errors: Console, runs: Iterable[Run]) -> None:
    """Print the problems of runs: damaged steps, and records that listings leave out."""
    for run in runs:
        if run.damaged_count:
            steps = count_text(run.damaged_count, "damaged step")
            text = f"{run.name}: {steps}: `cairn checkpoints {run.name} --state damaged`"
            errors.print(text, soft_wrap=True, markup=False)
        for problem in run.problems:
            errors.print(f"{run.name}: {problem}", soft_wrap=True, markup=False)


def name_limits(errors: Console, runs: Sequence[Run]) -> None:
    """Print which columns have no best values, and which runs have more than the catalog keeps."""
    for column in zip(*(run.columns for run in runs), strict=True):
        field, name, metric = column[0].field.partition("best.")
        is_empty = all(cell.value is None for cell in column)
        if name and not field and is_empty and not all(cell.unknown for cell in column):
            text = (
                f"No best value of {metric}: no step of these runs says whether lower or higher is "
                f"better. Say it once for each run: `cairn annotate RUN --better {metric}=min`"
            )
            errors.print(text, soft_wrap=True, markup=False)
    for run in runs:
        if run.metrics_cut:
            text = f"{run.name}: more than 1,000 metrics; lists know the first 1,000"
            errors.print(text, soft_wrap=True, markup=False)
        if any(cell.unknown and cell.field.startswith("config.") for cell in run.columns):
            text = f"{run.name}: more than 200 config entries; lists know the first 200"
            errors.print(text, soft_wrap=True, markup=False)


def list_operations(console: Console, operations: Iterable[Operation]) -> None:
    """Print a table of operations."""
    titles = (
        *("operation", "kind", "root", "run", "step", "format", "dtype", "caller"),
        *("created (UTC)", "seconds", "state"),
    )
    print_table(console, titles, map(_operation, operations))


def list_garbage(console: Console, garbage: Iterable[Garbage]) -> None:
    """Print a table of removable or removed garbage."""
    titles = ("kind", "name", "size", "why")
    rows = ((entry.kind.value, entry.name, Size(entry.nbytes), entry.reason) for entry in garbage)
    print_table(console, titles, rows)


def _run(run: Run) -> tuple[Cell, ...]:
    parent = None
    if run.lineage is not None:  # the name of a run in the same root, else its URI
        folder, _, name = run.lineage.run.rpartition("/")
        is_beside = folder == run.uri.rpartition("/")[0]
        parent = f"{name if is_beside else run.lineage.run}/steps/{run.lineage.step}"
    return (
        run.root,
        run.name,
        run.latest_step,
        run.checkpoint_count,
        Size(run.bytes),
        run.created,
        parent,
        *chain.from_iterable(map(_column, run.columns)),
    )


def _column(column: RunColumn) -> tuple[Cell, ...]:
    value = f"{column.value:.6g}" if isinstance(column.value, float) else column.value
    if column.unknown:
        value = "unknown"
    return (value, column.step) if column.field.startswith("best.") else (value,)


def _checkpoint(checkpoint: Checkpoint) -> tuple[Cell, ...]:
    return (
        checkpoint.step,
        checkpoint.attempt,
        checkpoint.state,
        None if checkpoint.bytes is None else Size(checkpoint.bytes),
        checkpoint.leaves,
        ", ".join(checkpoint.aliases),
        checkpoint.created,
        ", ".join(checkpoint.iterators),
        checkpoint.verified,
        ", ".join(f"{name}={value:.6g}" for name, value in sorted(checkpoint.metrics.items())),
    )


def _operation(operation: Operation) -> tuple[Cell, ...]:
    request, options = operation.request, operation.export_options
    return (
        operation.id,
        kind_name(operation),
        request.get("root"),
        request.get("run"),
        request.get("step"),
        options.get("format"),
        options.get("dtype"),
        operation.caller,
        operation.created,
        None if operation.seconds is None else round(operation.seconds),
        operation.state.value,
    )


def kind_name(operation: Operation) -> str:
    """Name the kind of an operation; a restore is a fork or a rollback."""
    mode = operation.request.get("mode") if operation.kind == "restore" else None
    return str(mode or operation.kind)


def subject(operation: Operation) -> str | None:
    """Return the run or step that an operation works on, as an argument of `cairn`.

    None if the operation is not about a run.
    """
    request = operation.request
    run = request.get("run")
    return f"{run}/steps/{request['step']}" if "step" in request else run
