"""Filters at random, and what they mean: an entry, as the API shows it, is let through or not."""

import math
from datetime import UTC, datetime

from hypothesis import strategies as st

from cairn.service.filters.expressions import All, AnyOf, Comparison, Has, Not, Path
from cairn.service.filters.fields import CHECKPOINT_FIELDS, Kind

KEYS = ("stage", "loss", "step", "a.b", 'say "hi"', "it's", "back\\slash", "é", "日本", "😀", "")
KEYS += ("eval/loss", " ", "$", "$.stage", "[0]", "'; DROP TABLE runs; --", "%", "*", "AND")
TEXTS = (
    "final",
    "Final",
    "",
    "1e-05",
    "1",
    "1.0",
    "nan",
    "true",
    "null",
    'a "b" \\',
    "é",
    "e\u0301",
    "%",
)
NUMBERS = (0.0, -0.0, 0.5, 1.0, -1.0, 0.1 + 0.2, 0.3, 2.0**53, 2.0**53 + 2, 5e-324, 1.7e308)
MOMENTS = tuple(datetime(2026, 1, day, 12, tzinfo=UTC) for day in (1, 2, 3))
ORDERED = ("=", "!=", "<", "<=", ">", ">=")

LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")

texts = st.sampled_from(TEXTS) | st.text(LETTERS, max_size=5)
keys = st.sampled_from(KEYS)
numbers = st.sampled_from((*NUMBERS, math.inf, -math.inf)) | st.floats(allow_nan=False)
integers = st.integers(-1, 12) | st.sampled_from((2**53, 2**53 + 1, 2**63 - 1, -(2**63) + 1))
moments = st.sampled_from(MOMENTS) | st.datetimes(timezones=st.just(UTC))


@st.composite
def conditions(draw):
    name = draw(st.sampled_from(sorted(CHECKPOINT_FIELDS)))
    field = CHECKPOINT_FIELDS[name]
    path = Path(name, draw(keys) if field.keyed else None)
    if field.kind is Kind.NAMES:
        return Has(path, draw(st.none() | st.sampled_from(("best", "production", "nobody"))))
    if draw(st.booleans()) and draw(st.booleans()):
        return Has(path if draw(st.booleans()) else Path(name))
    values = {
        Kind.TEXT: texts,
        Kind.CHOICE: st.sampled_from(field.choices or ("",)),
        Kind.INTEGER: integers,
        Kind.NUMBER: numbers,
        Kind.MOMENT: moments,
    }[field.kind]
    operators = ORDERED if field.kind in (Kind.INTEGER, Kind.NUMBER, Kind.MOMENT) else ORDERED[:2]
    return Comparison(path, draw(st.sampled_from(operators)), draw(values))


def _joined(parts):
    several = st.lists(parts, min_size=2, max_size=4).map(tuple)
    return parts.map(Not) | several.map(All) | several.map(AnyOf)


filters = st.recursive(conditions(), _joined, max_leaves=8)


def holds(expression, entry):
    """Whether a filter lets an entry through, by Python's own comparisons."""
    match expression:
        case Not(part=part):
            return not holds(part, entry)
        case All(parts=parts):
            return all(holds(part, entry) for part in parts)
        case AnyOf(parts=parts):
            return any(holds(part, entry) for part in parts)
        case Has(path=path, member=member):
            found = entry[path.field]
            if path.field == "aliases":
                return bool(found) if member is None else member in found
            if isinstance(found, dict):
                return bool(found) if path.key is None else path.key in found
            return found is not None
        case Comparison(path=path, operator=operator, value=value):
            found = entry[path.field]
            found = found.get(path.key) if path.key is not None else found
            if found is None or found != found:
                return False
            return {
                "=": found == value,
                "!=": found != value,
                "<": operator == "<" and found < value,
                "<=": operator == "<=" and found <= value,
                ">": operator == ">" and found > value,
                ">=": operator == ">=" and found >= value,
            }[operator]
