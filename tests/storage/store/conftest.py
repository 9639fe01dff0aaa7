"""Trouble that a store gets over, without the pauses."""

import pytest

from tests.gcs.impatience import impatient


@pytest.fixture(scope="package", autouse=True)
def _impatient():
    with impatient():
        yield
