"""Where a request comes from: this machine or another, a page of ours or another's."""

from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope as Connection

from cairn.service.errors import ForbiddenError
from cairn.service.settings import is_loopback

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def require_own_page(scope: Connection) -> None:
    """Pass what a page of this server asks for.

    Raises:
        ForbiddenError: It is another's page, or no page at all.
    """
    headers = Headers(scope=scope)
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is None or host_name(origin)[1] != host.lower():
        raise ForbiddenError(f"Origin: expected a page of this server ({host}), found {origin!r}.")


def is_local(scope: Connection) -> bool:
    """Whether a browser on this machine asks by a name of this machine: no network is in between.

    A proxy on this machine is asked by another name.
    """
    client = scope.get("client")
    host = Headers(scope=scope).get("host", "")
    return client is not None and is_loopback(client[0]) and is_loopback(host_name(f"//{host}")[0])


def host_name(url: str) -> tuple[str, str]:
    """Host name, and host name with port, as a URL has them; empty if there is none."""
    try:
        split = urlsplit(url)
        return split.hostname or "", split.netloc.lower()
    except ValueError:  # an unclosed bracket
        return "", ""


def peer_name(scope: Connection) -> str:
    """Address of who connects: a proxy's, where there is one."""
    client = scope.get("client")  # None on a Unix socket
    return "this machine" if client is None else str(client[0])
