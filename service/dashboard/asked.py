"""What pages and forms are asked of: a run, a step of one or an operation, and where that is."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Path, Request
from fastapi.responses import HTMLResponse

from cairn.service import actions
from cairn.service.actions import ControlPlane, OpenStep
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName, RunName, StepNumber
from cairn.service.routes import operations
from cairn.service.schemas import Checkpoint


@dataclass(frozen=True)
class Asked:
    """A request, and the control plane that answers it."""

    request: Request
    plane: ControlPlane

    def page(self, template: str, **values: Any) -> HTMLResponse:
        """The answer, of a template."""
        return page(self.request, template, **values)


@dataclass(frozen=True)
class AskedOfRun(Asked):
    """Of a run."""

    root: str
    run: str

    @property
    def names(self) -> tuple[str, str]:
        """Its root's, and its own."""
        return self.root, self.run


@dataclass(frozen=True)
class AskedOfStep(Asked):
    """Of a step."""

    root: str
    run: str
    step: int

    @property
    def names(self) -> tuple[str, str, int]:
        """Its root's, its run's, and its number."""
        return self.root, self.run, self.step

    @property
    def uri(self) -> str:
        """As `load_state` takes it."""
        return f"{self.plane.place(self.root, self.run)}/steps/{self.step}"

    def opened(self) -> OpenStep:
        """Its manifest and index; errors as `actions.open_step`."""
        return actions.open_step(self.plane, *self.names)

    def require_shown(self, attempt: int | None) -> None:
        """Raise if the listed step is not that of the attempt that a page showed.

        Raises:
            StepChangedError: It was saved anew.
            StorageError: As `actions.open_step`.
        """
        if attempt is not None:
            run = self.plane.run(self.root, self.run)
            actions.refuse_other(run, run.step(self.step), attempt)

    def checkpoint(self) -> Checkpoint:
        """What the catalog knows of it; errors as `actions.get_checkpoint`."""
        return actions.get_checkpoint(self.plane, *self.names, refresh=False)


@dataclass(frozen=True)
class AskedOfOperation(Asked):
    """Of an operation."""

    operation: str


async def _of_run(
    request: Request, plane: PlaneDependency, root: RootName, run: RunName
) -> AskedOfRun:
    return AskedOfRun(request, plane, root, run)


async def _of_step(
    request: Request, plane: PlaneDependency, root: RootName, run: RunName, step: StepNumber
) -> AskedOfStep:
    return AskedOfStep(request, plane, root, run, step)


async def _of_operation(
    request: Request,
    plane: PlaneDependency,
    operation: Annotated[str, Path(pattern=operations.OPERATION_PATTERN)],
) -> AskedOfOperation:
    return AskedOfOperation(request, plane, operation)


OfRun = Annotated[AskedOfRun, Depends(_of_run)]
OfStep = Annotated[AskedOfStep, Depends(_of_step)]
OfOperation = Annotated[AskedOfOperation, Depends(_of_operation)]
