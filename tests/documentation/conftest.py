"""The build's hook, as MkDocs loads it."""

import importlib
import sys

import pytest

from tests.documentation.pages import DOCS


@pytest.fixture(scope="session")
def hooks():
    folder = str(DOCS / "hooks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("generated_pages")
    finally:
        sys.path.remove(folder)
