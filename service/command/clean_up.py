"""Commands that delete: single steps, steps that a policy does not keep, and garbage."""

import socket
from typing import Annotated, Any, Final

import typer

from cairn.counts import count_text
from cairn.service.client.client import Client
from cairn.service.command import completion
from cairn.service.command.addresses import (
    check_run,
    check_step,
    is_in_store,
    resolve_run,
    resolve_step,
)
from cairn.service.command.options import (
    TIME,
    RootOption,
    RunArgument,
    UrlOption,
    WatchOption,
    console,
    errors,
    report,
)
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.listings import list_garbage
from cairn.service.command.output.tables import print_table
from cairn.service.glossary import state_label
from cairn.service.schemas import RetentionDecision, RetentionPlan
from cairn.service.sizes import Size, size_text

app: Final = typer.Typer()


def _best(text: str) -> dict[str, Any]:
    """Parse METRIC, METRIC:max, METRIC:COUNT or METRIC:max:COUNT into fields of `KeepBest`.

    The text is split from the right, since a metric's name may contain colons.

    Raises:
        BadParameter: The text has another form.
    """
    rest, mode, count = text, "min", 1
    head, _, tail = rest.rpartition(":")
    if head and tail.isascii() and tail.isdigit():
        rest, count = head, int(tail)
    head, _, tail = rest.rpartition(":")
    if head and tail in ("min", "max"):
        rest, mode = head, tail
    if not rest or rest.startswith(":") or count < 1:
        raise typer.BadParameter(
            f"expected METRIC[:min|max][:COUNT], such as eval/loss:min:3, found {text!r}"
        )
    return {"metric": rest, "mode": mode, "count": count}


StepArgument = Annotated[
    str,
    typer.Argument(
        metavar="STEP", help="RUN/steps/N; or URI.", autocompletion=completion.checkpoints
    ),
]
AttemptOption = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="The attempt that saved it.")
]
GraceOption = Annotated[
    float | None,
    typer.Option(help="To undelete, such as 12h; default: 7d.", **TIME),
]


@app.command()
def delete(
    step: StepArgument,
    attempt: AttemptOption = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Kept with the deletion.")] = "",
    grace: GraceOption = None,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a step; `undelete` restores it for a while.

    Refused if an alias names the step, or if it is the latest of a run that is being written. Name
    a superseded step with --attempt. `cairn gc` frees its bytes once the grace time is over.
    """
    check_step(step)
    with Client(url) as client:
        place = resolve_step(client, step, root)
        gone = client.delete(
            place.run,
            place.step,
            attempt=attempt,
            reason=reason,
            grace_seconds=grace,
            root=place.root,
        )
    if json:
        print_document(gone)
        return
    label = state_label(gone.state.value)
    print(f"{place.run}/steps/{place.step} (attempt {gone.attempt}) is {label}")
    if not gone.uri.endswith(f"/attempts/{gone.attempt}/{gone.step}"):
        errors.print(f"{gone.uri} stays: it was adopted, and is its owner's.", soft_wrap=True)
    if gone.deletion is not None:
        errors.print(
            f"`cairn undelete {place.run}/steps/{place.step}` takes it back, until "
            f"{gone.deletion.expires:%Y-%m-%d %H:%M} UTC at least.",
            soft_wrap=True,
        )


@app.command()
def undelete(
    step: StepArgument,
    attempt: AttemptOption = None,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Restore a deleted step."""
    check_step(step)
    with Client(url) as client:
        place = resolve_step(client, step, root)
        back = client.undelete(place.run, place.step, attempt=attempt, root=place.root)
    if json:
        print_document(back)
        return
    label = state_label(back.state.value)
    print(f"{place.run}/steps/{place.step} (attempt {back.attempt}) is {label}")


@app.command()
def prune(
    run: RunArgument,
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The last N steps.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Every multiple of N.")
    ] = None,
    keep_within: Annotated[
        float | None,
        typer.Option(help="Steps saved within it, such as 7d.", **TIME),
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC[:min|max][:N]", help="The best N by a metric."),
    ] = None,
    keep_label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="Steps with the label."),
    ] = None,
    grace: GraceOption = None,
    apply: Annotated[bool, typer.Option("--apply", help="Delete, not only list.")] = False,
    watch: WatchOption = False,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List the steps that a policy deletes; --apply deletes them.

    A step stays if any rule keeps it. The latest step and steps that aliases name always stay.
    The command is refused if you name a metric or a label that no step has.
    Without --apply nothing is deleted; with it, each step can be undeleted for a while.
    """
    policy = {
        "keep_last": keep_last,
        "keep_every": keep_every,
        "keep_within_seconds": keep_within,
        "keep_best": [_best(text) for text in keep_best or ()],
        "keep_labelled": keep_label or [],
    }
    if not any(policy.values()):
        raise typer.BadParameter("expected a rule at least, such as --keep-last 3, found none")
    check_run(run)
    with Client(url) as client:
        place = resolve_run(client, run, root)
        if apply:
            started = client.apply_retention(
                place.run, policy, grace_seconds=grace, root=place.root
            )
            report(client, started, watch, json)
            return
        plan = client.plan_retention(place.run, policy, root=place.root)
    if json:
        print_document(plan)
    else:
        _list_plan(plan)


@app.command()
def gc(
    run: RunArgument,
    delete: Annotated[bool, typer.Option("--delete", help="Remove it, not only list it.")] = False,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Find or remove garbage of a run.

    Garbage is: deleted steps whose grace time is over, incomplete steps whose writer is gone, and
    exports of steps that are gone. The command reads the store itself; the control plane is asked
    only where the run of a name is stored. A job may go on writing the run.
    """
    from cairn.storage.runs.gc import collect_garbage, find_garbage
    from cairn.storage.runs.run import Run

    check_run(run)
    if is_in_store(run):
        opened = Run.open(run)
    else:
        with Client(url) as client:
            place = resolve_run(client, run, root)
            opened = Run.open(client.run(place.run, root=place.root).uri)
    by = f"cairn gc on {socket.gethostname()}"
    listed = collect_garbage(opened, by=by) if delete else find_garbage(opened)
    nbytes = sum(garbage.nbytes for garbage in listed)
    if json:
        entries = [
            {
                "kind": entry.kind.value,
                "name": entry.name,
                "bytes": entry.nbytes,
                "reason": entry.reason,
                "step": entry.step,
                "attempt": entry.attempt,
            }
            for entry in listed
        ]
        summary = {"run": str(opened.uri), "dry_run": not delete, "count": len(listed)}
        print_document(summary | {"bytes": nbytes, "entries": entries})
        return
    list_garbage(console, listed)
    done = "removed" if delete else "could be removed with --delete"
    errors.print(f"{len(listed)} found, {nbytes:,} bytes; {done}.", soft_wrap=True)


def _list_plan(plan: RetentionPlan) -> None:
    titles = ("step", "attempt", "what", "size", "created (UTC)", "why")
    print_table(console, titles, map(_decision, plan.decisions))
    going = plan.delete_count
    staying = len(plan.decisions) - going
    text = f"Keeps {count_text(staying, 'step')}, would delete {going}"
    if going:
        text += f" ({size_text(plan.delete_bytes)}). Run again with --apply to delete them"
    errors.print(f"{text}.", soft_wrap=True)


def _decision(decision: RetentionDecision) -> tuple[Any, ...]:
    return (
        decision.step,
        decision.attempt,
        "keep" if decision.keep else "delete",
        Size(decision.bytes),
        decision.created,
        ", ".join(decision.reasons) or "no rule keeps it",
    )
