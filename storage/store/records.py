"""Base of the store's JSON records: format, version, location, checksum and canonical encoding."""

import contextlib
import hashlib
import json
import re
import threading
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from cairn.storage.errors import CorruptionError, UnsupportedFormatError
from cairn.storage.store.bounds import check_json_size, free_json_context

_CHECKSUM = re.compile(rb'"checksum":"(sha256:[0-9a-f]{64})",')
"""Pattern of the checksum's key and value in canonical JSON; it never matches inside a string."""

_TOO_LONG = {"too_long", "string_too_long"}
"""Pydantic's error types for too many entries or characters."""

_LARGE_BYTES = 1 << 20
_large = threading.Lock()

_NOT_OURS_NEXT = "Give a folder that Cairn wrote, or restore this object from a backup."

__all__ = [
    "Record",
    "RecordLocation",
    "canonical_json",
    "load_json",
    "sha256_of",
    "stored_location",
]


class RecordLocation(NamedTuple):
    """Place of a record: its run and its name.

    Attributes:
        run: id of its run; None: unknown.
        key: name of the record in the run.
    """

    run: str | None
    key: str


def canonical_json(value: Any, *, path: object = "") -> bytes:
    """Return `value` as UTF-8 JSON with sorted keys and no spaces; equal values give equal bytes.

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
    """Return the SHA-256 of `data` as "sha256:…"."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def load_json(data: bytes, *, path: object) -> dict[str, Any]:
    """Return the parsed JSON object in `data`.

    Raises:
        CorruptionError: `data` is larger, or has more values, than a record may.
        UnsupportedFormatError: `data` is no JSON object.
    """
    check_json_size(data, path)
    try:
        value = json.loads(data)
        if b"\\u" in data:  # a lone surrogate can't be encoded, so not written again
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as exc:
        raise UnsupportedFormatError(
            "not JSON",
            path=path,
            expected="a JSON object",
            found=f"{len(data)} bytes that are none ({exc})",
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


def _memory_for(data: bytes) -> contextlib.AbstractContextManager[object]:
    """Return a lock for large records, whose parsing takes many times their size in memory."""
    return _large if len(data) > _LARGE_BYTES else contextlib.nullcontext()


def stored_location(data: bytes) -> RecordLocation | None:
    """Return the location that a stored record of any kind names; None if the record is damaged."""
    match = _CHECKSUM.search(data)
    if match is None or match[1].decode() != sha256_of(data[: match.start()] + data[match.end() :]):
        return None
    with contextlib.suppress(CorruptionError, UnsupportedFormatError):
        match load_json(data, path=""):
            case {"run": str(run), "key": str(key)}:
                return RecordLocation(run, key)
    return None


class Record(BaseModel):
    """Base of the records that the store keeps as JSON.

    A subclass sets `FORMAT`, which every object contains. Parsing refuses unknown keys, and any
    other version than `VERSION`, as its fields may mean something else. Beside the fields, the JSON
    has `checksum`, the SHA-256 of the same JSON without that key. A located record also has `run`
    and `key`, so that a copy under another name is refused.

    The value of a field whose name sorts before "checksum" must not contain such a key: the first
    one in the JSON has to be the record's own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1

    _location: RecordLocation | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        """Compare type and fields; the location does not count."""
        return type(other) is type(self) and other.__dict__ == self.__dict__

    @property
    def location(self) -> RecordLocation | None:
        """Place of the record; None if it belongs to no run, or has no place yet."""
        return self._location

    def with_location(self, location: RecordLocation) -> Self:
        """Return a copy of this record with the place `location`."""
        copy = self.model_copy()
        copy._location = location
        return copy

    def to_bytes(self) -> bytes:
        """Return the canonical JSON of this record, with its checksum.

        Raises:
            UnsupportedFormatError: a value is not JSON.
        """
        body = self.model_dump(by_alias=True) | {"format": self.FORMAT, "version": self.VERSION}
        if self._location is not None:
            body |= {"key": self._location.key, "run": self._location.run}
        return canonical_json(body | {"checksum": sha256_of(canonical_json(body))})

    def digest(self) -> str:
        """Return the SHA-256 of the stored bytes as "sha256:…"."""
        return sha256_of(self.to_bytes())

    @classmethod
    def parse(cls, data: bytes, path: object, location: RecordLocation | None = None) -> Self:
        """Return the record whose `to_bytes` returned `data`.

        Args:
            data: the stored bytes.
            path: the object, for errors.
            location: the place that was read; a record that names another one is refused. None:
                any.

        Raises:
            UnsupportedFormatError: the format, the version or some fields are not this class's.
            CorruptionError: the bytes are not what was written, are absent, or exceed their bound.
        """
        with _memory_for(data):
            return cls._parsed(data, path, location)

    @classmethod
    def _parsed(cls, data: bytes, path: object, location: RecordLocation | None) -> Self:
        body, stored = cls._read(data, path, location)
        try:
            record = cls.model_validate(body, context=free_json_context(data))
        except ValidationError as exc:
            errors = exc.errors(include_url=False, include_input=False)
            problems = "; ".join(
                f"{'.'.join(map(str, error['loc']))[:200] or '(object)'}: {error['msg']}"
                for error in errors[:20]
            )
            if {error["type"] for error in errors} <= _TOO_LONG:
                raise CorruptionError(
                    f"the {cls.FORMAT.rpartition('.')[2]} holds more than it may",
                    path=path,
                    expected="entries as few and as short as Cairn writes",
                    found=problems,
                    next_step=_NOT_OURS_NEXT,
                ) from exc
            raise UnsupportedFormatError(
                "fields that don't fit",
                path=path,
                expected=cls.FORMAT,
                found=problems,
                next_step=_NOT_OURS_NEXT,
            ) from exc
        record._location = stored
        return record

    @classmethod
    def body(
        cls, data: bytes, path: object, location: RecordLocation | None = None
    ) -> dict[str, Any]:
        """Return the fields in `data`, unvalidated.

        Format, version, checksum and location are checked.

        Raises:
            UnsupportedFormatError: `data` is no JSON, or has another format or version.
            CorruptionError: the bytes are not what was written, or are absent.
        """
        with _memory_for(data):
            return cls._read(data, path, location)[0]

    @classmethod
    def _read(
        cls, data: bytes, path: object, location: RecordLocation | None
    ) -> tuple[dict[str, Any], RecordLocation | None]:
        """Return the fields, and the location that the record names."""
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
        if type(found_version) is not int or found_version != cls.VERSION:
            raise UnsupportedFormatError(
                "unknown version",
                path=path,
                expected=f"{cls.FORMAT} version {cls.VERSION}",
                found=f"version {found_version!r}",
                next_step="Upgrade Cairn to the release that wrote it, or a later one.",
            )
        cls._check_stored(data, body.pop("checksum", None), path)
        stored = cls._stored_location(body, path)
        if location is not None:
            cls._check_location(stored, location, path)
        return body, stored

    @classmethod
    def _stored_location(cls, body: dict[str, Any], path: object) -> RecordLocation | None:
        if not {"run", "key"} & body.keys():
            return None
        run, key = body.pop("run", None), body.pop("key", None)
        if not isinstance(run, str) or not isinstance(key, str):
            raise cls._missing_location(path, f"run {run!r}, key {key!r}"[:200])
        return RecordLocation(run, key)

    @classmethod
    def _missing_location(cls, path: object, found: str) -> UnsupportedFormatError:
        return UnsupportedFormatError(
            "a record without its place",
            path=path,
            expected=f"{cls.FORMAT} with the texts 'run' and 'key'",
            found=found,
            next_step=_NOT_OURS_NEXT,
        )

    @classmethod
    def _check_location(
        cls, stored: RecordLocation | None, location: RecordLocation, path: object
    ) -> None:
        what = cls.FORMAT.rpartition(".")[2]
        if stored is None:
            raise cls._missing_location(path, "neither")
        if stored.key != location.key:
            raise CorruptionError(
                f"the {what} of another place",
                path=path,
                expected=f"the record {location.key}",
                found=f"the record {stored.key}",
                next_step="Put each back in its place, or see what `cairn repair` can do.",
            )
        if location.run is not None and stored.run != location.run:
            raise CorruptionError(
                f"the {what} of another run",
                path=path,
                expected=f"a record of the run with id {location.run!r}",
                found=f"one of the run with id {stored.run!r}",
                next_step="Put each back in its place, or see what `cairn repair` can do.",
            )

    @classmethod
    def _check_stored(cls, data: bytes, checksum: object, path: object) -> None:
        """Compare the checksum with the stored bytes themselves, not with a new encoding."""
        match = _CHECKSUM.search(data)
        found = sha256_of(data[: match.start()] + data[match.end() :]) if match else "none"
        if match is None or match.group(1).decode() != found:
            raise CorruptionError(
                f"the {cls.FORMAT.rpartition('.')[2]} is not what was written",
                path=path,
                expected=f"bytes whose checksum is {str(checksum)[:80]}"
                if checksum
                else "a checksum",
                found=found,
                next_step="Restore the object from a backup, or use another step.",
            )
