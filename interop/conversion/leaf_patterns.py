"""Patterns of leaves' paths with placeholders, such as "model/layers_{layer}/{path:path}"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter

from cairn.interop.errors import ArgumentError

__all__ = ["LeafPattern"]


class LeafPattern:
    """Pattern of whole paths.

    "{name}" stands for a segment of the path or a part of one, "{name:path}" for any number of
    segments, "{{" and "}}" for braces.

    Attributes:
        text: the pattern.
        names: names of the placeholders.
    """

    def __init__(self, text: str) -> None:
        """Parse the pattern.

        Raises:
            ArgumentError: the text is malformed.
        """
        self.text = text
        parts, expression = [], ""
        try:
            for literal, name, kind, conversion in Formatter().parse(text):
                parts.append((literal, name))
                expression += re.escape(literal)
                if name is None:
                    continue
                if not name.isidentifier() or kind not in ("", "path") or conversion:
                    raise ValueError(f"a placeholder {{{name}}}")
                same = name in (before for _, before in parts[:-1])
                chars = ".+" if kind == "path" else "[^/]+"
                expression += f"(?P={name})" if same else f"(?P<{name}>{chars})"
        except (ValueError, TypeError, AttributeError) as exc:
            raise ArgumentError(
                path="map",
                expected='a path such as "model/layers_{layer}/kernel" or "model/{path:path}"',
                found=f"{text!r}: {exc}",
            ) from exc
        self._parts = parts
        self._expression = re.compile(expression, re.DOTALL)
        self.names = frozenset(name for _, name in parts if name is not None)

    def match(self, path: str) -> dict[str, str] | None:
        """Return what the placeholders stand for in a path; None if it does not match."""
        match = self._expression.fullmatch(path)
        return None if match is None else match.groupdict()

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the path for some values; placeholders without one stay in it."""
        return "".join(
            literal + ("" if name is None else values.get(name, f"{{{name}}}"))
            for literal, name in self._parts
        )
