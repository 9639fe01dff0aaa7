"""`cairn verify` and `cairn repair`: find damage, and rebuild a run's records."""

from typing import Annotated, Any, Final, Literal

import typer

from cairn.service.client.client import Client
from cairn.service.client.lookup import find_step
from cairn.service.command.addresses import check_address, names_run, resolve_address, resolve_run
from cairn.service.command.failures import ExitStatus
from cairn.service.command.options import (
    CheckpointArgument,
    RootOption,
    RunArgument,
    UrlOption,
    console,
    errors,
)
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.command.watch import Show, on_console, silently, watch_operation
from cairn.service.errors import OperationFailedError
from cairn.service.schemas import CheckpointState, Operation
from cairn.service.sizes import Size

app: Final = typer.Typer()


@app.command()
def verify(
    checkpoint: CheckpointArgument,
    all_steps: Annotated[
        bool, typer.Option("--all", help="Every listed step of the run RUN.")
    ] = False,
    records: Annotated[
        bool, typer.Option("--records", help="Only the records of the run RUN.")
    ] = False,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Read every byte of a checkpoint and find what is damaged.

    For a RUN alone, it reads the run's records and the latest checkpoint. The exit status is 7 if
    anything is not as it was saved; standard error names each record, file and leaf.
    """
    check_address(checkpoint)
    alone = names_run(checkpoint)
    if (all_steps or records) and not alone:
        option = "--all" if all_steps else "--records"
        raise typer.BadParameter(f"{option} takes a RUN alone, found {checkpoint!r}")
    if all_steps and records:
        raise typer.BadParameter("--all or --records, not both")
    steps: Literal["all", "latest", "none"] = "none" if records else "latest"
    steps = "all" if all_steps else steps
    with Client(url) as client:
        address, place = resolve_address(client, checkpoint, root)
        if alone:
            started = client.verify_run(address.run, steps=steps, root=place)
        else:
            started = client.verify(*find_step(client, address, place), root=place)
        verification = _finish(client, started, silently if json else on_console(errors))
        damaged = any(not report["sound"] for report in verification["steps"])
        good = _newest_sound(client, address.run, place) if damaged and not json else None
    sound = [report["sound"] for report in verification["steps"]]
    if "records" in verification:
        sound.append(verification["records"]["sound"])
    if json:
        print_document(
            {name: verification[name] for name in ("steps", "records") if name in verification}
        )
    else:
        _list_verification(address.run, verification)
        _advise(address.run, verification["steps"], good)
    if not all(sound):
        raise typer.Exit(ExitStatus.DAMAGED)


def _list_verification(run: str, verification: dict[str, Any]) -> None:
    rows = [_row(report) for report in verification["steps"]]
    if "records" in verification:
        records = verification["records"]
        state, count = "ok" if records["sound"] else "damaged", records["problem_count"]
        rows.insert(0, ("records", None, state, count, records["count"], None, None, None))
        for problem in records["problems"]:
            errors.print(f"{run}: {problem}", soft_wrap=True, markup=False)
        for folder in records["unlisted"]:
            text = f"{run}: {folder}: a checkpoint that no manifest names"
            errors.print(text, soft_wrap=True, markup=False)
    titles = ("step", "attempt", "found", "problems", "files", "size", "leaves", "seconds")
    print_table(console, titles, rows)
    for report in verification["steps"]:
        for problem in report["problems"]:
            errors.print(f"{run}/steps/{report['step']}: {problem}", soft_wrap=True)
        if not report["sound"] and report.get("loads"):  # absent from older control planes
            text = "Cairn loads every value of it all the same, as it was saved"
            errors.print(f"{run}/steps/{report['step']}: {text}", soft_wrap=True)


def _newest_sound(client: Client, run: str, root: str) -> int | None:
    """Return the highest listed step that is not damaged; None if there is none."""
    sound = CheckpointState.LISTED
    listed = client.checkpoints(run, root=root, state=sound, page_size=1, refresh=True)
    first = next(listed, None)
    return None if first is None else first.step


def _advise(run: str, reports: list[dict[str, Any]], good: int | None) -> None:
    """Print which requests are refused for damaged steps from now on, and how to recover."""
    for report in reports:
        step = f"{run}/steps/{report['step']}"
        if report["sound"]:
            if not report.get("noted", True):
                text = "is as it was saved, and that could not be noted: verify it again"
                errors.print(f"{step} {text}", soft_wrap=True)
            continue
        if report.get("noted"):
            text = "is damaged: it can't be promoted, and is forked or exported only with a reason"
        else:
            text = "is damaged, and that could not be noted: verify it again"
        errors.print(f"{step} {text}", soft_wrap=True)
        for other in report.get("shared_with", ()):
            text = f"is damaged too: it shares files with step {report['step']}"
            errors.print(f"{run}/steps/{other} {text}", soft_wrap=True)
        errors.print(
            f"{step}: restore its files from a backup, then `cairn verify {step}` lifts it",
            soft_wrap=True,
        )
    if good is not None:
        errors.print(f"The newest sound step is {run}/steps/{good}", soft_wrap=True)


@app.command()
def repair(
    run: RunArgument,
    apply: Annotated[
        bool, typer.Option("--apply", help="Do it; without this, only say what would be done.")
    ] = False,
    forget: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A record to go on without; can be repeated."),
    ] = None,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Rebuild damaged or lost records of a run.

    Records are rebuilt from the run's other records. The exit status is 7 if a record can't be
    rebuilt. Replaced records are kept below `damaged/`.
    """
    with Client(url) as client:
        place = resolve_run(client, run, root)
        report = client.repair(place.run, dry_run=not apply, forget=forget or (), root=place.root)
    if json:
        print_document(report)
    else:
        rows = [
            (action.name, "mended" if action.done else "can be" if action.action else "can't be")
            for action in report.repairs
        ]
        print_table(console, ("record", "mended"), rows)
        for action in report.repairs:
            text = f"{action.name}: {action.action or action.hint}"
            errors.print(text, soft_wrap=True, markup=False)
    if any(action.action is None for action in report.repairs):
        raise typer.Exit(ExitStatus.DAMAGED)


def _finish(client: Client, started: Operation, show: Show) -> dict[str, Any]:
    """Follow a verification to its end; return its report, with or without damage.

    Raises:
        OperationFailedError: The operation failed for another reason than damage.
    """
    try:
        last = watch_operation(client, started, show)
    except OperationFailedError:
        last = client.operation(started.id)
        if last.error is None or not last.has_found_damage:
            raise
        return dict(last.error.model_extra or {})
    return dict(last.result or {})


def _row(report: dict[str, Any]) -> tuple[Any, ...]:
    return (
        report["step"],
        report["attempt"],
        "ok" if report["sound"] else "damaged",
        report["problem_count"],
        report["files"],
        Size(report["bytes"]),
        report["leaves"],
        str(report["seconds"]),
    )
