"""Every page in dark colors too, and in states that few see; `make proofs` looks at all of them."""

import pytest

from tests.service.dashboard.test_every_page import (
    IN_THE_DARK,
    OTHER_STATES,
    PAGES,
    look_at,
    visitor,
)

__all__ = ["visitor"]


@pytest.mark.parametrize("path", [path for path in PAGES if path not in IN_THE_DARK])
def test_page_can_be_read_in_the_dark(visitor, path):
    look_at(visitor, path, in_the_dark=True)


@pytest.mark.parametrize("path", OTHER_STATES)
def test_page_in_another_state_can_be_read_by_everybody(visitor, path):
    look_at(visitor, path, in_the_dark=True)
