"""Rows of `control_plane.py` of many runs: a page of 10,000 runs, sorted by a metric.

Each run has a step with three metrics. A page has 100 runs and three columns; half of the requests
ask for the first page, half for the one in the middle.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import urlencode

import httpx

from benchmarks.control_plane_load import request
from benchmarks.control_plane_store import name_of
from cairn.storage.runs.annotate import annotate_step
from cairn.storage.store.uri import StoreURI, parse_uri
from tests.service.stores import make_run

RUNS: Final = 10_000
PAGE: Final = 100
ROW: Final = "list 100 of 10,000 runs by a metric"
PEER_ROW: Final = "list 100 runs"
BUDGET: Final = 0.05
METRICS: Final = ("train/loss", "eval/loss", "tokens_per_second")


def fill(uri: str, runs: int = RUNS, *, at_once: int = 4) -> None:
    """Make the runs of a root."""
    root = parse_uri(uri)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda number: _make(root / name_of(number), number), range(runs)))


def _make(uri: StoreURI, number: int) -> None:
    chance = random.Random(number)
    run = make_run(uri, (100,), labels={"team": "nlp", "lr": f"{10 ** chance.uniform(-5, -2):.1e}"})
    annotate_step(
        run,
        100,
        metrics={name: chance.lognormvariate(0, 1) for name in METRICS},
        better={"train/loss": "min", "eval/loss": "min"},
        by="trainer",
    )


def requests(url: str, runs: int = RUNS) -> Callable[[int, int], bytes]:
    """Return the request of a client and a turn, to a server of so many runs."""
    query = {
        "order_by": 'best."eval/loss"',
        "columns": ", ".join((*(f'best."{name}"' for name in METRICS[:2]), "labels.lr")),
        "page_size": PAGE,
    }
    middle: dict[str, str] = {}
    for _ in range(runs // PAGE // 2):
        answer = httpx.get(f"{url}/v1/runs", params=query | middle, timeout=60)
        middle = {"page_token": answer.json()["next_page_token"]}
    paths = [f"/v1/runs?{urlencode(query | more)}" for more in ({}, middle)]
    return lambda client, turn: request(url, "GET", paths[(client + turn) % 2])
