"""Tables of the benchmarks' results, from the JSON that the benchmarks wrote, and their plots.

A page says `<!-- results: storage.json -->` where a table goes: numbers are never copied by hand.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.storage_plot import drawing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PLOTS = ("storage.svg", "storage_gcs.svg", "export.svg", "many_hosts.svg")
MARK = re.compile(r"^<!-- results: (\w+)\.json -->$", re.MULTILINE)


def with_results(markdown: str) -> str:
    """Returns a page with its tables."""
    return MARK.sub(lambda found: TABLES[found[1]](_read(found[1])), markdown)


def plots() -> dict[str, str]:
    """Returns the plots: path in the documentation, and content."""
    made = {f"images/{name}": (RESULTS / name).read_text(encoding="utf-8") for name in PLOTS}
    drawn = drawing(_beside_mlflow(_read("control_plane")), lambda row: False)
    return made | {"images/control_plane.svg": "\n".join(drawn) + "\n"}


def _beside_mlflow(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows whose reference is MLflow's p99, as the storage benchmark's plot has rows."""
    return [
        row | {"row": f"{row['row']}, {row['clients']} clients"}
        for row in results["rows"]
        if (row.get("reference") or {}).get("name") == "MLflow"
    ]


def _storage(rows: Any) -> str:
    lines = ["| | measured | reference | ratio | budget |", "|---|---|---|---|---|"]
    for row in rows:
        budget = "" if row["budget"] is None else f"{row['budget']:g}"
        in_bytes = row["row"].startswith(("extra peak memory", "LoRA"))
        measured = f"{row['bytes'] / 1e6:.4g} MB" if in_bytes else f"{row['seconds']:.3g} s"
        lines.append(
            f"| {row['row']} | {measured} | {row['reference']['name']} "
            f"| {row['ratio']:.2f} | {budget} |"
        )
    return "\n".join(lines)


def _control_plane(results: Mapping[str, Any]) -> str:
    lines = [
        f"{results['steps']:,} steps in {results['runs']:,} runs; beside {results['peer']}; "
        f"{results['device']}.\n",
        "| | clients | p50 | p99 | a second | reference | ratio | budget |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        cells = [
            row["row"],
            _shown(row.get("clients"), "{}"),
            _shown(row.get("p50_ms"), "{:.0f} ms"),
            _shown(row.get("p99_ms"), "{:.0f} ms") or _shown(row.get("seconds"), "{:g} s"),
            _shown(row.get("per_second"), "{:.0f}"),
            (row.get("reference") or {}).get("name", ""),
            _shown(row.get("ratio"), "{:.3g}"),
            _shown(row.get("budget"), "{:g}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _export(rows: Any) -> str:
    lines = [
        "| | measured | peak memory | reference | ratio | budget |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['row']} | {row['seconds']:.2f} s | {row['peak_rss_bytes'] / 1e6:.0f} MB "
        f"| {row['reference']['name']} | {row['ratio']:.2f} | {_shown(row['budget'], '{:g}')} |"
        for row in rows
    ]
    return "\n".join(lines)


def _many_hosts(rows: Any) -> str:
    lines = ["| | processes | requests | bytes | ratio | budget |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row['row']} | {row['processes']} | {row['requests']} | {row['bytes'] / 1e6:.4g} MB "
        f"| {_shown(row['ratio'], '{:.3g}')} | {_shown(row['budget'], '{:g}')} |"
        for row in rows
    ]
    return "\n".join(lines)


def _faults(rows: Any) -> str:
    lines = ["| fault | store | trials | lost |", "|---|---|---|---|"]
    lines += [
        f"| {row['fault']} | {row['store']} | {row['trials']} | {row['lost']} |" for row in rows
    ]
    return "\n".join(lines)


def _shown(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


TABLES = {
    "storage": _storage,
    "storage_gcs": _storage,
    "control_plane": _control_plane,
    "faults": _faults,
    "export": _export,
    "many_hosts": _many_hosts,
}
