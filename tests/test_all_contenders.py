"""The storage benchmark of all contenders runs: `make proofs`; `make test` has Cairn's own rows."""

import pytest

from benchmarks import storage_rows
from tests.test_benchmarks import check_numbers, measured, names_of

pytestmark = pytest.mark.timeout(900)  # some forty processes, half of which load torch


def test_storage_benchmark_writes_every_row_of_every_contender_with_its_figures(tmp_path_factory):
    results = measured(tmp_path_factory)
    found, expected = names_of(results, storage_rows.all_rows("file"))
    assert found == expected
    assert {name for name in found if storage_rows.is_peers(name)}
    check_numbers(results)
