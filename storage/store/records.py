"""What all JSON objects of the store share: a format, a version, a checksum, one encoding."""

import hashlib
import json
import re
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from cairn.storage.errors import CorruptionError, UnsupportedFormatError

_CHECKSUM = re.compile(rb'"checksum":"(sha256:[0-9a-f]{64})",')
"""As canonical JSON has it: in text, every quotation mark would have a backslash before it."""

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

    A subclass sets `FORMAT`, which is written with every object. Unknown keys are refused at our
    version; a newer version is refused by name, since it may mean other things. Beside the fields
    the JSON has `checksum`: the SHA-256 of the same JSON without it. An object of version 1 has
    none, and is written again as it was read.

    A field whose name sorts before "checksum" must hold nothing with such a key: the first one in
    the JSON has to be ours.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 2

    _version: int = PrivateAttr(2)

    def to_bytes(self) -> bytes:
        """The canonical JSON of this object.

        Raises:
            UnsupportedFormatError: a value is not JSON.
        """
        known = self.model_dump(exclude_unset=self._version == 1)  # fields that came later: unset
        body = known | {"format": self.FORMAT, "version": self._version}
        data = canonical_json(body)
        if self._version == 1:
            return data
        return canonical_json(body | {"checksum": sha256_of(data)})

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
            CorruptionError: the bytes are not what was written.
        """
        body, version = cls._read(data, path)
        try:
            record = cls.model_validate(body)
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
        if version == 1:
            record._version = 1
        return record

    @classmethod
    def body(cls, data: bytes, path: object) -> dict[str, Any]:
        """The fields in `data`, unchecked but for the format and the version.

        Raises:
            UnsupportedFormatError: no JSON, another format, or a newer version.
            CorruptionError: the bytes are not what was written.
        """
        return cls._read(data, path)[0]

    @classmethod
    def _read(cls, data: bytes, path: object) -> tuple[dict[str, Any], int]:
        """The fields, and the version they are of."""
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
        told = body.pop("checksum", None)
        if found_version > 1 or told is not None:
            cls._check_stored(data, told, found_version, path)
        return body, found_version

    @classmethod
    def _check_stored(cls, data: bytes, told: object, version: int, path: object) -> None:
        """Compare the checksum with the bytes as they are stored, to the last bit."""
        match = _CHECKSUM.search(data)
        found = sha256_of(data[: match.start()] + data[match.end() :]) if match else "none"
        if version == 1 or match is None or match.group(1).decode() != found:
            raise CorruptionError(
                f"the {cls.FORMAT.rpartition('.')[2]} is not what was written",
                path=path,
                expected=f"bytes whose checksum is {str(told)[:80]}" if told else "a checksum",
                found=found,
                next_step="Restore the object from a backup, or use another step.",
            )
