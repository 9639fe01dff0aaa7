"""Record of a good probe in a root, with the store's identity, so that a copy is not valid."""

import os
import re
from typing import ClassVar, Final

from cairn.storage.store.clock import Moment
from cairn.storage.store.records import Record
from cairn.storage.store.uri import StoreURI, s3_endpoint
from cairn.storage.store_checks.mounts import Mount

__all__ = ["RECORD_FILE", "StoreRecord", "identity", "is_probe_name", "probe_name", "probed_at"]

RECORD_FILE: Final = ".cairn-store.json"
"""File in a root, or in a run whose root can't be written. No run can have this name."""

_PROBE: Final = re.compile(r"\.cairn-probe-([0-9]{1,12})-[0-9a-f]{16}")


class StoreRecord(Record):
    """Record that a store passed its probe.

    Attributes:
        at: time of the probe, RFC 3339 in UTC.
        cairn: version of Cairn that probed.
        checked: names of the checks.
        store: identity of the store; see `identity`.
    """

    FORMAT: ClassVar[str] = "cairn.store"

    at: Moment
    cairn: str
    checked: tuple[str, ...]
    store: dict[str, str]


def identity(folder: StoreURI, mount: Mount | None) -> dict[str, str]:
    """Return the identity of the store that holds `folder`, equal on all hosts.

    A disk is identified by file system type and source: mount numbers differ between hosts and
    between boots.
    """
    match folder.scheme:
        case "file":
            mount_identity = {} if mount is None else {"kind": mount.kind, "source": mount.source}
            return {"scheme": "file", **mount_identity}
        case "gs":
            endpoint = os.environ.get("TENSORSTORE_GCS_HTTP_URL", "")
            return {"scheme": "gs", "bucket": folder.bucket, "endpoint": endpoint}
        case "s3":
            return {"scheme": "s3", "bucket": folder.bucket, "endpoint": s3_endpoint() or ""}
        case "memory":
            return {"scheme": "memory"}


def probe_name(seconds: int, token: str) -> str:
    """Return the name of a probe's object or folder, which the probe removes at its end.

    Args:
        seconds: start of the probe, since 1970.
        token: 16 hexadecimal digits.
    """
    return f".cairn-probe-{seconds}-{token}"


def probed_at(name: str) -> int | None:
    """Return the start of the probe that used this name, in seconds since 1970; else None."""
    match = _PROBE.fullmatch(name)
    return int(match.group(1)) if match else None


def is_probe_name(name: str) -> bool:
    """Return True for the names of a probe's record and of its leftovers."""
    return name == RECORD_FILE or probed_at(name) is not None
