"""Where events may be sent: not into networks that only this machine can reach.

Whoever makes a webhook says where this server connects to. Addresses that are not public are
refused once a name is resolved, and the connection goes to the very address that was looked at: a
name that means another one a moment later leads nowhere else.
"""

import ipaddress
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from cairn.service.errors import TargetRefusedError
from cairn.service.settings import Networks

Address = IPv4Address | IPv6Address

LONGEST_URL: Final = 2000
_PORTS: Final = {"http": 80, "https": 443}
# Public as numbers go, and yet the host's own: Azure's, for its machines.
_HOSTS_OWN: Final = (ipaddress.ip_network("168.63.129.16/32"),)
# These have the address of IPv4 in their last four bytes (RFC 6052).
_TRANSLATED: Final = (
    ipaddress.IPv6Network("64:ff9b::/96"),
    ipaddress.IPv6Network("64:ff9b:1::/48"),
    ipaddress.IPv6Network("::/96"),
)


class Target(NamedTuple):
    """Where a webhook is.

    Attributes:
        scheme: `https` or `http`.
        host: A name or an address, without brackets.
        port: Its port.
        authority: Host and port as HTTP has them.
        path: What is asked there, with its query.
    """

    scheme: str
    host: str
    port: int
    authority: str
    path: str


def parse_target(url: str, networks: Networks) -> Target:
    """Where an address leads, as far as that can be said without resolving it.

    Raises:
        TargetRefusedError: It leads nowhere, or where nothing may be sent.
    """
    if len(url) > LONGEST_URL or not all("!" <= letter <= "~" for letter in url):
        raise _refused(f"{LONGEST_URL} letters of ASCII at most, without spaces", "others")
    try:
        split = urlsplit(url)
        port = split.port or _PORTS.get(split.scheme, 0)
        host = split.hostname or ""
        host.encode("idna")
    except ValueError as exc:  # of which a host that can't be resolved raises one, too
        raise _refused(
            "an address such as https://ci.example.com/cairn", f"another: {exc}"
        ) from exc
    if split.username is not None or split.password is not None:
        raise _refused("an address without a user and a password", "one with them")
    if not host or split.fragment or split.scheme not in _PORTS:
        raise _refused("https:// and a host, without a fragment", "another address")
    if split.scheme == "http" and not networks:
        raise _refused("https://", "http://, which only CAIRN_WEBHOOK_NETWORKS can allow")
    if (literal := _literal(host)) is not None:
        check_addresses([literal], split.scheme, networks)
    path = (split.path or "/") + (f"?{split.query}" if split.query else "")
    shown = f"[{host}]" if ":" in host else host
    authority = shown if port == _PORTS[split.scheme] else f"{shown}:{port}"
    return Target(split.scheme, host, port, authority, path)


def resolve(target: Target, networks: Networks) -> list[Address]:
    """The addresses of a target, each of which may be connected to.

    Raises:
        TargetRefusedError: One may not.
        OSError: Its name means none.
    """
    found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in found]
    check_addresses(addresses, target.scheme, networks)
    return list(dict.fromkeys(addresses))


def check_addresses(addresses: Iterable[Address], scheme: str, networks: Networks) -> None:
    """Pass addresses that may be connected to.

    Raises:
        TargetRefusedError: One may not.
    """
    for address in addresses:
        meant = _meant(address)
        allowed = any(meant in network or address in network for network in networks)
        if allowed:
            continue
        if not _is_public(meant):
            raise _refused(
                "a public address", f"{address}. CAIRN_WEBHOOK_NETWORKS can allow its network"
            )
        if scheme != "https":
            raise _refused(
                "https://, except within CAIRN_WEBHOOK_NETWORKS", f"http:// and {address}"
            )


def _is_public(address: Address) -> bool:
    return (
        address.is_global
        and not address.is_multicast
        and not any(address in network for network in _HOSTS_OWN)
    )


def _meant(address: Address) -> Address:
    """The address of IPv4 that one of IPv6 leads to, or itself."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    whole = int(address)
    if whole > 1 and any(address in network for network in _TRANSLATED):
        return IPv4Address(whole & 0xFFFFFFFF)
    return address


def _literal(host: str) -> Address | None:
    """The address that a host is; None: a name. Also in the odd ways that systems take."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


def _refused(expected: str, found: str) -> TargetRefusedError:
    return TargetRefusedError(f"url: expected {expected}, found {found}.")
