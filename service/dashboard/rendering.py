"""Rendering of templates, with the values and headers that all pages share."""

from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from fastapi.staticfiles import StaticFiles
from fastapi.templating import Jinja2Templates
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cairn.counts import count_text
from cairn.service.access.callers import Scope
from cairn.service.dashboard import addresses, formats
from cairn.service.dashboard.charts import marks, timeline
from cairn.service.export_options import options_text
from cairn.service.glossary import state_label
from cairn.service.sizes import size_text
from cairn.storage.store.clock import utc_now

FOLDER: Final = Path(__file__).parent
# Pages load nothing from other origins, run no inline scripts, and can't be framed by other sites.
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; "
    "form-action 'self'; base-uri 'none'; object-src 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class _OwnFiles(StaticFiles):
    """Static files that browsers revalidate before each use.

    Without `Cache-Control`, browsers cache a file for about a tenth of its age. After an upgrade,
    they would then run old scripts on new pages.
    """

    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return the answer with the file, or a 304, with `Cache-Control: no-cache`."""
        response = super().file_response(*args, **options)
        response.headers["Cache-Control"] = "no-cache"
        return response


static_files: Final = _OwnFiles(directory=FOLDER / "static")

_environment = Environment(
    loader=FileSystemLoader(FOLDER / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters.update(
    size=size_text,
    ago=formats.ago,
    apart=formats.apart,
    brief=formats.brief,
    count=formats.count,
    count_text=count_text,
    entry=formats.entry,
    export_name=formats.export_name,
    figure=formats.figure,
    is_known_operation=formats.is_known_operation,
    keys=formats.keys,
    moment=formats.moment,
    operation_name=formats.operation_name,
    operation_title=formats.operation_title,
    percent=formats.percent,
    quoted=formats.quoted,
    options_text=options_text,
    pretty=formats.pretty,
    shape=formats.shape,
    spec=formats.spec,
    words=state_label,
)
_environment.globals.update(at=addresses, kind_of=timeline.kind_of, sparkline=marks.sparkline)
_templates = Jinja2Templates(env=_environment)


def page(
    request: Request, template: str, *, status: int = HTTPStatus.OK, **values: Any
) -> HTMLResponse:
    """Render a page, or a part of one, with the values that all templates need.

    Those are the caller, their permissions, and the CSRF token that forms send.
    """
    state = request.state
    caller = getattr(state, "caller", None)
    shared = {
        "caller": caller,
        "csrf": getattr(state, "csrf", None),
        "may_operate": caller is not None and caller.scope.includes(Scope.OPERATE),
        "may_administer": caller is not None and caller.scope.includes(Scope.ADMIN),
        "everywhere": caller is not None and caller.roots is None,
        "path": request.url.path,
        "query": request.query_params,
        "now": utc_now().isoformat(),
    }
    return _templates.TemplateResponse(
        request, template, shared | values, status_code=status, headers=HEADERS
    )
