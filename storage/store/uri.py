"""Store URIs: parsing, joining, and refusal of everything that could lead elsewhere.

Allowed are gs://bucket/path, s3://bucket/path, file:///path, memory://path and plain paths. This
module is the one place that refuses what other layers would interpret: fsspec chains (`a::b`),
percent escapes, queries, `..`, backslashes and foreign schemes.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, cast, get_args

from cairn.storage.errors import InvalidURIError

__all__ = [
    "RUN_NAME",
    "RUN_NAME_RULE",
    "Confinement",
    "Scheme",
    "StoreURI",
    "check_name",
    "check_path",
    "check_segment",
    "is_text",
    "parse_uri",
    "s3_endpoint",
    "s3_region",
]

Scheme = Literal["file", "gs", "s3", "memory"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

_ALLOWED = "gs://bucket/path, s3://bucket/path, file:///path, memory://path or a plain path"
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):")
_BUCKET = re.compile(r"^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$")
RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}"
"""Regular expression of a run's name; stores, addresses and URLs all use it."""

RUN_NAME_RULE = "a letter or digit, then up to 127 letters, digits, '.', '_', '-', '=' or '+'"
_NAME = re.compile(RUN_NAME)
_FORBIDDEN = re.compile(r"[\\%?#\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]|::")
_MAX_LENGTH = 4096


@dataclass(frozen=True)
class Confinement:
    """Bound on where paths below a folder may lead.

    Attributes:
        folder: path of the folder.
        real_prefix: its path with symbolic links resolved, as `real_prefix` returns it.
        sources: folders that may hold the files of imported steps.
        parent: confinement of the folder's parent; None if the parent has none.
    """

    folder: str
    real_prefix: str
    sources: "tuple[StoreURI, ...]"
    parent: "Confinement | None" = None


@dataclass(frozen=True)
class StoreURI:
    """Address of a folder or object in a store. `parse_uri`, `safe_join` and `/` make and check it.

    Attributes:
        scheme: kind of store.
        bucket: bucket name; "" for file and memory.
        path: segments joined by "/", without a leading or a trailing one; "" is the store's root.
        confinement: where paths below may lead; None: anywhere. Equality ignores it.
    """

    scheme: Scheme
    bucket: str
    path: str
    confinement: Confinement | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        if self.scheme == "file":
            return f"file:///{self.path}"
        if self.scheme == "memory":
            return f"memory://{self.path}"
        return f"{self.scheme}://{self.bucket}/{self.path}".removesuffix("/")

    def __truediv__(self, relative: str) -> "StoreURI":
        """Return the child at `relative` ("a" or "a/b"), after a check of each segment.

        Raises:
            InvalidURIError: a segment is empty, "." or "..", or has a forbidden character.
        """
        path = "/".join(filter(None, (self.path, check_path(relative, within=self))))
        return StoreURI(self.scheme, self.bucket, path, self.confinement)

    @property
    def name(self) -> str:
        """Last segment; the bucket's name at a bucket's root."""
        return self.path.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> "StoreURI":
        """Address one level up.

        Raises:
            InvalidURIError: this is the store's root.
        """
        if not self.path:
            raise InvalidURIError(
                "no parent", path=self, expected="a path below the store's root", found="the root"
            )
        confinement = self.confinement
        if confinement is not None and self.path == confinement.folder:
            confinement = confinement.parent
        return StoreURI(self.scheme, self.bucket, self.path.rpartition("/")[0], confinement)

    @property
    def local_path(self) -> str:
        """Absolute path on this machine.

        Raises:
            InvalidURIError: this is not a file URI.
        """
        if self.scheme != "file":
            raise InvalidURIError(
                "not on this machine", path=self, expected="a file URI", found=f"{self.scheme}://"
            )
        return f"/{self.path}"

    def kvstore_spec(self) -> dict[str, Any]:
        """Return the TensorStore key-value store spec of the folder; its path ends in "/"."""
        folder = f"{self.path}/" if self.path else ""
        match self.scheme:
            case "file":
                return {"driver": "file", "path": f"/{folder}"}
            case "memory":
                return {"driver": "memory", "path": folder}
            case "gs":
                return {"driver": "gcs", "bucket": self.bucket, "path": folder}
            case "s3":
                spec: dict[str, Any] = {"driver": "s3", "bucket": self.bucket, "path": folder}
                # Otherwise a request asks for the condition before the one that writes under it,
                # which would hide from the probe that a store ignores conditions.
                spec["use_conditional_write"] = True
                if endpoint := s3_endpoint():
                    spec |= {"endpoint": endpoint, "aws_region": s3_region()}
                if os.environ.get("AWS_ACCESS_KEY_ID"):
                    # The default chain would say on stderr, for each folder, which files it lacks.
                    spec["aws_credentials"] = {"type": "environment"}
                return spec

    def orbax_path(self) -> str:
        """Return the path for Orbax and etils: "/abs/path", or the URI of a folder in a bucket."""
        return self.local_path if self.scheme == "file" else str(self)


def s3_endpoint() -> str | None:
    """Return the endpoint of `s3://` that the environment names; None: that of AWS."""
    environment = os.environ
    named = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    return named.rstrip("/") if named else None


