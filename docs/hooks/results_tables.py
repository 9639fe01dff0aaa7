"""Tables of the benchmarks' results, from the JSON that the benchmarks wrote, and their plots.

A page says `<!-- results: storage.json -->` where a table goes: numbers are never copied by hand.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
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


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (titles, *rows))
    return "\n".join([head, "|" + "---|" * len(titles), *lines])


def _storage(rows: Any) -> str:
    def measured(row: Mapping[str, Any]) -> str:
        in_bytes = row["row"].startswith(("extra peak memory", "LoRA"))
        return f"{row['bytes'] / 1e6:.4g} MB" if in_bytes else f"{row['seconds']:.3g} s"

    return _table(
        ["", "measured", "reference", "ratio", "budget"],
        ([row["row"], measured(row), *_compared(row)] for row in rows),
    )


def _export(rows: Any) -> str:
    return _table(
        ["", "measured", "peak memory", "reference", "ratio", "budget"],
        (
            [
                row["row"],
                f"{row['seconds']:.2f} s",
                f"{row['peak_rss_bytes'] / 1e6:.0f} MB",
                *_compared(row),
            ]
            for row in rows
        ),
    )


def _compared(row: Mapping[str, Any]) -> list[str]:
    """What it is compared with, the ratio and the budget."""
    return [row["reference"]["name"], f"{row['ratio']:.2f}", _shown(row["budget"], "{:g}")]


def _many_hosts(rows: Any) -> str:
    return _table(
        ["", "processes", "requests", "bytes", "seconds", "ratio", "budget"],
        (
            [
                row["row"],
                str(row["processes"]),
                _shown(row["requests"], "{:,}"),
                _shown(row["bytes"] and row["bytes"] / 1e6, "{:,.4g} MB"),
                _shown(row["seconds"], "{:.3g}"),
                _shown(row["ratio"], "{:.3g}"),
                _shown(row["budget"], "{:g}"),
            ]
            for row in rows
        ),
    )


def _control_plane(results: Mapping[str, Any]) -> str:
    told = (
        f"{results['steps']:,} steps in {results['runs']:,} runs; beside {results['peer']}; "
        f"{results['device']}.\n\n"
    )
    return told + _table(
        ["", "clients", "p50", "p99", "a second", "reference", "ratio", "budget"],
        (
            [
                row["row"],
                _shown(row.get("clients"), "{}"),
                _shown(row.get("p50_ms"), "{:.0f} ms"),
                _shown(row.get("p99_ms"), "{:.0f} ms") or _shown(row.get("seconds"), "{:g} s"),
                _shown(row.get("per_second"), "{:.0f}"),
                (row.get("reference") or {}).get("name", ""),
                _shown(row.get("ratio"), "{:.3g}"),
                _shown(row.get("budget"), "{:g}"),
            ]
            for row in results["rows"]
        ),
    )


def _faults(rows: Any) -> str:
    return _table(
        ["fault", "store", "trials", "lost"],
        ([row["fault"], row["store"], str(row["trials"]), str(row["lost"])] for row in rows),
    )


def _failing_calls(rows: Any) -> str:
    def outcomes(row: Mapping[str, Any]) -> str:
        return "; ".join(f"{name}: {count:,}" for name, count in sorted(row["outcomes"].items()))

    return _table(
        ["verb", "changes", "reads", "faults", "outcomes"],
        (
            [
                row["fault"],
                *(f"{row['calls'][kind]:,}" for kind in ("changes", "reads")),
                f"{row['cases']:,}",
                outcomes(row),
            ]
            for row in rows
        ),
    )


def _clicks(results: Mapping[str, Any]) -> str:
    def found(one: Mapping[str, int] | str | None) -> str:
        if one is None or isinstance(one, str):
            return one or ""
        return f"{one['clicks']}" + (f", {one['fields']} typed" if one["fields"] else "")

    titles = {"cairn": "Cairn", "mlflow": "MLflow"}
    return _table(
        ["", *(f"{titles[name]} {results[name]['version']}" for name in results["of"])],
        ([row["row"], *(found(row[name]) for name in results["of"])] for row in results["rows"]),
    )


def _soak(rows: Any) -> str:
    def slope(one: Mapping[str, float] | None, form: str) -> str:
        if one is None:
            return ""
        low, mean, high = (form.format(one[name]) for name in ("low", "mean", "high"))
        return f"{mean} ({low} to {high})"

    def requests(row: Mapping[str, Any]) -> str:
        if row["requests"] is None:
            return ""
        return ", ".join(
            f"{count} of step {int(step):,}" for step, count in row["requests"].items()
        )

    measured = ("allocated", "blocks", "objects", "resident")
    return _table(
        [*("", "saves", "resident"), *(f"{name}, a save" for name in measured), "requests"],
        (
            [
                row["row"],
                f"{row['saves']:,}",
                f"{row['resident'][0] / 1e6:.1f} to {row['resident'][-1] / 1e6:.1f} MB",
                slope(row["allocated a save"], "{:,.1f} B"),
                slope(row["blocks a save"], "{:.2f}"),
                slope(row["objects a save"], "{:.4f}"),
                slope(row["resident a save"], "{:,.0f} B"),
                requests(row),
            ]
            for row in rows
        ),
    )


def _shown(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


TABLES = {
    "storage": _storage,
    "storage_gcs": _storage,
    "storage_gcs_nginx": _storage,
    "control_plane": _control_plane,
    "faults": _faults,
    "failing_calls": _failing_calls,
    "export": _export,
    "many_hosts": _many_hosts,
    "clicks": _clicks,
    "soak": _soak,
}
