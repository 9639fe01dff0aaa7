"""Lineage of a run: its ancestors, forks and exports: `/ui/{root}/{run}/lineage`."""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from fastapi.responses import HTMLResponse

from cairn.counts import count_text
from cairn.service.access.permission import Reader
from cairn.service.actions import artifacts, lineage, runs
from cairn.service.actions.lineage import RunLineage
from cairn.service.dashboard import addresses, formats
from cairn.service.dashboard.charts.family import Family, Node, family
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.requests import RunRequestDependency
from cairn.service.routes.checkpoints import page_of_checkpoints
from cairn.service.schemas import AVAILABLE, Artifact, Checkpoint, CheckpointState, Run
from cairn.storage.errors import StorageError

_DRAWN: Final = 12
"""Largest number of nodes of each kind (forks, exports, rollbacks) that are drawn."""

_STEPS: Final = 100
_EXPORTS: Final = 50

router: Final = page_router(StorePage)


@router.get("/ui/{root}/{run}/lineage")
def lineage_page(caller: Reader, request: RunRequestDependency) -> HTMLResponse:
    """Show the forks, exports, rollbacks and imported steps of a run."""
    run = runs.get_run(request.plane, *request.names, refresh=False)
    ancestry = lineage.run_lineage(request.plane, caller.visible(request.plane.roots), run)
    aside = page_of_checkpoints(
        request.plane, *request.names, CheckpointState.SUPERSEDED, _STEPS, None
    )
    listed = page_of_checkpoints(request.plane, *request.names, AVAILABLE, _STEPS, None)
    adopted = [step for step in listed.checkpoints if not step.uri.startswith(f"{run.uri}/")]
    exports: list[Artifact] = []
    more, problem = False, None
    try:  # only artifacts are read from the store: if it fails, the rest of the page still shows
        exports, more = artifacts.list_run_artifacts(request.plane, *request.names, _EXPORTS)
    except StorageError as exc:
        problem = str(exc)
    return request.render(
        "run/lineage.html",
        run=run,
        lineage=ancestry,
        drawing=_drawing(run, ancestry, adopted, exports, aside.checkpoints),
        aside=aside.checkpoints,
        adopted=adopted,
        exports=[(artifact, formats.export_name(artifact)) for artifact in exports],
        more_exports=more,
        export_problem=problem,
    )


def _drawing(
    run: Run,
    ancestry: RunLineage,
    adopted: Sequence[Checkpoint],
    exports: Sequence[Artifact],
    aside: Sequence[Checkpoint],
) -> Family | None:
    before = _ancestor_nodes(run, ancestry, adopted)
    forks = [
        Node(fork.name, _from(fork), addresses.run(fork.root, fork.name)) for fork in ancestry.forks
    ]
    artifacts = [
        Node(
            formats.export_name(artifact),
            f"of step {artifact.step}",
            addresses.artifact(artifact.id),
            kind="export",
        )
        for artifact in exports
    ]
    after = [*_shorten(forks), *_shorten(artifacts), *_shorten(_superseded_nodes(aside))]
    if not before and not after:
        return None
    return family(before, Node(run.name, "this run", None, here=True), after)


def _ancestor_nodes(run: Run, ancestry: RunLineage, adopted: Sequence[Checkpoint]) -> list[Node]:
    """Return the nodes of the ancestors, the nearest first.

    If there are none, a node stands for the folders that steps were imported from.
    """
    children = [run, *ancestry.parents]
    before = [
        Node(parent.name, _from(child), addresses.run(parent.root, parent.name))
        for parent, child in zip(ancestry.parents, children, strict=False)
    ]
    if ancestry.unknown is not None:
        before.append(Node(ancestry.unknown.rsplit("/", 1)[-1], "not in any root", None))
    if adopted and not before:
        folders = sorted({checkpoint.uri.rpartition("/")[0] for checkpoint in adopted})
        name = folders[0].rpartition("/")[2] if len(folders) == 1 else f"{len(folders)} folders"
        before.append(
            Node(name, f"{count_text(len(adopted), 'step')} imported", None, kind="adopted")
        )
    return before


def _superseded_nodes(aside: Sequence[Checkpoint]) -> list[Node]:
    """Return a node for each attempt that has superseded steps."""
    by_attempt = sorted(aside, key=lambda checkpoint: (-checkpoint.attempt, checkpoint.step))
    nodes = []
    for attempt, group in groupby(by_attempt, key=lambda checkpoint: checkpoint.attempt):
        steps = [checkpoint.step for checkpoint in group]
        name = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        nodes.append(Node(name, f"superseded, attempt {attempt}", None, kind="aside"))
    return nodes


def _shorten(nodes: Sequence[Node]) -> list[Node]:
    if len(nodes) <= _DRAWN:
        return list(nodes)
    rest = len(nodes) - _DRAWN + 1
    return [*nodes[: _DRAWN - 1], Node(f"{rest} more", "listed below", None, kind=nodes[0].kind)]


def _from(child: Run) -> str:
    return "" if child.lineage is None else f"fork at step {child.lineage.step}"
