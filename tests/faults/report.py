"""How many trials a fault gets, from which seed, and what came of them.

The short run (`make test`) does a few trials from a fixed seed. The long one (`make faults`, which
sets CAIRN_FAULTS=long) does hundreds from a new seed, and keeps its counts in
`benchmarks/results/faults.json`. CAIRN_FAULTS_SEED repeats a run of either kind.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "faults.json"
SHORT_SEED = 20261121

tell: Callable[[str], None] = print
"""Where lines go; under pytest to the terminal, captured or not (see `conftest.py`)."""


def is_long() -> bool:
    """Whether this is the long run."""
    return os.environ.get("CAIRN_FAULTS") == "long"


def trials(*, short: int, long: int) -> int:
    """How often to try in this run."""
    return long if is_long() else short


@cache
def seed() -> int:
    """The seed of this run's trials, printed by each process so that it can be repeated."""
    given = os.environ.get("CAIRN_FAULTS_SEED")
    if given:
        chosen = int(given)
    elif is_long():  # pytest-xdist gives all processes of a run one id
        chosen = int(os.environ.get("PYTEST_XDIST_TESTRUNUID", secrets.token_hex(4))[:8], 16)
    else:
        chosen = SHORT_SEED
    tell(f"faults: CAIRN_FAULTS_SEED={chosen}")
    return chosen


def stores(short: str) -> list[str]:
    """Return the kinds of stores to try: all in the long run."""
    return ["file", *buckets()] if is_long() else [short]


def buckets() -> list[str]:
    """Return the kinds of buckets to try: all in the long run. They are names of fixtures."""
    return ["gcs", "s3"] if is_long() else ["gcs"]


def record(
    *, fault: str, store: str, trials: int, survived: int, lost: int, note: str = ""
) -> None:
    """Print what came of a fault's trials; the long run also keeps it.

    Args:
        fault: its letter and name, such as "a SIGKILL during a save loop".
        store: "file", "gcs" or "s3".
        trials: how often it was injected.
        survived: after how many trials every promise held.
        lost: after how many one was broken.
        note: more to print, such as which moments were hit; not kept.
    """
    line = f"{fault} ({store}): {trials} trials, {survived} survived, {lost} lost"
    tell(f"faults: {line}" + (f"; {note}" if note else ""))
    if is_long():
        keep(
            RESULTS,
            {"fault": fault, "store": store, "trials": trials, "survived": survived, "lost": lost},
        )


def keep(path: Path, row: Mapping[str, Any]) -> None:
    """Put a row into a results file, in the place of the one of the same fault and store."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:  # tests may run in several processes
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        rows = {_key(one): one for one in json.loads(file.read() or "[]")}
        rows[_key(row)] = row
        text = json.dumps([rows[key] for key in sorted(rows)], indent=2) + "\n"
        file.truncate(0)
        file.write(text)


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row["fault"]), str(row["store"])
