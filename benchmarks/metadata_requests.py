"""What each process of a job asks a store for when a state is loaded, but for the values.

For 1, 2, 4 and 8 real processes, each with a GCS-protocol server of its own that holds the same
objects: requests, listings, objects and bytes of process 0 and of the process that asked for most
among the others. There is no reference: the counts are the result.

    JAX_PLATFORMS=cpu python -m benchmarks.metadata_requests [--counts 1 2 4 8]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.multi_process.launcher import start
from tests.multi_process.loading import Asked, ask

RESULTS = Path(__file__).resolve().parent / "results" / "metadata_requests.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    arguments = parser.parse_args()
    rows = [measure(count) for count in arguments.counts]
    arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def measure(count: int) -> dict[str, Any]:
    """One row, printed."""
    with tempfile.TemporaryDirectory() as folder:

        def launch(scenario: str, given: dict[str, Any], *, count: int) -> Any:
            return start(
                Path(folder, scenario),
                scenario,
                given,
                count=count,
                devices=1,
                environment={"CAIRN_WRITER_ID": "benchmark"},
            )

        first, *others = ask(launch, Path(folder), count)
    most = max(others, key=lambda one: one.requests, default=None)
    row = {"processes": count, "first": _row(first), "other": most and _row(most)}
    row["bytes_of_all"] = first.bytes + sum(one.bytes for one in others)
    row["requests_of_all"] = first.requests + sum(one.requests for one in others)
    print(json.dumps(row))
    return row


def _row(asked: Asked) -> dict[str, int]:
    return {
        "requests": asked.requests,
        "listings": asked.lists,
        "objects": len(asked.objects),
        "bytes": asked.bytes,
    }


if __name__ == "__main__":
    main()
