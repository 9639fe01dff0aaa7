"""Text of numbers, times and states on pages. Only `ago` reads the clock."""

import json
import math
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from markupsafe import Markup, escape

from cairn.service.schemas import Artifact, Operation
from cairn.storage.arrays.leaf_paths import keys_of
from cairn.storage.store.clock import utc_now

_UNITS: Final = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_OPERATIONS: Final = {
    "adopt": "Import",
    "convert": "Export",
    "gather": "Merge to one file",
    "gc": "Garbage removal",
    "retention": "Delete by policy",
    "verify": "Verification",
}
_RESTORES: Final = {"fork": "Fork", "rollback": "Rollback"}
_LARGE: Final = 1e6
_EXACT: Final = 1e15
_SMALL: Final = 1e-3
_ROOM: Final = 120
_DIGEST: Final = re.compile(r"((?:[a-z0-9]+:)?[0-9a-f]{12})[0-9a-f]{20,}")
_CODE: Final = re.compile(r"`([^`]+)`")


def apart(seconds: float) -> str:
    """Format a duration in the largest unit that fits: `12 min`."""
    for unit, name in _UNITS:
        if seconds >= unit:
            value = seconds / unit
            return f"{value:.0f} {name}" if value >= 10 else f"{value:.2g} {name}"
    return f"{seconds * 1000:.0f} ms" if seconds > 0 else "0 s"


def ago(moment: datetime) -> str:
    """Format the time since a moment (`5 min ago`), or until it (`in 5 min`)."""
    seconds = (utc_now() - moment).total_seconds()
    if abs(seconds) < 1:
        return "just now"
    return f"{apart(seconds)} ago" if seconds > 0 else f"in {apart(-seconds)}"


def moment(when: datetime) -> str:
    """Format a time in UTC, to the second."""
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def count(number: int) -> str:
    """Format a whole number in groups of three digits, with commas: `12,345`."""
    return f"{number:,}"


def figure(value: float | int | str | None, digits: int = 4) -> str:
    """Format a number to `digits` digits, with trailing zeros, so that columns line up.

    Digits are not grouped, so that a copied number can be pasted anywhere.
    """
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if value.is_integer() and abs(value) < _EXACT:
        return str(int(value))
    if not _SMALL <= abs(value) < _LARGE:
        return f"{value:.{digits - 1}e}"
    if abs(value) >= 10 ** (digits - 1):
        return str(round(value))
    return f"{value:#.{digits}g}"


def percent(part: float) -> str:
    """Format a fraction: `3.20 %`, `<0.1 %` for tiny ones above 0, and `×12` from 10 on."""
    if part >= 10:
        return f"\N{MULTIPLICATION SIGN}{part:,.0f}"
    if 0 < part < 0.001:
        return "<0.1 %"
    if part >= 0.9995 or part == 0:
        return f"{100 * part:.0f} %"
    return f"{100 * part:#.3g} %"


def brief(value: Any) -> str:
    """Shorten a record's value to fit a table cell. The API has the full value."""
    if isinstance(value, dict):
        said = {name: brief(inner) for name, inner in value.items() if inner is not None}
        return ", ".join(f"{name} {inner}" for name, inner in said.items() if inner)
    if isinstance(value, list):
        return ", ".join(map(brief, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return figure(value)
    text = str(value)
    if digest := _DIGEST.fullmatch(text):
        return f"{digest[1]}…"
    return text if len(text) <= _ROOM else f"{text[: _ROOM - 1]}…"


def entry(value: Any) -> str:
    """Format a value of a config or of other JSON for one line; long ones are cut."""
    if isinstance(value, str):
        return brief(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return brief(json.dumps(value, ensure_ascii=False, default=str))


def keys(path: str) -> str:
    """Join the keys of a path by "/", unescaped: a "/" within a key looks like a separator."""
    return "/".join(keys_of(path))


def export_name(artifact: Artifact) -> str:
    """Describe the files of an artifact in words."""
    if artifact.kind.value == "gather":
        return "One safetensors file"
    return "GGUF file" if artifact.options.get("format") == "gguf" else "Hugging Face files"


def is_known_operation(operation: Operation) -> bool:
    """Return False for the kinds of operations that only a newer server starts."""
    return operation.kind in _OPERATIONS or operation.kind == "restore"


def operation_name(operation: Operation) -> str:
    """Name the kind of an operation; an unknown kind is its own name."""
    if operation.kind == "restore":
        return _RESTORES.get(str(operation.request.get("mode")), "Fork")
    return _OPERATIONS.get(operation.kind, operation.kind)


def operation_title(operation: Operation) -> str:
    """Name an operation with its run and step: `Export of llama, step 400`."""
    run, step = operation.request.get("run"), operation.request.get("step")
    subject = f" of {run}" if run else ""
    return f"{operation_name(operation)}{subject}" + (f", step {step}" if step is not None else "")


def quoted(text: str) -> Markup:
    """Escape a sentence for HTML, and mark text in backticks as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


def pretty(value: Any) -> str:
    """Format a value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def shape(lengths: Sequence[int]) -> str:
    """Format the shape of an array: `4 × 128`, or `scalar` for no dimensions."""
    return " \N{MULTIPLICATION SIGN} ".join(map(str, lengths)) if lengths else "scalar"


def spec(entries: Sequence[str | Sequence[str] | None] | None) -> str:
    """Format a partition spec: the mesh axes of each dimension, `–` for an unsharded one."""
    if not entries or not any(entries):
        return "\N{EN DASH}"
    axes = [(axis,) if isinstance(axis, str) else tuple(axis or ()) for axis in entries]
    return ", ".join("\N{MULTIPLICATION SIGN}".join(axis) or "\N{EN DASH}" for axis in axes)
