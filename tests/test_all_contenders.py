"""Benchmarks run with all contenders: `make proofs`; `make test` has Cairn's own rows."""

import pytest

from benchmarks import accelerator, storage_rows
from tests.test_benchmarks import check_accelerator, check_numbers, measured, names_of

pytestmark = pytest.mark.timeout(900)  # some forty processes, half of which load torch


def test_storage_benchmark_writes_every_row_of_every_contender_with_its_figures(tmp_path_factory):
    results = measured(tmp_path_factory)
    found, expected = names_of(results, storage_rows.all_rows("file"))
    assert found == expected
    assert {name for name in found if storage_rows.is_peers(name)}
    check_numbers(results)


def test_accelerator_benchmark_has_a_figure_of_everybody_beside_a_row(tmp_path):
    rows = check_accelerator(tmp_path)
    beside = {peer["name"]: peer["value"] for row in rows for peer in row["beside"]}
    assert set(beside) == {
        *(accelerator.ORBAX, accelerator.TUNED),
        *("safetensors and device_put", "transformers, to the CPU"),
    }
    assert all(value > 0 for value in beside.values())
