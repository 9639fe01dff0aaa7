import re
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.service.errors import InvalidRequestError
from cairn.service.filters.expressions import All, AnyOf, Comparison, Has, Not, Path, quote
from cairn.service.filters.fields import AUDIT_FIELDS, CHECKPOINT_FIELDS
from cairn.service.filters.search import Search
from tests.service.filters.expressions import filters


def parse(text):
    return Search.parse(text, "", CHECKPOINT_FIELDS).filter


def parse_order(text):
    return Search.parse("", text, CHECKPOINT_FIELDS).order


def refusal(text):
    with pytest.raises(InvalidRequestError) as refused:
        parse(text)
    assert refused.value.errors == [
        {"field": "query.filter", "detail": refused.value.detail.removeprefix("query.filter: ")}
    ]
    return refused.value.detail


@given(filters)
def test_what_a_filter_means_is_read_back_from_its_text(expression):
    assert parse(str(expression)) == expression


@given(st.text() | st.text("labels.step=<>!:*\"\\' ()ANDORNT01.-", max_size=60))
def test_any_text_is_a_filter_or_is_refused_with_a_place(text):
    try:
        found, complaint = parse(text), None
    except InvalidRequestError as exc:
        found, complaint = None, exc.detail
    assert complaint is None or re.match(r"query\.filter: at character \d+: expected ", complaint)
    assert found is None or parse(str(found)) == found


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_between_quotes_is_itself(text):
    assert parse(f"labels.{quote(text)} = {quote(text)}") == Comparison(
        Path("labels", text), "=", text
    )


def test_conditions_are_joined_as_they_are_written():
    final = Comparison(Path("labels", "stage"), "=", "final")
    low = Comparison(Path("metrics", "loss"), "<", 0.5)
    late = Comparison(Path("step"), ">=", 1000)
    assert parse('labels.stage = "final" AND metrics.loss < 0.5 AND step >= 1000') == All(
        (final, low, late)
    )
    assert parse("labels.stage=final OR NOT metrics.loss<.5") == AnyOf((final, Not(low)))
    assert parse("(labels.stage='final' OR step>=1000)AND NOT(metrics.loss<5e-1)") == All(
        (AnyOf((final, late)), Not(low))
    )
    assert parse("NOT step >= 1000 AND metrics.loss < 0.5") == All((Not(late), low))


