"""Pages whose code takes long runs as it stands; `make test` runs that of the others."""

import pytest

from tests.test_docs import LONG, run_page


@pytest.mark.parametrize("name", LONG)
def test_code_of_a_page_that_takes_long_runs(name, tmp_path):
    run_page(name, tmp_path)
