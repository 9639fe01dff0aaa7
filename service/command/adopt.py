"""`cairn adopt`: imports checkpoints of plain Orbax as a run, without copying them."""

from collections.abc import Iterator
from dataclasses import asdict
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cairn.service.command.failures import ExitStatus
from cairn.service.command.options import console, errors
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.glossary import trainer_label

if TYPE_CHECKING:
    from cairn.storage.orbax_import.adopt import Adoption  # imports TensorStore

app: Final = typer.Typer()


def _json(path: Path) -> dict[str, Any]:
    try:
        document = loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise typer.BadParameter(f"{path}: {exc}") from exc
    if not isinstance(document, dict):
        raise typer.BadParameter(f"{path}: expected a JSON object, found {type(document).__name__}")
    return document


@app.command()
def adopt(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder or URI that Orbax was given.")
    ],
    run: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Folder of the run; default: FOLDER.cairn, beside it."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="The folder is one checkpoint, and this its step."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="config.json of the model that the steps hold."),
    ] = None,
    paths: Annotated[
        Path | None,
        typer.Option("--map", metavar="FILE", help="JSON: regular expressions of paths -> ours."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Import checkpoints of plain Orbax as a run.

    The files stay where they are. The command reads each checkpoint once, and never changes
    anything in FOLDER. A later call adds new checkpoints, and names those that were removed or
    changed. It needs no running control plane. The exit status is 1 if a checkpoint is not listed,
    or has changed since it was adopted. With --config and --map each step has an item "model" that
    `cairn convert` exports.
    """
    if (config is None) != (paths is None):
        raise typer.BadParameter("--config and --map go together")
    from cairn.storage.orbax_import.adopt import adopt as adopt_folder  # imports TensorStore

    model = None
    if config is not None and paths is not None:
        from cairn.interop.weights.model_map import model_map

        model = model_map(_json(config), _json(paths))
    adoption = adopt_folder(folder, run, step=step, model=model)
    if json:
        print_document({**asdict(adoption), "run": str(adoption.run)})
    else:
        _list_adoption(adoption, folder)
    if not adoption.ok:
        raise typer.Exit(ExitStatus.FAILED)


def _list_adoption(adoption: "Adoption", folder: str) -> None:
    states = dict.fromkeys(adoption.adopted, "adopted")
    states |= dict.fromkeys(adoption.kept, "as it was")
    states |= dict.fromkeys(adoption.gone, "removed by its owner")
    print_table(console, ("step", "found"), sorted(states.items()))
    for line in (*adoption.left, *adoption.problems):
        errors.print(line, soft_wrap=True, markup=False)
    if not states:
        errors.print("No step is listed.")
        return
    for line in _next_steps(adoption, folder):
        errors.print(line, soft_wrap=True, markup=False)


def _next_steps(adoption: "Adoption", folder: str) -> Iterator[str]:
    # These import TensorStore.
    from cairn.interop.weights.export import trainer_of
    from cairn.service.jobs.kinds.trainer_settings import settings_beside
    from cairn.storage.runs.run import Run
    from cairn.storage.store.disk.confinement import is_within
    from cairn.storage.store.uri import parse_uri

    yield f"The run is {adoption.run}"
    yield f"Its steps: cairn checkpoints {str(adoption.run).removeprefix('file://')}"
    steps = (*adoption.adopted, *adoption.kept)
    if not steps:
        return
    run = Run.open(adoption.run)
    manifest = run.manifest(run.step(max(steps)))
    trainer, opened = trainer_of(manifest), parse_uri(folder)
    address, config = f"{run.uri.name}/steps/{max(steps)}", " --config FILE"
    if trainer is not None:
        settings, place = settings_beside(run, manifest)
        if settings is not None:
            config, beside = "", parse_uri(place).parent
            opened = opened if is_within(beside, [opened]) else beside
    if not is_within(opened, [adoption.run.parent]):
        shown = folder if opened == parse_uri(folder) else str(opened).removeprefix("file://")
        yield (
            f"A server of {adoption.run.parent} opens its files with: cairn serve --adopt-from "
            f"{shown}"
        )
    if trainer is not None:
        yield (
            f"{trainer_label(trainer)} stored them. A server exports them: cairn convert "
            f"{address}{config}"
        )
