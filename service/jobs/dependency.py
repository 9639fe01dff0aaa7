"""The job engine, and the step that a job is asked for, as dependencies of routes."""

from typing import Annotated, cast

from fastapi import Depends, Request, Response

from cairn.service.dependencies import RunDependency, StepNumber
from cairn.service.errors import NotReadyError
from cairn.service.jobs.dbos_engine import Jobs
from cairn.service.jobs.watching import Watches
from cairn.service.schemas import Operation
from cairn.storage.runs import StepInfo


def get_jobs(request: Request) -> Jobs:
    """The jobs of this application.

    Raises:
        NotReadyError: It was not launched.
    """
    jobs = cast(Jobs | None, request.app.state.jobs)
    if jobs is None:
        raise NotReadyError("the job engine of this server was not launched")
    return jobs


def get_watches(request: Request) -> Watches:
    """Whoever watches jobs of this application.

    Raises:
        NotReadyError: It has no jobs.
    """
    get_jobs(request)
    return cast(Watches, request.app.state.watches)


def get_step(run: RunDependency, step: StepNumber) -> StepInfo:
    """The listed step that the path names."""
    return run.step(step)


JobsDependency = Annotated[Jobs, Depends(get_jobs)]
WatchesDependency = Annotated[Watches, Depends(get_watches)]
StepDependency = Annotated[StepInfo, Depends(get_step)]


def accepted(operation: Operation, response: Response) -> Operation:
    """The body of a 202 answer, with the operation's address in its `Location`."""
    response.headers["Location"] = f"/v1/operations/{operation.id}"
    return operation