def s3_region() -> str:
    """Return the region that the environment names, else the one that others than AWS accept."""
    environment = os.environ
    return environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"


def is_text(text: object) -> bool:
    """Return True for a string that has a UTF-8 encoding: a lone surrogate has none."""
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_segment(segment: str, *, within: object) -> str:
    """Return `segment` if it is safe as one part of a path in any store.

    Raises:
        InvalidURIError: `segment` is empty, "." or "..", too long, or has a forbidden character.
    """
    forbidden = _FORBIDDEN.search(segment)
    if segment in ("", ".", "..") or "/" in segment or forbidden or len(segment) > 255:
        problem = repr(forbidden.group()) if forbidden else f"the segment {segment[:64]!r}"
        raise InvalidURIError(
            "invalid path",
            path=repr(str(within)[:200]),
            expected=r"non-empty segments other than . and .., without \ % ? # :: or controls",
            found=problem,
            next_step="Rename the folder, or give another path.",
        )
    return segment


def check_path(relative: str, *, within: object) -> str:
    """Return a path below `within`, such as "a/b", after a check of each segment.

    Raises:
        InvalidURIError: a segment is empty, "." or "..", or has a forbidden character.
    """
    whole = f"{within}/{relative}"
    for segment in relative.split("/"):
        check_segment(segment, within=whole)
    return relative


def parse_uri(text: StoreURI | str | os.PathLike[str]) -> StoreURI:
    """Return the parsed store URI; a plain path becomes absolute.

    Raises:
        InvalidURIError: `text` has a foreign scheme, a bad bucket name, "..", or a forbidden
            character.
    """
    if isinstance(text, StoreURI):
        return text
    plain = os.fspath(text)
    if not plain or len(plain) > _MAX_LENGTH:
        raise InvalidURIError(
            "invalid URI",
            path=repr(plain[:64]),
            expected=_ALLOWED,
            found=f"{len(plain)} characters",
            next_step=f"Give 1 to {_MAX_LENGTH} characters.",
        )
    forbidden = _FORBIDDEN.search(plain)
    if forbidden:
        check_segment(forbidden.group(), within=plain)
    scheme = _SCHEME.match(plain)
    if scheme is None:
        return _parse_plain(plain)
    if scheme.group(1) not in SCHEMES or not plain.startswith(f"{scheme.group(1)}://"):
        raise InvalidURIError(
            "foreign URI",
            path=repr(plain),
            expected=_ALLOWED,
            found=repr(scheme.group()),
            next_step="Use one of these schemes, in lower case.",
        )
    rest = plain.removeprefix(f"{scheme.group(1)}://")
    return _parse_rest(cast("Scheme", scheme.group(1)), rest, plain)


def _parse_plain(plain: str) -> StoreURI:
    """Return the URI of a path without a scheme; "." segments are allowed, ".." and "~" are not."""
    if plain.startswith("~") or ".." in PurePosixPath(plain).parts:
        raise InvalidURIError(
            "invalid path",
            path=repr(plain),
            expected="a path without '..' or a leading '~'",
            found="'~'" if plain.startswith("~") else "'..'",
            next_step="Give the absolute path.",
        )
    if "://" in plain:  # such as `name=gs://bucket`, which would be a folder of that name
        raise InvalidURIError(
            "invalid path",
            path=repr(plain),
            expected=_ALLOWED,
            found="'://' within a path",
            next_step="Give the URI alone.",
        )
    absolute = os.path.abspath(plain)
    return _parse_rest("file", f"/{absolute.lstrip('/')}", plain)


def _parse_rest(scheme: Scheme, rest: str, plain: str) -> StoreURI:
    if scheme == "memory":
        bucket, path = "", rest
    else:
        bucket, _, path = rest.partition("/")
    bucket_is_fine = not bucket if scheme in ("file", "memory") else _BUCKET.match(bucket)
    if not bucket_is_fine or (scheme == "file" and not rest.startswith("/")):
        raise InvalidURIError(
            "invalid URI",
            path=repr(plain),
            expected="file:///absolute/path"
            if scheme == "file"
            else "a bucket name of 3 or more lower-case letters, digits, '.', '_' or '-'",
            found=repr(bucket),
            next_step="Check the slashes and the name.",
        )
    if scheme == "s3" and bucket.endswith("--x-s3"):
        raise InvalidURIError(
            "a directory bucket of S3",
            path=repr(plain),
            expected="a general purpose bucket",
            found=repr(bucket),
            next_step="Keep runs in another bucket: this kind lists no names in order, and its "
            "ETags are no digests.",
        )
    path = path.removesuffix("/")
    if path:
        for segment in path.split("/"):
            check_segment(segment, within=plain)
    return StoreURI(scheme, bucket, path)


def check_name(segment: str) -> str:
    """Return `segment` if it is a plain name; for untrusted input.

    Raises:
        InvalidURIError: `segment` is no plain name.
    """
    if not _NAME.fullmatch(segment):
        raise InvalidURIError(
            "invalid name",
            path=repr(segment[:200]),
            expected=RUN_NAME_RULE,
            found=f"{len(segment)} characters that don't fit",
            next_step="Choose another name.",
        )
    return segment