@pytest.mark.parametrize("text", ["", " ", "\n\t"])
def test_nothing_is_no_filter(text):
    assert parse(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("labels:stage", Has(Path("labels", "stage"))),
        ("labels.stage:*", Has(Path("labels", "stage"))),
        ('metrics:"eval.loss"', Has(Path("metrics", "eval.loss"))),
        ("metrics:eval/loss", Has(Path("metrics", "eval/loss"))),
        ("labels:*", Has(Path("labels"))),
        ('labels:"*"', Has(Path("labels", "*"))),
        ("aliases:production", Has(Path("aliases"), "production")),
        ("aliases : *", Has(Path("aliases"))),
        ("created:*", Has(Path("created"))),
    ],
)
def test_colon_asks_whether_there_is_one(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-01T12:00:00Z",
        '"2026-01-01T12:00:00Z"',
        "'2026-01-01t14:00:00.000+02:00'",
        "2026-01-01T06:30:00-05:30",
    ],
)
def test_times_of_any_zone_are_moments(text):
    found = parse(f"created > {text}")
    assert found.value == datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(0)))
    assert found.value.tzinfo is UTC


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "step = 1 AND stpe = 2",
            r"at character 14: expected a field: .*\(did you mean step",
        ),
        ("step = 1 step = 2", r"at character 10: expected AND, OR or the end; found 'step = 2'"),
        ("step = 1 and step = 2", r"at character 10: .* \(did you mean AND\?\); found 'and step"),
        ("step = 1 AND step = 2 OR step = 3", r"at character 23: expected AND, or parentheses"),
        ("(step = 1", r"at character 10: expected AND, OR or \); found its end"),
        ("step = 1)", r"at character 9: expected AND, OR or the end; found '\)'"),
        ("step", r"at character 5: expected <= >= != < > =, step:\*; found its end"),
        ("step =", r"at character 7: expected a whole number for step; found its end"),
        ("step = 1.5", r"at character 8: expected a whole number for step, in digits; found '1.5'"),
        ('step = "1"', r"expected a whole number for step, without quotes; found '\"1\"'"),
        (f"step = {2**63}", rf"expected a whole number for step of at most {2**63 - 1}"),
        ("step = ١", r"expected a whole number for step, in digits"),
        ("metrics.loss < nan", r"for metrics.\"loss\": nothing is equal to NaN"),
        ("metrics.loss < 1e999", r"expected a number for metrics.\"loss\" within float64"),
        ("metrics.loss < 1_000", r"such as 12, -0.5, 1e-3 or inf; found '1_000'"),
        ("metrics.loss < low", r"expected a number for metrics.\"loss\", such as"),
        ("metrics < 3", r"at character 9: expected metrics.NAME, metrics:NAME or metrics:\*"),
        ("labels.a.b = c", r"at character 9: expected quotes around a name that has dots"),
        ("labels.stage < 3", r"expected != =, labels.\"stage\":\*; found '< 3'"),
        ("labels.stage = *", r"a text \* stands in quotes; found '\*'"),
        ('labels.stage = "fin', r"at character 16: expected text .* quotes that are closed"),
        ('labels.stage = "a\\n"', r"nothing else may follow one"),
        ("labels. stage = a", r"at character 8: expected a name of one of labels; between quotes"),
        ("labels.stage:x", r"at character 14: expected \* after labels.\"stage\":"),
        ("aliases = production", r"expected aliases:\* or aliases:NAME; found '= production'"),
        ("state = listd", r"expected one of listed, .* \(did you mean listed\?\)"),
        ("step.loss = 3", r"at character 5: expected an operator: step has no parts"),
        ("created > 2026-01-01", r"expected a time for created, with its zone, such as"),
        ("created > 2026-01-01T00:00:00", r"expected a time for created, with its zone"),
        ("created > 2026-02-31T00:00:00Z", r"expected a time for created, with its zone"),
        ("created > 2026-01-01T00:00:00.1234567Z", r"expected a time for created"),
        ("created > 0001-01-01T00:00:00+14:00", r"expected a time for created"),
        ("verified = true", r"expected a time for verified, with its zone"),
        ("size > 3", r"a checkpoint's size is `bytes`"),
        ("(" * 20 + "step = 1" + ")" * 20, r"at character 18: expected at most 16 parentheses"),
        ("NOT " * 20 + "step = 1", r"expected at most 16 parentheses and NOTs in each other"),
        (" OR ".join(["step=1"] * 51), r"at most 50 conditions"),
        ("step = " + "1" * 3000, r"expected 2000 characters at most, found 3007"),
    ],
)
def test_what_is_no_filter_is_refused_where_it_is_not(text, complaint):
    assert re.search(complaint, refusal(text)), refusal(text)


def test_fields_are_those_of_the_list():
    assert Search.parse("caller = ci", "", AUDIT_FIELDS)
    with pytest.raises(InvalidRequestError, match="expected a field: at, caller, action"):
        Search.parse("step = 1", "", AUDIT_FIELDS)


def test_order_is_read_as_it_is_written():
    terms = parse_order('metrics.loss  desc ,step,labels."a.b" asc')
    assert [(term.path, term.descending) for term in terms] == [
        (Path("metrics", "loss"), True),
        (Path("step"), False),
        (Path("labels", "a.b"), False),
    ]
    assert parse_order(", ".join(map(str, terms))) == terms
    assert parse_order(" ") == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("step,", r"at character 6: expected a field: step, .*; found its end"),
        ("step descending", r"at character 6: expected asc, desc, a comma or the end"),
        ("step, step desc", r"at character 7: expected a field that is not named twice"),
        ("metrics", r"at character 8: expected the name of one of them: metrics.NAME"),
        ("aliases", r"at character 1: expected a field: step, "),
        ("step, attempt, state, created, bytes", r"at character 32: expected at most 4 fields"),
        ("step " * 500, r"expected 2000 characters at most, found 2500"),
    ],
)
def test_what_is_no_order_is_refused_where_it_is_not(text, complaint):
    with pytest.raises(InvalidRequestError, match=complaint):
        parse_order(text)


def test_searches_have_one_mark_if_they_mean_the_same():
    def mark(filter, order_by=""):
        return Search.parse(filter, order_by, CHECKPOINT_FIELDS).mark

    assert mark("") == ""
    assert mark("step=1") == mark(" step  = 1 ") == mark("(step = +1)")
    marks = [mark("step=1"), mark("step=2"), mark("step=1", "step"), mark("step=1", "step desc")]
    assert len(set(marks)) == 4
