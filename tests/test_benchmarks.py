"""Benchmarks run, at a size whose figures mean nothing, and leave nothing behind."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import (
    accelerator,
    many_hosts,
    many_hosts_plot,
    storage_rows,
)
from tests.devices import xla_flags
from tests.multi_process.seams import straggler_log
from tests.programs.program import run

pytestmark = pytest.mark.timeout(900)  # some twenty processes, half of which load torch

REPOSITORY = Path(__file__).resolve().parent.parent


def test_ratio_is_taken_within_each_round():
    row = next(row for row in storage_rows.all_rows("file") if row.name == "verify")
    seconds = [(1.0, 2.0), (9.0, 3.0), (4.0, 4.0)]
    rounds = [
        {
            row.value.measurement: {"seconds": own, "bytes": 7},
            row.reference.measurement: {"seconds": reference},
        }
        for own, reference in seconds
    ]
    result = row.result(rounds)
    assert result["ratio"] == 1.0  # of 0.5, 3.0, 1.0; the medians' ratio would be 4 / 3
    assert result["seconds"] == 4.0
    assert result["reference"] == {"name": "one read of the bytes, one thread", "seconds": 3.0}
    assert result["runs"] == [1.0, 9.0, 4.0]


def test_row_whose_measurement_failed_is_left_out():
    row = next(row for row in storage_rows.all_rows("file") if row.name == "verify")
    assert row.result([{row.value.measurement: {"seconds": 1.0, "bytes": 7}}]) is None


def test_simulated_processes_run_the_real_code_and_stay_within_budgets(tmp_path, monkeypatch):
    """A few of them, with one layer; the real rows of the file stay."""
    monkeypatch.setattr(straggler_log, "FIRST_LOG_SECONDS", 0.2)
    output = tmp_path / "many_hosts.json"
    real = {"row": "save", "processes": 2, **dict.fromkeys(("requests", "bytes", "ratio"), 7)}
    output.write_text(json.dumps([real]))
    options = ["--counts", "--simulated", "8", "--replicas", "1", "4", "--layers", "1"]
    assert many_hosts.main([*options, "--latency", "0.001", "--json", str(output)]) == 0
    first, *rows = json.loads(output.read_text())
    assert first == real
    found = {row["row"].removeprefix("simulated "): row for row in rows}
    stored = found["save: objects"]["bytes"]
    layer = 3 * 53_248 * 16_384 + 2 * 16_384**2 + 2 * 16_384 * 1_024 + 2 * 16_384
    elements = 2 * 128_256 * 16_384 + 16_384 + layer
    assert 3 * 4 * elements < stored < 1.001 * 3 * 4 * elements
    for kind in ("sharded", "4 replicas"):
        read = found[f"load, {kind}: values"]
        whole = {"sharded": stored, "4 replicas": stored // 3}[kind]
        assert read["reference"] == pytest.approx(whole, rel=1e-6)
        assert read["reference"] <= read["bytes"] <= read["budget"] * read["reference"]
        assert 0 < found[f"load, {kind}: metadata, any other process"]["ratio"] <= 1
    for name in ("save: objects", "save: manifest"):
        assert 0 < found[name]["ratio"] <= 1
    drawn = output.with_suffix(".svg").read_text()
    assert all(title in drawn for title in many_hosts_plot.PANELS if "simulated" in title)


ACCELERATOR = REPOSITORY / "benchmarks" / "accelerator.py"


def test_accelerator_benchmark_alone_prints_its_rows_with_their_figures(tmp_path):
    """It is copied to a machine by itself; `test_all_contenders.py` has all rows, and peers."""
    check_accelerator(tmp_path, "--without-peers", chosen="until durable, first")


def check_accelerator(tmp_path, *more, chosen="") -> list[dict]:
    """Run its small form on one CPU device; return the rows, those chosen by a part of a name."""
    script = Path(shutil.copy(ACCELERATOR, tmp_path))
    output, plot = tmp_path / "rows.json", tmp_path / "rows.svg"
    options = ["--small", "--folder", str(tmp_path), "--output", str(output), "--plot", str(plot)]
    options += ["--rows", chosen] if chosen else []
    done = run(
        [script, *options, *more],
        cwd=tmp_path,
        env={**os.environ, "XLA_FLAGS": xla_flags(1), "COLUMNS": "400"},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(tmp_path.iterdir()) == sorted([script, output, plot])
    results = json.loads(output.read_text())
    rows = {row["row"]: row for row in results["rows"]}
    assert [*rows] == [row.name for row in accelerator.ROWS if chosen in row.name]
    drawn = {text.text for text in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")}
    for name, row in rows.items():
        assert name in done.stdout
        assert name in drawn
        # What a save costs a loop is the difference of two times, which noise can turn around.
        assert row["measured"] > 0 or name.startswith("cost of a save")
        assert row["limit"]["value"] > 0
        assert row["budget"] > 0
        assert row["bytes"] > 0
        assert row["leaves"] > 0
        assert row["device"] == {"platform": "cpu", "kind": "cpu", "count": 1}
        assert row["versions"]["jax"]
        assert not row["accelerator"]
        assert row["met"] is None  # budgets are those of accelerators
    assert rows["until durable, first"]["way"] == "staging: views, waves: 1"
    assert "CPU devices, these are no accelerator's figures" in done.stdout
    assert results["environment"]["device"]["count"] == 1
    return list(rows.values())


def start_measurement(arguments):
    """Forks a process of the accelerator benchmark's."""
    return run(["-m", "benchmarks.accelerator", *arguments], cwd=REPOSITORY)


def test_failed_measurement_of_the_accelerator_benchmark_stops_no_other(tmp_path, capsys):
    def start(arguments):
        if json.loads(arguments[-1])["measurement"] == "import_limit":
            return subprocess.run([sys.executable, "-c", "raise SystemExit('broken')"], **captured)
        return start_measurement(arguments)

    captured = {"capture_output": True, "text": True}
    output = tmp_path / "rows.json"
    chosen = ["--rows", "from_pretrained in bfloat16", "save_pretrained, one file"]
    options = ["--small", "--without-peers", "--folder", str(tmp_path), "--output", str(output)]
    assert accelerator.main([*options, *chosen], start) == 1
    limited, whole = json.loads(output.read_text())["rows"]
    assert limited["measured"] > 0
    assert limited["limit"]["value"] is None
    assert limited["limit"]["unmeasured"] == "exit status 1: broken"
    assert limited["budget"] is None
    assert [peer["unmeasured"] for peer in limited["beside"]] == ["--without-peers"]
    assert whole["measured"] > 0
    assert whole["limit"]["value"] > 0
    assert "failed: import_limit: exit status 1: broken" in capsys.readouterr().err


def test_row_of_the_accelerator_benchmark_that_cannot_be_measured_says_why(tmp_path):
    output = tmp_path / "rows.json"
    options = ["--small", "--without-peers", "--size", "1000000GB", "--output", str(output)]
    options += ["--folder", str(tmp_path), "--rows", "peak of host memory, host_memory"]
    assert accelerator.main(options, start_measurement) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert row["measured"] is row["ratio"] is row["budget"] is None
    assert "GB of host memory, found" in row["unmeasured"]
    assert "give a smaller --size" in row["unmeasured"]


def test_accelerator_benchmark_imports_nothing_of_this_repository_but_public_names():
    imports = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(ACCELERATOR.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    packages = {name.partition(".")[0] for name in imports}
    assert not packages & {path.name for path in REPOSITORY.iterdir()} - {"cairn"}
    assert {name for name in imports if name.startswith("cairn")} == {"cairn"}
