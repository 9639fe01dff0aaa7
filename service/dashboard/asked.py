"""Dependencies of pages and forms: the request, the control plane, and the subject of the page.

The subject is a run, a step or an operation.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Path, Request
from fastapi.responses import HTMLResponse

from cairn.service.actions import listing
from cairn.service.actions.looked_into import OpenStep
from cairn.service.actions.looking import tensors
from cairn.service.actions.plane import ControlPlane
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName, RunName, StepNumber
from cairn.service.routes import operations
from cairn.service.schemas import Checkpoint


@dataclass(frozen=True)
class Asked:
    """Request, and the control plane that answers it."""

    request: Request
    plane: ControlPlane

    def page(self, template: str, **values: Any) -> HTMLResponse:
        """Render a template as the answer."""
        return page(self.request, template, **values)


@dataclass(frozen=True)
class AskedOfRun(Asked):
    """Request for a page or form of a run."""

    root: str
    run: str

    @property
    def names(self) -> tuple[str, str]:
        """Names of the root and the run."""
        return self.root, self.run


@dataclass(frozen=True)
class AskedOfStep(Asked):
    """Request for a page or form of a step."""

    root: str
    run: str
    step: int

    @property
    def names(self) -> tuple[str, str, int]:
        """Names of the root and the run, and the step number."""
        return self.root, self.run, self.step

    @property
    def uri(self) -> str:
        """URI of the step, as `load_state` takes it."""
        return f"{self.plane.place(self.root, self.run)}/steps/{self.step}"

    def opened(self) -> OpenStep:
        """Open the step's manifest and index. Raises the errors of `actions.open_step`."""
        return tensors.open_step(self.plane, *self.names)

    def require_shown(self, attempt: int | None) -> None:
        """Raise if the listed step is of another attempt than the step that the page showed.

        Raises:
            StepChangedError: The step was saved again.
            StorageError: See `actions.open_step`.
        """
        if attempt is not None:
            run = self.plane.run(self.root, self.run)
            listing.refuse_other(run, run.step(self.step), attempt)

    def checkpoint(self) -> Checkpoint:
        """Get the step from the catalog. Raises the errors of `actions.get_checkpoint`."""
        return listing.get_checkpoint(self.plane, *self.names, refresh=False)


@dataclass(frozen=True)
class AskedOfOperation(Asked):
    """Request for a page or form of an operation."""

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
