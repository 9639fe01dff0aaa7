"""Pictures of the dashboard are shown, described in words, and small enough to be carried along."""

import re
from pathlib import Path

import pytest

from tests.documentation.pages import DOCS, pages

PICTURES = sorted((DOCS / "images").glob("*.png"))
MOST_BYTES = 150_000  # what scripts/screenshots.py refuses to go beyond
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)]+\.png)\)")


def test_there_are_pictures_of_the_dashboard():
    assert PICTURES


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_picture_is_small_and_every_page_that_shows_it_says_what_it_is(picture: Path):
    assert picture.stat().st_size <= MOST_BYTES
    words = [
        text
        for page in pages()
        for text, link in SHOWN.findall(page.read_text(encoding="utf-8"))
        if (page.parent / link).resolve() == picture
    ]
    assert words, f"no page shows {picture.name}"
    assert all(len(text.split()) >= 4 for text in words)
