"""What tables say that holds is held by a test: the threat model, and what is said of records."""

import re

import pytest

from tests.documentation.pages import ROOT


@pytest.fixture(scope="module")
def made():
    """The names of all tests."""
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return set(re.findall(r"^(?:async )?def (test_\w+)\(", sources, re.MULTILINE))


@pytest.mark.parametrize(
    ("page", "least"), [("explanation/threat-model.md", 30), ("howto/verify.md", 20)]
)
def test_every_sentence_that_holds_has_a_test_that_is_there(made, page, least):
    text = (ROOT / "docs" / page).read_text()
    rows = [
        line.strip("| \n").split(" | ")
        for table in re.findall(r"\| what holds \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", text)
        for line in table.splitlines()
    ]
    assert len(rows) > least
    named = {sentence: re.findall(r"`(test_\w+)`", tests) for sentence, tests in rows}
    assert [sentence for sentence, tests in named.items() if not tests] == []
    assert {test for tests in named.values() for test in tests} - made == set()
