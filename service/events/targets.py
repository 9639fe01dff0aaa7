"""Targets that events may be sent to: public addresses, and private networks of the settings.

The author of a webhook decides where this server connects to (SSRF). So a name is resolved first,
addresses that are not public are refused, and the connection goes to an address that was checked: a
name that resolves to another address a moment later (DNS rebinding) has no effect.

Public addresses are listed here, since `is_global` of Python's `ipaddress` differs between patch
releases. Source: IANA's Special-Purpose Address Registries for IPv4 and IPv6 (RFC 6890, RFC 8190,
and later entries) and IANA's IPv6 Global Unicast Address Space (RFC 4291). A block is refused as a
whole if no public host in it could receive webhooks: so the anycast addresses of 192.0.0.0/24 and
2001::/23 are refused too.
"""

import ipaddress
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from cairn.service.errors import TargetRefusedError
from cairn.service.settings import Networks

Address = IPv4Address | IPv6Address

LONGEST_URL: Final = 2000
_PORTS: Final = {"http": 80, "https": 443}
_NOT_PUBLIC_IPV4: Final = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network: RFC 791
        "10.0.0.0/8",  # private use: RFC 1918
        "100.64.0.0/10",  # shared address space: RFC 6598
        "127.0.0.0/8",  # loopback: RFC 1122
        "168.63.129.16/32",  # public, but it reaches the host of an Azure machine
        "169.254.0.0/16",  # link local, metadata of clouds: RFC 3927
        "172.16.0.0/12",  # private use: RFC 1918
        "192.0.0.0/24",  # protocol assignments, a cloud's metadata: RFC 6890
        "192.0.2.0/24",  # documentation: RFC 5737
        "192.88.99.0/24",  # relays of 6to4, deprecated: RFC 7526
        "192.168.0.0/16",  # private use: RFC 1918
        "198.18.0.0/15",  # benchmarking: RFC 2544
        "198.51.100.0/24",  # documentation: RFC 5737
        "203.0.113.0/24",  # documentation: RFC 5737
        "224.0.0.0/4",  # multicast: RFC 5771
        "240.0.0.0/4",  # reserved, broadcast: RFC 1112, RFC 8190
    )
)
# The only IPv6 block that is assigned. Outside of it lie loopback, IPv4-mapped, -compatible and
# -translated addresses, NAT64, discard-only, SRv6, unique and site local, link local, multicast.
_PUBLIC_IPV6: Final = IPv6Network("2000::/3")
_NOT_PUBLIC_IPV6: Final = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, Teredo (has an IPv4 address in it): RFC 2928, RFC 4380
        "2001:db8::/32",  # documentation: RFC 3849
        "2002::/16",  # 6to4, which has an IPv4 address in it: RFC 3056
        "3ffe::/16",  # 6bone, returned to IANA: RFC 3701
        "3fff::/20",  # documentation: RFC 9637
    )
)
# Addresses of both blocks have the IPv4 address that a connection goes to in their last 4 bytes.
_IPV4_IN_IPV6: Final = (
    IPv6Network("::ffff:0:0/96"),  # mapped: RFC 4291
    IPv6Network("64:ff9b::/96"),  # NAT64, by which hosts without IPv4 reach it: RFC 6052
)
_ISATAP: Final = frozenset({0x00005EFE, 0x02005EFE})
"""Values of the third 32-bit word of ISATAP addresses (RFC 5214).

The last word is the IPv4 address of a host in a site's own network.
"""


class Target(NamedTuple):
    """Parsed address of a webhook.

    Attributes:
        scheme: `https` or `http`.
        host: Name or address, without brackets.
        port: Port.
        authority: Host and port as in the `Host` header.
        path: Path and query.
    """

    scheme: str
    host: str
    port: int
    authority: str
    path: str


def parse_target(url: str, networks: Networks) -> Target:
    """Parse the URL of a webhook, and check everything that needs no name resolution.

    Args:
        url: URL of the webhook.
        networks: Private networks that are allowed.

    Raises:
        TargetRefusedError: The URL is invalid, or leads to an address that is not allowed.
    """
    if len(url) > LONGEST_URL or not all("!" <= letter <= "~" for letter in url):
        raise _refused(f"use {LONGEST_URL} letters of ASCII at most, without spaces")
    try:
        split = urlsplit(url)
        port = split.port or _PORTS.get(split.scheme, 0)
        host = split.hostname or ""
        host.encode("idna")
    except ValueError as exc:  # UnicodeError of an invalid host is a ValueError
        raise _refused(f"use an address such as https://ci.example.com/cairn ({exc})") from exc
    if split.username is not None or split.password is not None:
        raise _refused("leave user and password out")
    if not host or split.fragment or split.scheme not in _PORTS:
        raise _refused("use https:// and a host, without a fragment")
    if split.scheme == "http" and not networks:
        raise _refused("use https://; only CAIRN_WEBHOOK_NETWORKS can allow http://")
    if (literal := _literal(host)) is not None:
        check_addresses([literal], split.scheme, networks)
    path = (split.path or "/") + (f"?{split.query}" if split.query else "")
    shown = f"[{host}]" if ":" in host else host
    authority = shown if port == _PORTS[split.scheme] else f"{shown}:{port}"
    return Target(split.scheme, host, port, authority, path)


def resolve(target: Target, networks: Networks) -> list[Address]:
    """Resolve a target to its addresses, and check that all of them are allowed.

    Raises:
        TargetRefusedError: An address is not allowed.
        OSError: The name does not resolve.
    """
    entries = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    check_addresses(addresses, target.scheme, networks)
    return list(dict.fromkeys(addresses))


def check_addresses(addresses: Iterable[Address], scheme: str, networks: Networks) -> None:
    """Raise unless events may be sent to all of these addresses.

    Raises:
        TargetRefusedError: An address is not allowed.
    """
    for address in addresses:
        # An IPv6 address that embeds an IPv4 address leads to the IPv4 address.
        embeds = any(address in network for network in _IPV4_IN_IPV6)
        reached = IPv4Address(int(address) & 0xFFFFFFFF) if embeds else address
        if any(reached in network or address in network for network in networks):
            continue
        if not _is_public(reached):
            raise _refused(
                f"{address} is no public address; CAIRN_WEBHOOK_NETWORKS can allow its network"
            )
        if scheme != "https":
            raise _refused(
                f"use https://; http:// is for CAIRN_WEBHOOK_NETWORKS only, not for {address}"
            )


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_IPV4)
    return (
        address in _PUBLIC_IPV6
        and not any(address in network for network in _NOT_PUBLIC_IPV6)
        and int(address) >> 32 & 0xFFFFFFFF not in _ISATAP
    )


def _literal(host: str) -> Address | None:
    """Parse a host that is an address, in odd forms too (`127.1`, `0x7f.1`); None: a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


def _refused(reason: str) -> TargetRefusedError:
    return TargetRefusedError(f"url: {reason}.")
