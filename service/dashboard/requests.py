"""Dependencies of pages and forms: the request, the control plane, and the subject of the page.

The subject is a run, a step or an operation.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Path, Request
from fastapi.responses import HTMLResponse

from cairn.service.actions import checkpoints, tensors
from cairn.service.actions.caches import OpenStep
from cairn.service.actions.plane import ControlPlane
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName, RunName, StepNumber
from cairn.service.schemas import OPERATION_PATTERN, Checkpoint


@dataclass(frozen=True)
class PageRequest:
    """Request, and the control plane that answers it."""

    http: Request
    plane: ControlPlane

    def render(self, template: str, **values: Any) -> HTMLResponse:
        """Render a template as the answer."""
        return page(self.http, template, **values)


@dataclass(frozen=True)
class RunRequest(PageRequest):
    """Request for a page or form of a run."""

    root: str
    run: str

    @property
    def names(self) -> tuple[str, str]:
        """Names of the root and the run."""
        return self.root, self.run


@dataclass(frozen=True)
class StepRequest(PageRequest):
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

    def open_step(self) -> OpenStep:
        """Open the step's manifest and index.

        Raises:
            StorageError, ServiceError: See `actions.tensors.open_step`.
        """
        return tensors.open_step(self.plane, *self.names)

    def require_shown(self, attempt: int | None) -> None:
        """Raise unless the listed step is the one that the page showed.

        Args:
            attempt: Attempt of the step that the page showed; None: any attempt is accepted.

        Raises:
            StepChangedError: The step was saved again by another attempt.
            StorageError: See `open_step`.
        """
        if attempt is not None:
            run = self.plane.run(self.root, self.run)
            checkpoints.require_attempt(run, run.step(self.step), attempt)

    def checkpoint(self) -> Checkpoint:
        """Return the step from the catalog.

        Raises:
            StorageError, ServiceError: See `actions.checkpoints.get_checkpoint`.
        """
        return checkpoints.get_checkpoint(self.plane, *self.names, refresh=False)


@dataclass(frozen=True)
class OperationRequest(PageRequest):
    """Request for a page or form of an operation."""

    operation: str


async def _of_run(
    request: Request, plane: PlaneDependency, root: RootName, run: RunName
) -> RunRequest:
    return RunRequest(request, plane, root, run)


async def _of_step(
    request: Request, plane: PlaneDependency, root: RootName, run: RunName, step: StepNumber
) -> StepRequest:
    return StepRequest(request, plane, root, run, step)


async def _of_operation(
    request: Request,
    plane: PlaneDependency,
    operation: Annotated[str, Path(pattern=OPERATION_PATTERN)],
) -> OperationRequest:
    return OperationRequest(request, plane, operation)


RunRequestDependency = Annotated[RunRequest, Depends(_of_run)]
StepRequestDependency = Annotated[StepRequest, Depends(_of_step)]
OperationRequestDependency = Annotated[OperationRequest, Depends(_of_operation)]
