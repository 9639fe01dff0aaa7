"""The pages: runs at `/`, a run's checkpoints at `/ui/{root}/{run}`, as the API lists them."""

from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from fastapi.templating import Jinja2Templates
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cairn.service import actions
from cairn.service.access import Reader
from cairn.service.dependencies import PageToken, PlaneDependency, RootName, RunName
from cairn.service.routes import page_of_checkpoints, page_of_runs
from cairn.service.schemas import CheckpointState
from cairn.service.sizes import size_text

FOLDER: Final = Path(__file__).parent
ROWS: Final = 100
# Nothing on a page comes from elsewhere, no inline script runs, and no other site frames it.
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; "
    "form-action 'self'; base-uri 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

router: Final = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
static_files: Final = StaticFiles(directory=FOLDER / "static")

_environment = Environment(
    loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined
)
_environment.filters["size"] = size_text
_templates = Jinja2Templates(env=_environment)


@router.get("/")
def runs_page(
    request: Request,
    caller: Reader,
    plane: PlaneDependency,
    page_token: PageToken = None,
) -> HTMLResponse:
    """Runs of every root."""
    roots = caller.visible(plane.roots)
    found = page_of_runs(plane, roots, ROWS, page_token)
    return page(
        request,
        "runs.html",
        runs=found.runs,
        next_page_token=found.next_page_token,
        roots={name: str(uri) for name, uri in roots.items()},
    )


@router.get("/ui/{root}/{run}")
def run_page(
    request: Request,
    caller: Reader,
    root: RootName,
    run: RunName,
    plane: PlaneDependency,
    page_token: PageToken = None,
) -> HTMLResponse:
    """Checkpoints of one run, each with a button that exports it to PyTorch."""
    found = page_of_checkpoints(plane, root, run, CheckpointState.LISTED, ROWS, page_token)
    return page(
        request,
        "run.html",
        run=actions.get_run(plane, root, run, refresh=False),
        checkpoints=found.checkpoints,
        next_page_token=found.next_page_token,
    )


def page(request: Request, template: str, **values: Any) -> HTMLResponse:
    """A page, with what all of them have: who is signed in, and what their changes say."""
    state = request.state
    shared = {"caller": getattr(state, "caller", None), "csrf": getattr(state, "csrf", None)}
    return _templates.TemplateResponse(request, template, shared | values, headers=HEADERS)
