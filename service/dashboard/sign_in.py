"""Sign-in with a key or at the identity provider, and sign-out: `/sign-in`, `/sign-out`."""

from hmac import compare_digest
from http import HTTPStatus
from typing import Annotated, Final, cast
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse

from cairn.service.access.authenticator import Authenticator
from cairn.service.access.cookies import PENDING_SIGN_IN, cookie_of, delete_cookie, set_cookie
from cairn.service.access.guard import CALLBACK, PROVIDER, SIGN_IN
from cairn.service.access.origins import is_local, peer_name, require_own_page
from cairn.service.access.pending_sign_in import LIFETIME, PendingSignIn
from cairn.service.dashboard.rendering import page
from cairn.service.errors import (
    ForbiddenError,
    NotReadyError,
    ProblemError,
    TooManyRequestsError,
    UnauthenticatedError,
)
from cairn.service.settings import Settings

router: Final = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

Next = Annotated[str, Query(alias="next", max_length=4096)]
Parameter = Annotated[str, Query(max_length=8192)]

_REFUSED: Final = (UnauthenticatedError, ForbiddenError, TooManyRequestsError, NotReadyError)


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
    try:
        secret = await _authenticator(request).sign_in(key, peer_name(request.scope))
    except UnauthenticatedError as exc:
        return _form(request, target, "Invalid or expired key.", exc)
    except TooManyRequestsError as exc:
        return _form(request, target, "Too many attempts.", exc)
    return _signed_in(request, target, secret)


@router.get(PROVIDER)
async def begin_sign_in(request: Request, target: Next = "/") -> Response:
    """Redirect to the identity provider."""
    if not _has_keys(request):
        return RedirectResponse(own_path(target), HTTPStatus.SEE_OTHER)
    begin = _authenticator(request).begin_sign_in
    try:
        url, pending = await begin(f"{_origin(request)}{CALLBACK}", own_path(target))
    except NotReadyError as exc:
        return _form(request, target, "The identity provider is unavailable.", exc)
    answer = RedirectResponse(url, HTTPStatus.SEE_OTHER)
    set_cookie(answer, request.scope, pending.text(), lifetime=LIFETIME, name=PENDING_SIGN_IN)
    return answer


@router.get(CALLBACK)
async def finish_sign_in(
    request: Request, state: Parameter = "", code: Parameter = "", error: Parameter = ""
) -> Response:
    """Begin the session of a person whom the identity provider sends back.

    The state proves that this browser began the sign-in, so no other site can sign it in.
    """
    if not _has_keys(request):
        return RedirectResponse("/", HTTPStatus.SEE_OTHER)
    authenticator, peer = _authenticator(request), peer_name(request.scope)
    pending = PendingSignIn.parse(cookie_of(request.scope, PENDING_SIGN_IN) or "")
    if pending is not None and not compare_digest(state.encode(), pending.state.encode()):
        pending = None  # another site sends the browser, or it has begun another sign-in since
    try:
        if pending is None:
            await authenticator.refuse_sign_in(
                UnauthenticatedError(
                    "This browser has not begun the sign-in here, or too long ago, or begun "
                    "another one since. Begin it again."
                ),
                peer,
            )
        if error or not code:
            is_plain = error.isascii() and error.isprintable()
            text = error[:100] if error and is_plain else "no code"
            await authenticator.refuse_sign_in(
                UnauthenticatedError(f"The identity provider answered: {text}. Try again."),
                peer,
            )
        redirect_uri = f"{_origin(request)}{CALLBACK}"
        secret = await authenticator.finish_sign_in(pending, code, redirect_uri, peer)
    except _REFUSED as exc:
        answer = _form(request, "/" if pending is None else pending.target, "Sign-in failed.", exc)
    else:
        answer = _signed_in(request, pending.target, secret)
    if pending is not None:
        delete_cookie(answer, request.scope, PENDING_SIGN_IN)  # a state counts once
    return answer


@router.post("/sign-out")
async def sign_out(request: Request) -> Response:
    """End the session of this browser, and tell its page where to go: to the provider, if any."""
    secret, target = cookie_of(request.scope), SIGN_IN
    if not _has_keys(request) or secret is None:
        return JSONResponse({"next": target})
    return_to = f"{_origin(request)}{SIGN_IN}"
    target = await _authenticator(request).sign_out(secret, return_to) or target
    answer = JSONResponse({"next": target})
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


def _signed_in(request: Request, target: str, secret: str) -> Response:
    answer = RedirectResponse(own_path(target), HTTPStatus.SEE_OTHER)
    lifetime = _authenticator(request).lifetime
    set_cookie(answer, request.scope, secret, lifetime=lifetime)
    return answer


def _authenticator(request: Request) -> Authenticator:
    return cast(Authenticator, request.app.state.authenticator)


def _origin(request: Request) -> str:
    """Return the origin of this server for the browser: https, except on this machine.

    A proxy terminates TLS, so the request itself does not say it. The provider sends browsers only
    to registered origins, whatever `Host` says.
    """
    scheme = "http" if is_local(request.scope) else "https"
    return f"{scheme}://{request.headers.get('host', '')}"


def _has_keys(request: Request) -> bool:
    return cast(Settings, request.app.state.settings).auth == "keys"


def _form(
    request: Request, target: str, problem: str = "", exc: ProblemError | None = None
) -> Response:
    status = HTTPStatus.OK if not problem else HTTPStatus.UNAUTHORIZED
    provider = _authenticator(request).provider
    answer = page(
        request,
        "sign_in.html",
        wanted=own_path(target),
        problem=problem,
        detail="" if exc is None else exc.detail,
        provider=None if provider is None else provider.label,
    )
    answer.status_code = status if exc is None else exc.status
    answer.headers.update({} if exc is None else exc.headers)
    return answer
