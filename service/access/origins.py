"""Origin of a request: this machine or another, a page of this server or of another site."""

from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope as Connection

from cairn.service.errors import ForbiddenError
from cairn.service.settings import is_loopback

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def require_own_page(scope: Connection) -> None:
    """Raise unless a page of this server sends the request.

    Raises:
        ForbiddenError: A page of another site sends it, or no page at all.
    """
    headers = Headers(scope=scope)
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is None or host_name(origin)[1] != host.lower():
        raise ForbiddenError(f"Origin: {origin!r} is no page of this server ({host}).")


def is_local(scope: Connection) -> bool:
    """Return whether a request comes from this machine and names a loopback address as its host.

    Clients behind a proxy on this machine are not local: the proxy is requested by another name.
    """
    client = scope.get("client")
    host = Headers(scope=scope).get("host", "")
    return client is not None and is_loopback(client[0]) and is_loopback(host_name(f"//{host}")[0])


def host_name(url: str) -> tuple[str, str]:
    """Return a URL's host name, without and with the port; both are empty if it has none."""
    try:
        split = urlsplit(url)
        return split.hostname or "", split.netloc.lower()
    except ValueError:  # an unclosed bracket
        return "", ""


def peer_name(scope: Connection) -> str:
    """Return the address of the client, or of the proxy in front of it."""
    client = scope.get("client")  # None on a Unix socket
    return "this machine" if client is None else str(client[0])
