"""A store with as many runs and steps as a team has: real records, without the arrays.

Steps have what a control plane reads of them: a manifest with its leaves.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from cairn.storage.runs.run import Run
from cairn.storage.store.uri import StoreURI, parse_uri
from tests.service.stores import add_steps

FIRST, EVERY = 100, 100
"""The first step of a run, and from one to the next."""


def name_of(number: int) -> str:
    return f"run-{number:04d}"


def fill(uri: str, *, runs: int, steps: int, at_once: int = 4) -> None:
    """Make the runs of a root."""
    root = parse_uri(uri)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda number: _make(root / name_of(number), steps), range(runs)))


def _make(uri: StoreURI, steps: int) -> None:
    run = Run.create(uri, labels={"team": "nlp", "owner": "ann"})
    add_steps(run, [FIRST + EVERY * number for number in range(steps)])
