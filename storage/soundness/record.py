"""What a root remembers of a probe, and which store that was: one moved elsewhere is asked anew."""

import os
import re
from typing import ClassVar, Final

from cairn.storage.soundness.mounts import Mount
from cairn.storage.store import Moment, Record, StoreURI

__all__ = ["RECORD_FILE", "StoreRecord", "identity", "is_of_a_probe", "probe_name", "probed_at"]

RECORD_FILE: Final = ".cairn-store.json"
"""In a root, or in a run where the root can't be written. No run has a name like that."""

_PROBE: Final = re.compile(r"\.cairn-probe-([0-9]{1,12})-[0-9a-f]{16}")


class StoreRecord(Record):
    """That a store was found sound.

    Attributes:
        at: when, RFC 3339 in UTC.
        cairn: the version that looked.
        checked: what was looked at.
        store: which store that was; see `identity`.
    """

    FORMAT: ClassVar[str] = "cairn.store"

    at: Moment
    cairn: str
    checked: tuple[str, ...]
    store: dict[str, str]


def identity(folder: StoreURI, mount: Mount | None) -> dict[str, str]:
    """Which store `folder` lies in, the same for every host that sees it.

    A disk is known by its kind and by what is mounted: the number of a mount is another one on each
    host, and after each start.
    """
    match folder.scheme:
        case "file":
            known = {} if mount is None else {"kind": mount.kind, "source": mount.source}
            return {"scheme": "file", **known}
        case "gs":
            endpoint = os.environ.get("TENSORSTORE_GCS_HTTP_URL", "")
            return {"scheme": "gs", "bucket": folder.bucket, "endpoint": endpoint}
        case "s3":
            endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
            return {"scheme": "s3", "bucket": folder.bucket, "endpoint": endpoint}
        case "memory":
            return {"scheme": "memory"}


def probe_name(seconds: int, token: str) -> str:
    """What a probe calls its object or folder, which it removes in the end.

    Args:
        seconds: of its start, since 1970.
        token: 16 hexadecimal digits.
    """
    return f".cairn-probe-{seconds}-{token}"


def probed_at(name: str) -> int | None:
    """When the probe began that gave something this name, in seconds since 1970."""
    match = _PROBE.fullmatch(name)
    return int(match.group(1)) if match else None


def is_of_a_probe(name: str) -> bool:
    """Whether a name in a root or a run is of a probe's making: its record, or a leftover."""
    return name == RECORD_FILE or probed_at(name) is not None
