"""The run that a job is about, opened when the job runs: its root may be gone by then."""

from collections.abc import Mapping

from cairn.service.jobs.context import Request
from cairn.storage.errors import RunNotFoundError
from cairn.storage.runs import Run
from cairn.storage.store import StoreURI, confine


def open_run(roots: Mapping[str, StoreURI], request: Request) -> Run:
    """The run that a request names by its root and name.

    Raises:
        RunNotFoundError: The run is gone, or its root is configured no more.
    """
    if request["root"] not in roots:
        raise RunNotFoundError(
            "the root is gone",
            path=request["root"],
            expected=f"one of {', '.join(roots)}",
            found="a job of a root that is configured no more",
            next_step="Configure the root again (CAIRN_ROOTS), then resume the operation.",
        )
    return Run.open(confine(roots[request["root"]], request["run"]))
