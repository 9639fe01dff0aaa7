"""`cairn annotate`: sets labels and metrics of saved checkpoints, and labels of runs."""

from typing import Annotated, Final, cast, get_args

import typer

from cairn.service.client.client import Client
from cairn.service.command.addresses import (
    check_address,
    is_in_store,
    names_run,
    resolve_run,
    resolve_step,
)
from cairn.service.command.options import CheckpointArgument, RootOption, UrlOption
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.schemas import Better

app: Final = typer.Typer()


def labels_of(texts: list[str] | None) -> dict[str, str]:
    """Parse labels that are written as NAME=TEXT, into texts by name.

    Raises:
        BadParameter: A text has another form.
    """
    labels = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not name or not sign:
            raise typer.BadParameter(f"expected NAME=TEXT, found {text!r}")
        labels[name] = value
    return labels


def _metrics(texts: list[str] | None) -> dict[str, float]:
    metrics = {}
    for text in texts or ():
        name, _, value = text.rpartition("=")
        try:
            metrics[name] = float(value)
        except ValueError as exc:
            raise typer.BadParameter(f"expected NAME=NUMBER, found {text!r}") from exc
        if not name:
            raise typer.BadParameter(f"expected NAME=NUMBER, found {text!r}")
    return metrics


def _better(texts: list[str] | None) -> dict[str, Better]:
    directions = {}
    for text in texts or ():
        name, _, way = text.rpartition("=")
        if not name or way not in get_args(Better):
            raise typer.BadParameter(f"expected NAME=min or NAME=max, found {text!r}")
        directions[name] = cast(Better, way)
    return directions


@app.command()
def annotate(
    checkpoint: CheckpointArgument,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=TEXT", help="Set it; may be repeated.")
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(metavar="NAME=NUMBER", help="Set it; may be repeated.")
    ] = None,
    better: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=min|max", help="Which values of a metric are good."),
    ] = None,
    no_label: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Remove it; may be repeated.")
    ] = None,
    no_metric: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Remove it; may be repeated.")
    ] = None,
    of_run: Annotated[
        bool, typer.Option("--run", help="Labels of the run RUN itself, not of a step.")
    ] = False,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Set labels and metrics of a checkpoint, after its save.

    Labels and metrics that you do not name stay. For a store URI
    (gs://bucket/runs/my-run@production), or a path with ./ or / in front, the command changes the
    store itself, without a control plane and its audit trail.
    """
    labels = {**labels_of(label), **dict.fromkeys(no_label or ())}
    metrics = {**_metrics(metric), **dict.fromkeys(no_metric or ())}
    ways = _better(better)
    if not (labels or metrics or ways):
        raise typer.BadParameter("expected something to note, such as --label eval=passed")
    if of_run and (metrics or ways):
        raise typer.BadParameter("a run has labels only: leave --run out for metrics of a step")
    if is_in_store(checkpoint):
        noted = _in_store(checkpoint, labels, metrics, ways, of_run)
    else:
        check_address(checkpoint)
        if of_run and not names_run(checkpoint):
            raise typer.BadParameter(f"--run takes a RUN alone, found {checkpoint!r}")
        with Client(url) as client:
            if of_run:
                run = resolve_run(client, checkpoint, root)
                body = client.annotate_run(run.run, labels, root=run.root).model_dump(mode="json")
            else:
                place = resolve_step(client, checkpoint, root)
                body = client.annotate(
                    place.run,
                    place.step,
                    labels=labels,
                    metrics=metrics,
                    better=ways,
                    root=place.root,
                ).model_dump(mode="json")
        noted = {name: body[name] for name in ("labels", "metrics", "better") if name in body}
    if json:
        print_document(noted)
        return
    for name, text in sorted(noted["labels"].items()):
        print(f"label {name}={text}")
    for name, value in sorted(noted.get("metrics", {}).items()):
        way = noted["better"].get(name)
        print(f"metric {name}={value}" + (f" ({way} is better)" if way else ""))


def _in_store(
    checkpoint: str,
    labels: dict[str, str | None],
    metrics: dict[str, float | None],
    better: dict[str, Better],
    of_run: bool,
) -> dict[str, dict[str, object]]:
    from cairn.storage.runs.annotate import annotate as annotate_checkpoint
    from cairn.storage.runs.annotate import annotate_run
    from cairn.storage.runs.run import Run

    if of_run:
        if not names_run(checkpoint):
            raise typer.BadParameter(f"--run takes a RUN alone, found {checkpoint!r}")
        return {"labels": dict(annotate_run(Run.open(checkpoint), labels).labels)}
    noted = annotate_checkpoint(checkpoint, labels=labels, metrics=metrics, better=better)
    return noted.entries()
