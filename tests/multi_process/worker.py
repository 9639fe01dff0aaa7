"""One process of a job: joins the others, runs a scenario, writes what it returned or yielded."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import jax

from tests.multi_process.scenarios import scenario


def main() -> None:
    """Runs one scenario. An error in it ends the process with its traceback and status 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", required=True, help="host:port of process 0")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    parser.add_argument("scenario")
    parser.add_argument("arguments", type=json.loads)
    options = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.distributed.initialize(
        options.coordinator,
        options.count,
        options.index,
        initialization_timeout=120,
        heartbeat_timeout_seconds=int(os.environ.get("TEST_HEARTBEAT_SECONDS", "100")),
        shutdown_timeout_seconds=20,
    )
    found = scenario(options.scenario)(**options.arguments)
    for result in found if isinstance(found, Iterator) else [found]:
        options.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
