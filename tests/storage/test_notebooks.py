"""What a notebook shows of a run, a step and a checkpoint."""

from html.parser import HTMLParser

import numpy as np
import pytest

import cairn
from cairn import Checkpointer, CheckpointReader, Run, parse_uri
from cairn.storage.notebooks import html_table, never_raises, size_cell

HOSTILE = "<script>alert(1)</script>\"'&\x1b[2J\u202e"
ALLOWED = {"div", "table", "thead", "tbody", "tr", "th", "td"}


class Page(HTMLParser):
    """The tags, attributes and texts of some HTML."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.texts = set(), set(), []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        assert not any("url" in (value or "") for _, value in attrs)

    def handle_data(self, data):
        self.texts.append(data)


def seen(shown):
    """What is shown; nothing of it can act, ask for anything, or hide."""
    page = Page(shown)
    assert page.tags <= ALLOWED
    assert page.attributes <= {"style"}
    text = " ".join(page.texts)
    assert all(one.isprintable() for one in text)
    return text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    uri = tmp_path_factory.mktemp("notebook") / "run"
    cairn.create_run(str(uri), labels={"team": HOSTILE})
    with Checkpointer(str(uri)) as checkpointer:
        model = {HOSTILE: np.zeros((2, 3), np.float32), "kernel": np.ones(5, np.int8)}
        model |= {str(n): np.int32(n) for n in range(30)}
        for step in range(1, 26):
            checkpointer.save(step, {"model": model}, meta={}).wait()
    run = Run.open(uri)
    cairn.promote_step(run, 25, "production", expect=None)
    return run


def test_a_run_is_its_newest_steps_and_what_names_them(run):
    text = seen(run._repr_html_())
    assert f"Run {run.uri}" in text
    assert "25 listed" in text
    assert "production" in text
    assert "and 5 more" in text
    assert r"team=<script>alert(1)</script>&quot;" not in text  # as text, not as what stood for it
    assert r"""team=<script>alert(1)</script>"'&\x1b[2J\u202e""" in text


def test_a_step_is_what_is_known_of_it(run):
    info = run.step(25)
    text = seen(info._repr_html_())
    assert "Step 25 of attempt 1, listed" in text
    assert info.manifest_digest in text


def test_a_checkpoint_is_its_leaves_and_no_value_is_read(run, monkeypatch):
    info = run.step(25)
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
    monkeypatch.setattr(CheckpointReader, "read", None)
    monkeypatch.setattr(CheckpointReader, "blocks", None, raising=False)
    text = seen(reader._repr_html_())
    assert "32 leaves, 149 B" in text
    assert "and 12 more" in text


def test_what_is_gone_is_told_and_raises_nothing(tmp_path):
    text = seen(Run(parse_uri(tmp_path / "none"))._repr_html_())
    assert "RunNotFoundError" in text
    assert "none" in text


def test_a_damaged_run_is_told_and_raises_nothing(tmp_path):
    cairn.create_run(str(tmp_path / "run"))
    run = Run.open(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text("{")
    assert "run.json" in seen(run._repr_html_())


def test_an_error_that_cannot_even_be_told_raises_nothing():
    class Worst(Exception):
        def __str__(self):
            raise RuntimeError

    class Shown:
        @never_raises
        def _repr_html_(self):
            raise Worst

    assert "Worst" in seen(Shown()._repr_html_())


def test_colours_are_the_notebooks_own():
    shown = html_table("title", [("fact", 1)], ("column",), [(None,), ("x" * 500,)], more=3)
    assert "color:inherit" in shown
    assert "#" not in shown
    assert "rgb" not in shown
    assert len(seen(shown)) < 300  # a long text is cut


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [
        (None, None),
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (999_960, "1.0 MB"),
        (3 * 10**15, "3000.0 TB"),
    ],
)
def test_sizes_are_in_decimal_units(nbytes, told):
    assert size_cell(nbytes) == told
