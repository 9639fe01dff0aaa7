"""Benchmarks of storage, of the control plane, of jobs of many processes, and with all contenders:
`make proofs`.
"""

import json
import math
from functools import partial
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import pytest

from benchmarks import (
    accelerator,
    control_plane,
    control_plane_looks,
    control_plane_runs,
    many_hosts,
    many_hosts_plot,
    storage,
    storage_limits,
    storage_rows,
)
from examples.demo import servers
from tests.programs.program import run
from tests.service import planes
from tests.test_benchmarks import REPOSITORY, check_accelerator

pytestmark = pytest.mark.timeout(900)  # some forty processes, half of which load torch

CLIENTS = (2, 4)
OF_THE_DISK = {
    "async save until durable, of direct write": 1.2,
    "restore cold, of direct read": 1.15,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """The results of one round: one layer of a megabyte, two contenders at once."""
    folder = tmp_path_factory.mktemp("work")
    output = tmp_path_factory.mktemp("results") / "storage.json"

    def start(arguments, environment):
        return run(arguments, cwd=REPOSITORY, env=environment)

    options = ["--megabytes", "1", "--layers", "1", "--runs", "1", "--jobs", "2"]
    status = storage.main([*options, "--folder", str(folder), "--output", str(output)], start)
    assert status == 0
    assert list(folder.iterdir()) == []
    return output


def test_storage_benchmark_writes_every_row_of_every_contender(results):
    rows = json.loads(results.read_text())
    direct = storage_limits.can_read_and_write(results.parent)  # a file system in memory can't
    expected = [row for row in storage_rows.all_rows("file") if direct or not row.needs_direct_io]
    assert [row["row"] for row in rows] == [row.name for row in expected]
    assert any(storage_rows.is_peers(row.name) for row in expected)
    own = {row["row"]: row["budget"] for row in rows if row["budget"] is not None}
    assert own == {
        **({name: budget for name, budget in OF_THE_DISK.items() if direct}),
        "restore cold, of safetensors cold": 0.8,
        "restore right after a save": 1.0,
        "cost of a save to a donating loop, first": 0.7,
        "cost of a save to a donating loop, later": 0.7,
        "cost of a save to a donating loop, kept buffers, later": 0.4,
        "async save until durable": 0.95,
        "blocked, first save": 0.3,
        "blocked, later saves": 0.3,
        "blocked, donating step running": 0.3,
        "blocked, donating step running, later save": 0.3,
        "extra peak memory during a save": 0.1,
        "extra peak memory, donating step running": 1.1,
        "restore warm": 0.8,
        "restore onto half the devices": 1.1,
        "verify": 1.1,
        "LoRA step save": 1.1,
        "blocked, 50,000 small leaves": 1.5,
        "restore, 50,000 small leaves": 2.0,
        **{
            f"call of {call}, {which}": 2.0
            for call in (
                "EasyDeLState.save_state",
                "TrainState.save_state",
                "EasyDeLState.save_state of 30 layers",
            )
            for which in ("first", "later")
        },
    }


def test_storage_benchmark_rows_carry_numbers_and_their_reference(results):
    for row in json.loads(results.read_text()):
        assert set(row) == {"row", "seconds", "bytes", "reference", "ratio", "budget", "runs"}
        # What a save costs a loop is the difference of two times, which noise can turn around.
        differs = row["row"].startswith("cost of a save")
        assert row["seconds"] > 0 or differs
        assert isinstance(row["bytes"], int)
        assert row["reference"].pop("name")
        assert [*row["reference"]] in (["seconds"], ["bytes"])
        assert all(number > 0 or differs for number in row["reference"].values())
        assert math.isfinite(row["ratio"])
        assert len(row["runs"]) == 1


def test_storage_benchmark_tells_its_environment_and_draws_its_rows(results):
    environment = json.loads(results.with_suffix(".environment.json").read_text())
    assert environment["mesh"] == {"fsdp": 8}
    assert environment["leaves"] == 37
    drawn = ElementTree.parse(results.with_suffix(".svg"))
    texts = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    rows = json.loads(results.read_text())
    assert {row["row"] for row in rows} <= texts


@pytest.fixture(scope="module")
def control_plane_rows(tmp_path_factory):
    """As many runs as clients, each of which promotes in its own; MLflow is not installed here.

    Its eight servers are forked.
    """
    output = tmp_path_factory.mktemp("control-plane") / "rows.json"
    options = ["--runs", "4", "--steps", "4", "--turns", "3", "--idle", "0.1", "--alone", "0.1"]
    options += ["--clients", *map(str, CLIENTS), "--without-mlflow", "--json", str(output)]
    options += ["--looked", str(4 << 20), "--leaves", "50", "--listed", "400"]
    forked = partial(servers.control_plane, start=planes.start)
    with patch.object(servers, "control_plane", forked):
        assert control_plane.main(options) == 0
    return json.loads(output.read_text())["rows"]


def test_control_plane_benchmark_has_every_row_with_its_figures(control_plane_rows):
    loads = [row for row in control_plane_rows if row["p99_ms"] is not None]
    kinds = ("SQLite", "PostgreSQL", "SQLite, GCS double")
    expected = {
        (f"{row}, {kind}", clients)
        for row in control_plane.ROWS
        for kind in kinds
        for clients in CLIENTS
    }
    expected |= {(f"{row}, SQLite, in process", CLIENTS[0]) for row in control_plane.ROWS[:3]}
    expected |= {
        (f"{control_plane_runs.ROW}, {kind}", clients) for kind in kinds[:2] for clients in CLIENTS
    }
    expected |= {(control_plane_looks.SLICE, clients) for clients in (1, CLIENTS[0])}
    assert {(row["row"], row["clients"]) for row in loads} == expected
    for row in loads:
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["per_second"] > 0
    rest = [row["row"] for row in control_plane_rows if row["p99_ms"] is None]
    looks = [name for name in rest if name.startswith(("statistics", "diff", "plan"))]
    assert len(rest) - len(looks) == 3 * len(kinds)
    assert len(looks) == len(set(looks)) == 3 + 4 + 2


def test_accelerator_benchmark_has_a_figure_of_everybody_beside_a_row(tmp_path):
    rows = check_accelerator(tmp_path)
    beside = {peer["name"]: peer["value"] for row in rows for peer in row["beside"]}
    assert set(beside) == {
        *(accelerator.ORBAX, accelerator.TUNED),
        *("safetensors and device_put", "transformers, to the CPU"),
    }
    assert all(value > 0 for value in beside.values())


def test_benchmark_of_many_processes_counts_what_is_asked_and_read_once(tmp_path):
    output = tmp_path / "many_hosts.json"
    options = ["--counts", "2", "--vocabulary", "16384", "--simulated", "--json", str(output)]
    assert many_hosts.main(options) == 0
    rows = {row["row"]: row for row in json.loads(output.read_text())}
    for kind in ("sharded", "replicated"):
        read = rows[f"load, {kind}: values"]
        assert read["reference"] <= read["bytes"] <= read["budget"] * read["reference"]
        asked = rows[f"load, {kind}: metadata, any other process"]
        assert 0 < asked["requests"] <= asked["budget"]
    drawn = ElementTree.parse(output.with_suffix(".svg"))
    texts = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {title for title in many_hosts_plot.PANELS if "simulated" not in title} <= texts
