"""Sign-in with a key, and sign-out: `/sign-in`, `/sign-out`."""

from http import HTTPStatus
from typing import Annotated, Final, cast
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from cairn.service.access.authenticator import Authenticator
from cairn.service.access.cookies import cookie_of, delete_cookie, set_cookie
from cairn.service.access.guard import SIGN_IN
from cairn.service.access.origins import is_local, peer_name, require_own_page
from cairn.service.dashboard.rendering import page
from cairn.service.errors import ProblemError, TooManyRequestsError, UnauthenticatedError
from cairn.service.settings import Settings

router: Final = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

Next = Annotated[str, Query(alias="next", max_length=4096)]


@router.get(SIGN_IN)
def sign_in_page(request: Request, target: Next = "/") -> Response:
    """Show the form that asks for a key; without keys, redirect to `target` at once."""
    if not _has_keys(request):
        return RedirectResponse(own_path(target), HTTPStatus.SEE_OTHER)
    return _form(request, target)


@router.post(SIGN_IN)
async def sign_in(request: Request) -> Response:
    """Begin a session, and redirect to the page that the browser requested before the sign-in."""
    if not _has_keys(request):
        return RedirectResponse("/", HTTPStatus.SEE_OTHER)
    # A CSRF token exists only after the sign-in. This check keeps other sites from signing a
    # browser in (login CSRF).
    require_own_page(request.scope)
    body = (await request.body()).decode("utf-8", "replace")
    try:
        form = parse_qs(body, max_num_fields=8)
    except ValueError:  # more fields than the form has
        form = {}
    key, target = form.get("key", [""])[0].strip(), form.get("next", ["/"])[0]
    if not is_local(request.scope) and request.headers["origin"].lower().startswith("http:"):
        return _form(
            request, target, "Signing in needs https: open this page at its https address."
        )
    authenticator = cast(Authenticator, request.app.state.authenticator)
    try:
        secret = await authenticator.sign_in(key, peer_name(request.scope))
    except UnauthenticatedError as exc:
        return _form(request, target, "Invalid or expired key.", exc)
    except TooManyRequestsError as exc:
        return _form(request, target, "Too many attempts.", exc)
    answer = RedirectResponse(own_path(target), HTTPStatus.SEE_OTHER)
    set_cookie(answer, request.scope, secret)
    return answer


@router.post("/sign-out", status_code=204)
async def sign_out(request: Request) -> Response:
    """End the session of this browser."""
    answer = Response(status_code=HTTPStatus.NO_CONTENT)
    secret = cookie_of(request.scope)
    if _has_keys(request) and secret is not None:
        await cast(Authenticator, request.app.state.authenticator).sign_out(secret)
        delete_cookie(answer, request.scope)
    return answer


def own_path(target: str) -> str:
    """Return `target` if it is a path on this server, else `/`: this prevents open redirects."""
    try:
        split = urlsplit(target)
    except ValueError:
        return "/"
    # Browsers read a backslash as a slash, and drop tabs and newlines: `/\evil` means `//evil`.
    plain = target.isascii() and target.isprintable() and " " not in target and "\\" not in target
    is_path = target.startswith("/") and not target.startswith("//")
    return target if plain and is_path and not split.scheme and not split.netloc else "/"


def _has_keys(request: Request) -> bool:
    return cast(Settings, request.app.state.settings).auth == "keys"


def _form(
    request: Request, target: str, problem: str = "", exc: ProblemError | None = None
) -> Response:
    status = HTTPStatus.OK if not problem else HTTPStatus.UNAUTHORIZED
    detail = "" if exc is None else exc.detail
    answer = page(request, "sign_in.html", wanted=own_path(target), problem=problem, detail=detail)
    answer.status_code = status if exc is None else exc.status
    answer.headers.update({} if exc is None else exc.headers)
    return answer
