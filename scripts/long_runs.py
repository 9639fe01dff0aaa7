"""Run one of the long proofs, and keep when it last passed whole and how long it took.

    python scripts/long_runs.py faults -- COMMAND...          # all of `make faults`
    python scripts/long_runs.py matrix --part -- COMMAND...   # a part: nothing is kept
    python scripts/long_runs.py                               # list all of them

The record is `benchmarks/results/long_runs.json`: it is committed with what was run.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
RECORD: Final = ROOT / "benchmarks/results/long_runs.json"

Run = Mapping[str, Any]
"""One run: "date" (YYYY-MM-DD), "commit", "seconds", "cores"."""


def last_runs() -> dict[str, Run]:
    """Return the last whole run of each proof, by name."""
    return dict(json.loads(RECORD.read_text())) if RECORD.is_file() else {}


def sentence(name: str, run: Run | None) -> str:
    """Return a line about the last whole run of a proof."""
    if run is None:
        return f"make {name}: no whole run is on record"
    minutes, seconds = divmod(round(run["seconds"]), 60)
    return (
        f"make {name}: last passed whole on {run['date']} at {run['commit']}, "
        f"{minutes} min {seconds:02} s on {run['cores']} cores"
    )


def commit() -> str:
    """Return the short name of the commit, with "+" if the working tree differs from it."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True)
    return f"{name.stdout.strip() or 'no commit'}{'+' if changed.stdout else ''}"


def main() -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="?", help="the target of the Makefile")
    parser.add_argument("--part", action="store_true", help="not all of it: keep nothing")
    # What follows "--" has options of its own.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:end])
    command = sys.argv[end + 1 :]
    if not command:
        print("\n".join(sentence(name, run) for name, run in sorted(last_runs().items())))
        return 0
    name = arguments.name
    print(sentence(name, last_runs().get(name)), flush=True)
    begun, at = time.monotonic(), commit()
    status = subprocess.run(command, cwd=ROOT).returncode
    if status == 0 and not arguments.part:
        run = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "commit": at,
            "seconds": round(time.monotonic() - begun),
            "cores": len(os.sched_getaffinity(0)),
        }
        # Read again: a run beside this one may have ended meanwhile.
        RECORD.write_text(json.dumps(last_runs() | {name: run}, indent=2, sort_keys=True) + "\n")
        print(sentence(name, run))
    return status


if __name__ == "__main__":
    sys.exit(main())
