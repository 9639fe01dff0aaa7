"""Numbers of benchmarks on a page are those that the benchmarks wrote."""

import json
import re

import pytest

from tests.documentation.pages import ROOT, pages

MARK = re.compile(r"<!-- results: ([\w.]+) -->")
MARKED = [(page, name) for page in pages() for name in MARK.findall(page.read_text())]


@pytest.mark.parametrize(("page", "name"), MARKED, ids=lambda one: getattr(one, "stem", one))
def test_a_table_has_a_row_for_each_result(page, name, hooks):
    results = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    rows = results["rows"] if isinstance(results, dict) else results
    shown = hooks.on_page_markdown(
        f"<!-- results: {name} -->\n", page=page, config=None, files=None
    )
    lines = [line for line in shown.splitlines() if line.startswith("| ")]
    assert len(lines) == len(rows) + 1
    for line, row in zip(lines[1:], rows, strict=True):
        assert line.startswith(f"| {row.get('row') or row['fault']} |")


def test_no_table_is_forgotten(hooks):
    assert len(MARKED) == 10
    for page, _ in MARKED:
        text = page.read_text()
        assert not MARK.search(hooks.on_page_markdown(text, page=page, config=None, files=None)), (
            page.name
        )


def test_the_questions_that_people_come_with_have_a_page():
    """The words are theirs; where a link leads is checked when the site is built."""
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    section = home.partition("## Questions that people ask")[2].partition("\n## ")[0]
    for words in (
        "bytes",
        "dies during a save",
        "transformers",
        "undo a promotion",
        "past one machine",
        "cost me",
        "Who changed production",
    ):
        (row,) = [line for line in section.splitlines() if words in "".join(line.split("|")[1:2])]
        assert re.search(r"\]\([\w/-]+\.md", row), words


def test_every_plot_that_a_page_shows_is_there(hooks):
    from results_tables import plots

    made = {f"../{path}" for path in plots()}
    for page in {page for page, name in MARKED if name != "clicks.json"}:  # a table alone
        shown = set(re.findall(r"!\[[^\]]*\]\((\S+\.svg)\)", page.read_text()))
        assert shown <= made
        assert shown
