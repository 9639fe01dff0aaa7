"""JSON as an immutable, hashable mapping, which can be a static field of a pytree."""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from cairn.interop.errors import ArgumentError

__all__ = ["FrozenJSON"]


class FrozenJSON(Mapping[str, Any]):
    """Immutable JSON object; equality and hash are those of its canonical text."""

    __slots__ = ("_data", "text")

    def __init__(self, data: Mapping[str, Any] | None = None, *, name: str = "value") -> None:
        """Create it from a mapping of JSON values.

        Raises:
            ArgumentError: a value is not JSON; the message begins with `name`.
        """
        try:
            self.text = json.dumps(
                _plain(data or {}), sort_keys=True, separators=(",", ":"), allow_nan=False
            )
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                path=name,
                expected="a mapping of JSON values (text, finite numbers, booleans, lists, maps)",
                found=str(error),
            ) from error
        # Read back, so that the mapping holds what a checkpoint will return.
        self._data = MappingProxyType(json.loads(self.text))

    def to_dict(self) -> dict[str, Any]:
        """Return a copy as plain dicts and lists."""
        copied: dict[str, Any] = json.loads(self.text)
        return copied

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenJSON):
            return self.text == other.text
        if isinstance(other, Mapping):
            return dict(self._data) == dict(other)
        return NotImplemented

    def __reduce__(self) -> tuple[type["FrozenJSON"], tuple[dict[str, Any]]]:
        # A MappingProxyType can be neither copied nor pickled.
        return FrozenJSON, (self.to_dict(),)

    def __repr__(self) -> str:
        return f"FrozenJSON({self.text})"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"key {wrong[0]!r} is no text")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
