"""Sentences about invalid fields. Regular expressions are described in words."""

from collections.abc import Mapping
from typing import Any, Final

from cairn.service.policies import KIND_PATTERN, WEBHOOK_PATTERN
from cairn.service.schemas import (
    ALIAS_PATTERN,
    ARTIFACT_PATTERN,
    AXIS_PATTERN,
    CHECKPOINT_PATTERN,
    ID_PATTERN,
    NAME_PATTERN,
    OPERATION_PATTERN,
    PLAIN_PATTERN,
    REASON_PATTERN,
    RUN_GLOB_PATTERN,
    RUN_PATTERN,
)

PATTERN_MISMATCH: Final = "string_pattern_mismatch"

_RULES: Final[Mapping[str, str]] = {
    ALIAS_PATTERN: "use letters, digits, '.', '_' and '-'; a number alone is a step, not an alias",
    AXIS_PATTERN: "use letters, digits and '_', 64 at most, starting with a letter or '_'",
    NAME_PATTERN: "use letters, digits, '.', '_' and '-', 128 at most, starting with a letter or "
    "a digit",
    PLAIN_PATTERN: "it has a NUL character",
    RUN_PATTERN: "use letters, digits, '.', '_', '=', '+' and '-', 128 at most, starting with a "
    "letter or a digit",
    OPERATION_PATTERN: "ids of operations are op- and 32 of 0 to 9 and a to f",
    CHECKPOINT_PATTERN: "a step is a number without leading zeros, an alias has letters, digits, "
    "'.', '_' and '-', 64 at most",
    ID_PATTERN: "ids of keys and webhooks are 12 of a to z and 2 to 7",
    ARTIFACT_PATTERN: "ids of artifacts have letters, digits, '.', '_', '~', '=', '+' and '-', 512 "
    "at most, starting with a letter or a digit",
    RUN_GLOB_PATTERN: "use letters, digits, '.', '_', '=', '+', '-', and '*' and '?' as wildcards, "
    "128 at most",
    KIND_PATTERN: "kinds are schedule, retention, automation and gate",
    WEBHOOK_PATTERN: "use http:// or https://, without a user and without spaces",
    REASON_PATTERN: "it may not be empty, and may have no NUL character",
}
"""What a text that matches a pattern looks like."""

_SHOWN: Final = 100


def field_detail(error: Mapping[str, Any], *, is_value_shown: bool = True) -> str:
    """Describe an error of pydantic in a sentence, without a regular expression.

    Args:
        error: Entry of `ValidationError.errors()`.
        is_value_shown: Add the refused value, unless it is a container.
    """
    if error["type"] == "json_invalid":
        return f"this is not JSON: {error['ctx']['error']}"
    actual = error.get("input")
    if error["type"] == PATTERN_MISMATCH:
        # The parts of a pattern of alternatives are described one by one.
        pattern = str(error["ctx"]["pattern"])
        rules = [rule for known, rule in _RULES.items() if pattern == known]
        rules = rules or [rule for known, rule in _RULES.items() if known in pattern]
        rule = f": {rules[0]}" if rules else ""
        return f"{_clipped(actual)} can't be used here{rule}"
    is_plain = isinstance(actual, str | int | float | None) and error["type"] != "missing"
    if not is_value_shown or not is_plain:
        return str(error["msg"])
    return f"{error['msg']}, found {_clipped(actual)}"


def _clipped(actual: object) -> str:
    return repr(actual[:_SHOWN] if isinstance(actual, str) else actual)[:_SHOWN]
