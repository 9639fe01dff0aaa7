"""Examples with all of the model that they name: `make proofs`; `make test` gives them a part."""

import pytest

from tests.examples.test_examples import OF_A_MODEL, python, run_example

__all__ = ["python"]  # the fixture


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_example_runs_with_all_layers(name, python, tmp_path, tmp_path_factory):
    run_example(name, [], python, tmp_path, tmp_path_factory.mktemp("torch"))
