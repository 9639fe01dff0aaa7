"""The page on troubleshooting has a section for every error, and an anchor for every problem."""

import re

from cairn import EasyDeLState, InstallationError, InteropError, StorageError, create_app
from cairn.service.errors import ProblemError, ServiceError
from tests.documentation.pages import DOCS, ROOT

LOADED = (EasyDeLState, create_app)
"""With these come all modules that have errors of their own."""

PAGE = (DOCS / "howto" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)
ANCHORS = re.findall(r"`([a-z-]+)`\{ #([a-z-]+) \}", PAGE)
NEVER_SEEN = {
    "ClientError",
    "InteropError",
    "JobFailedError",
    "PartsFailedError",
    "ServiceError",
    "StateError",
}
"""Bases alone, and what a failed job stores until it is read."""
SLUGS = (
    re.compile(r'\b[1-5]\d\d, "([a-z-]+)", "[A-Z]'),  # an error's class, or a row of a table
    re.compile(r'\b[1-5]\d\d, "([a-z-]+)", (?:title|_NO_DATABASE)'),
    re.compile(r'ExitStatus\.\w+,\s*"([a-z-]+)"'),
    re.compile(r'urn:cairn:problem:([a-z-]+)"'),
    re.compile(r'\{_PREFIX\}([a-z-]+)"'),
)
OF_THE_FRAMEWORK = {"method-not-allowed", "request-entity-too-large", "content-too-large"}
"""Made of HTTP's own names of statuses, two of which Python has for 413."""


def with_subclasses(kind):
    return {kind}.union(*map(with_subclasses, kind.__subclasses__()))


def seen_in_python():
    """The errors that a program or a person meets by their classes."""
    kinds = with_subclasses(StorageError) | with_subclasses(InteropError) | {InstallationError}
    kinds |= with_subclasses(ServiceError) - with_subclasses(ProblemError)
    ours = {kind.__name__ for kind in kinds if kind.__module__.startswith("cairn.")}
    return {name for name in ours if not name.startswith("_")} - NEVER_SEEN


def seen_over_http():
    """The last part of every problem's type, as the code of the service writes them."""
    found = set(OF_THE_FRAMEWORK)
    for path in sorted((ROOT / "service").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found |= {slug for pattern in SLUGS for slug in pattern.findall(text)}
    return found


def test_every_error_has_its_section():
    assert len(seen_in_python()) > 45
    assert set(SECTIONS) == seen_in_python()
    assert len(SECTIONS) == len(set(SECTIONS))


def test_every_problem_has_its_anchor():
    kinds = with_subclasses(ProblemError) - {ProblemError}
    slugs = {kind.slug for kind in kinds if kind.__module__.startswith("cairn.")}
    assert slugs <= seen_over_http()
    assert {anchor for _, anchor in ANCHORS} == seen_over_http()
    assert len(ANCHORS) == len({anchor for _, anchor in ANCHORS})
    assert [name for name, anchor in ANCHORS if name != anchor] == []
