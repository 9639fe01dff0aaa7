"""What all JSON objects of the store share: a format, a version, and one canonical encoding."""

import hashlib
import json
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.errors import UnsupportedFormatError

_NOT_OURS_NEXT = "Give a folder that Cairn wrote, or restore this object from a backup."

__all__ = ["Record", "canonical_json", "load_json", "sha256_of"]


def canonical_json(value: Any, *, path: object = "") -> bytes:
    """`value` as UTF-8 JSON with sorted keys and no spaces: equal values give equal bytes.

    Raises:
        UnsupportedFormatError: `value` is not JSON (NaN and infinities are not).
    """
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode("utf-8")
    except (TypeError, ValueError) as exc:
        raise UnsupportedFormatError(
            "not JSON",
            path=path,
            expected="objects, lists, text, finite numbers, true, false and null",
            found=str(exc),
            next_step="Write other values as text.",
        ) from exc


def sha256_of(data: bytes) -> str:
    """The SHA-256 of `data` as "sha256:…"."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def load_json(data: bytes, *, path: object) -> dict[str, Any]:
    """The JSON object in `data`.

    Raises:
        UnsupportedFormatError: `data` is no JSON object.
    """
    try:
        value = json.loads(data)
        if b"\\u" in data:  # half a surrogate pair is no text: nothing could write it again
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as exc:
        raise UnsupportedFormatError(
            "not JSON",
            path=path,
            expected="a JSON object",
            found=f"{data[:64]!r} ({exc})",
            next_step=_NOT_OURS_NEXT,
        ) from exc
    if not isinstance(value, dict):
        raise UnsupportedFormatError(
            "not a JSON object",
            path=path,
            expected="a JSON object",
            found=type(value).__name__,
            next_step=_NOT_OURS_NEXT,
        )
    return value


class Record(BaseModel):
    """Base of the objects that the store keeps as JSON.

    A subclass sets `FORMAT` and `VERSION`, which are written with every object. Unknown keys are
    refused at our version; a newer version is refused by name, since it may mean other things.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]

    def to_bytes(self) -> bytes:
        """The canonical JSON of this object.

        Raises:
            UnsupportedFormatError: a value is not JSON.
        """
        body = self.model_dump()
        return canonical_json(body | {"format": self.FORMAT, "version": self.VERSION})

    def digest(self) -> str:
        """The SHA-256 of the canonical JSON, which is what is stored, as "sha256:…"."""
        return sha256_of(self.to_bytes())

    @classmethod
    def parse(cls, data: bytes, path: object) -> Self:
        """The object that `to_bytes` wrote.

        Args:
            data: the stored bytes.
            path: where they were read, for the error.

        Raises:
            UnsupportedFormatError: another format, a newer version, or fields that don't fit.
            CorruptionError: the bytes fail the check that they carry.
        """
        body = cls.body(data, path)
        try:
            return cls.model_validate(body)
        except ValidationError as exc:
            problems = "; ".join(
                f"{'.'.join(map(str, error['loc'])) or '(object)'}: {error['msg']}"
                for error in exc.errors(include_url=False, include_input=False)[:20]
            )
            raise UnsupportedFormatError(
                "fields that don't fit",
                path=path,
                expected=cls.FORMAT,
                found=problems,
                next_step=_NOT_OURS_NEXT,
            ) from exc

    @classmethod
    def body(cls, data: bytes, path: object) -> dict[str, Any]:
        """The fields in `data`, unchecked but for the format and the version.

        Raises:
            UnsupportedFormatError: no JSON, another format, or a newer version.
            CorruptionError: the bytes fail the check that they carry.
        """
        body = load_json(data, path=path)
        found_format, found_version = body.pop("format", None), body.pop("version", None)
        if found_format != cls.FORMAT:
            raise UnsupportedFormatError(
                "wrong format",
                path=path,
                expected=repr(cls.FORMAT),
                found="none" if found_format is None else repr(found_format)[:200],
                next_step=_NOT_OURS_NEXT,
            )
        if type(found_version) is not int or not 1 <= found_version <= cls.VERSION:
            raise UnsupportedFormatError(
                "unknown version",
                path=path,
                expected=f"{cls.FORMAT} version 1 to {cls.VERSION}",
                found=f"version {found_version!r}",
                next_step="Upgrade Cairn to the release that wrote it, or a later one.",
            )
        cls._check_stored(data, body, found_version, path)
        return body

    @classmethod
    def _check_stored(cls, data: bytes, body: dict[str, Any], version: int, path: object) -> None:
        """What a subclass checks of the stored bytes; it takes out the keys that are no fields."""
