"""Examples and loops that take long: `make proofs` runs them, and `make test` the others."""

import pytest

from tests.examples.test_examples import LONG, python, run_example
from tests.examples.test_loops import DIFFS, SHORT, check_changed_loop

__all__ = ["python"]  # the fixture


@pytest.mark.parametrize("name", LONG)
def test_example_that_takes_long_runs_and_its_checks_hold(name, python, tmp_path, tmp_path_factory):
    run_example(name, python, tmp_path, tmp_path_factory.mktemp("torch"))


@pytest.mark.parametrize("name", sorted({*DIFFS} - {SHORT}))
def test_a_changed_loop_goes_on_to_the_numbers_that_the_loop_had(name, tmp_path):
    check_changed_loop(name, tmp_path)
