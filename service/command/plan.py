"""`cairn plan`: memory and reads that a checkpoint needs on a mesh of devices."""

import json as json_module
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import ValidationError

from cairn.counts import count_text
from cairn.service.client.client import Client
from cairn.service.command.addresses import is_in_store
from cairn.service.command.failures import ExitStatus
from cairn.service.command.options import CheckpointArgument, RootOption, UrlOption, console
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.command.served_steps import ServedStep
from cairn.service.command.tensors import shape_text, spec_text
from cairn.service.schemas import PlannedLeaf, PlanRequest, StepPlan
from cairn.service.sizes import Size

app: Final = typer.Typer()

_SIZE: Final = re.compile(r"[0-9]{1,18}")


@app.command()
def plan(
    checkpoint: CheckpointArgument,
    mesh: Annotated[
        str,
        typer.Option(metavar="AXES", help="Devices along each axis: fsdp=64,tp=4."),
    ],
    processes: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many processes share the devices.")
    ] = 1,
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help='JSON: [["kernel", ["fsdp", "tp"]], [".*", []]]; default: by axis names.',
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="Cast floating parameters: bfloat16, ….")
    ] = None,
    item: Annotated[
        list[str] | None,
        typer.Option("--item", metavar="NAME", help="Load only this one; may be repeated."),
    ] = None,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a checkpoint needs on a mesh of devices.

    It shows the placement of the leaves, dimensions that do not divide, bytes per device, memory
    and reads of each process, and the Python code that loads it so. If the checkpoint does not fit,
    the exit status is 1.
    """
    request = _request(mesh, processes, rules, dtype, item)
    if is_in_store(checkpoint):
        from cairn.service.command.stored_steps import StoredStep  # imports TensorStore

        planned = StoredStep(checkpoint).plan(request)
    else:
        with Client(url) as client:
            planned = ServedStep(client, checkpoint, root).plan(request)
    if json:
        print_document(planned)
    else:
        _print_plan(planned)
    if not planned.fits:
        raise typer.Exit(ExitStatus.FAILED)


def _request(
    mesh: str, processes: int, rules: Path | None, dtype: str | None, items: list[str] | None
) -> PlanRequest:
    body: dict[str, Any] = {
        "mesh": {"axes": _axes(mesh), "processes": processes},
        "dtype": dtype,
        "items": items or None,
    }
    if rules is not None:
        try:
            body["rules"] = json_module.loads(rules.read_bytes())
        except (ValueError, RecursionError) as exc:
            raise typer.BadParameter(f"--rules: expected JSON in {rules}: {exc}") from exc
    try:
        return PlanRequest.model_validate(body)
    except ValidationError as exc:
        problems = [
            f"{'.'.join(map(str, error['loc'])).removeprefix('mesh.axes.')}: {error['msg']}"
            for error in exc.errors()
        ]
        raise typer.BadParameter("; ".join(problems)) from exc


def _axes(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (text_part.strip() for text_part in part.partition("="))
        if _SIZE.fullmatch(size) is None or name in axes:
            raise typer.BadParameter(
                f"--mesh: expected sizes of axes, each once, such as fsdp=64,tp=4; found {part!r}"
            )
        axes[name] = int(size)
    return axes


def _print_plan(plan: StepPlan) -> None:
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh.items())
    shared = f" of {plan.processes} processes" if plan.processes > 1 else ""
    print(f"mesh: {mesh} ({count_text(plan.devices, 'device')}{shared})")
    uneven = (
        count_text(plan.misfits, "leaf does not divide evenly", "leaves do not divide evenly")
        if plan.misfits
        else "does not fit"
    )
    print(f"sharding: {'divides evenly' if plan.fits else uneven}")
    for problem in plan.problems:
        print(f"problem: {problem}")
    device = plan.bytes_per_device
    parts = {"model": device.model, "optimizer": device.optimizer, "other": device.other}
    sizes = ", ".join(f"{name} {Size(size)}" for name, size in parts.items() if size)
    print(f"each device: {Size(device.total)} of {Size(plan.bytes)} ({sizes or 'nothing'})")
    print(f"each process: {Size(plan.host_bytes)} of memory, reads {Size(plan.read_bytes)}")
    print(f"read in all: {Size(plan.read_bytes_in_all)}")
    for note in plan.notes:
        print(f"note: {note}")
    for rule in plan.idle_rules:
        print(f"rule {rule!r} takes no leaf")
    misfits: dict[str, list[str]] = defaultdict(list)
    unmatched: dict[str, list[str]] = defaultdict(list)
    for leaf in plan.leaves:
        for misfit in leaf.misfits:
            misfits[misfit.detail].append(f"{leaf.item}/{leaf.path}")
        if leaf.unmatched is not None:
            unmatched[leaf.unmatched].append(f"{leaf.item}/{leaf.path}")
    for text, paths in misfits.items():
        print(f"does not fit: {_some(paths)}: {text}")
    for text, paths in unmatched.items():
        print(f"whole: {_some(paths)}: {text}")
    titles = ("item", "leaf", "how many", "shape", "dtype", "spec", "per device", "rule")
    alike = Counter(map(_kind, plan.leaves))
    rows = (
        (item, path, count, shape, dtype, spec, Size(nbytes), rule)
        for (item, path, shape, dtype, spec, nbytes, rule), count in alike.items()
    )
    print_table(console, titles, rows)
    if plan.load is not None:
        print(f"\n{plan.load}", end="")


def _some(paths: list[str]) -> str:
    return f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else paths[0]


def _kind(leaf: PlannedLeaf) -> tuple[str, str, str, str, str, int, str]:
    """Return a key that is equal for leaves that differ only in the numbers of their paths."""
    path = "/".join("*" if part.isdigit() else part for part in leaf.path.split("/"))
    shape, spec = shape_text(leaf.shape), spec_text(leaf.spec)
    return leaf.item, path, shape, leaf.dtype, spec, leaf.bytes_per_device, leaf.rule
