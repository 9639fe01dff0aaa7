"""What the threat model says that holds is held by a test."""

import re

from tests.documentation.pages import ROOT


def test_every_sentence_of_the_threat_model_has_a_test_that_is_there():
    page = (ROOT / "docs/explanation/threat-model.md").read_text()
    rows = [
        line.strip("| \n").split(" | ")
        for table in re.findall(r"\| what holds \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
        for line in table.splitlines()
    ]
    assert len(rows) > 30
    named = {sentence: re.findall(r"`(test_\w+)`", tests) for sentence, tests in rows}
    assert [sentence for sentence, tests in named.items() if not tests] == []
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    made = set(re.findall(r"^(?:async )?def (test_\w+)\(", sources, re.MULTILINE))
    assert {test for tests in named.values() for test in tests} - made == set()
