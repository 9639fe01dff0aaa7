"""A hundred promoters race for one alias: one winner per move, and no move is lost."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cairn import Settings, create_app, parse_uri
from tests.faults import report
from tests.service.servers import serve
from tests.service.stores import make_run
from tests.storage.records import HISTORY_KEPT

ROOT = Path(__file__).parents[2]
STEPS = [3, 6, 9]
ALIAS = "production"

pytestmark = pytest.mark.timeout(3600 if report.is_long() else 300)


class Promoters:
    """The process that forks the promoters."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.promoter_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )

    def race(self, **order):
        order["environment"] = {
            name: value for name, value in os.environ.items() if name.startswith("AWS_")
        }
        self.process.stdin.write(json.dumps({"alias": ALIAS, "steps": STEPS, **order}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self.process.stdout.close()


@pytest.fixture(scope="module")
def promoters():
    with contextlib.closing(Promoters()) as made:
        yield made


@pytest.fixture
def store(request, tmp_path):
    """(its kind, an empty root in it)."""
    if request.param == "file":
        return "file", parse_uri(tmp_path / "root")
    return request.param, parse_uri(request.getfixturevalue(request.param).bucket_uri) / "root"


def broken_promises(run, found, tries):
    """What is wrong with a race, given what the promoters say and what the store holds."""
    problems = list(found["errors"])
    wins = sorted(found["wins"])
    sequences = [sequence for sequence, _, _ in wins]
    if len(wins) + len(found["losses"]) != tries:
        problems.append(f"{len(wins)} wins and {len(found['losses'])} losses in {tries} tries")
    if sequences != list(range(1, len(wins) + 1)):
        problems.append(f"winners of sequences {sequences}")
    alias = run.aliases.get(ALIAS)
    if alias is None or alias.sequence != len(wins):
        problems.append(f"{len(wins)} wins, the alias is {alias}")
    told = [[event.sequence, event.step, event.reason] for event in run.aliases.history(ALIAS)]
    if told[::-1] != wins[-HISTORY_KEPT:]:
        problems.append(f"history {told[::-1]}, wins {wins}")
    return problems


def prepare_routes(url):
    """Has a server build its routes, which FastAPI does when they are first asked for.

    That changes the process's warning filters for a moment, and here two servers share a process.
    """
    path = f"{url}/v1/roots/default/runs/first"
    assert httpx.get(f"{path}/aliases/{ALIAS}").status_code == 404
    assert httpx.post(f"{path}/checkpoints/3:promote", json={"alias": ALIAS}).status_code == 428


def run_rounds(promoters, store, title, make_order):
    """The rounds of this run of the tests, each for an alias that nobody has moved yet."""
    kind, root = store
    processes, threads, tries = (10, 10, 3) if report.is_long() else (4, 5, 3)
    rounds = report.trials(short=1, long=20)
    lost, wins, problems = 0, 0, []
    for number in range(rounds):
        run = make_run(root / f"run-{number}", STEPS)
        found = promoters.race(processes=processes, threads=threads, tries=tries, **make_order(run))
        broken = broken_promises(run, found, processes * threads * tries)
        lost += bool(broken)
        wins += len(found["wins"])
        problems += [f"round {number}: {text}" for text in broken]
    report.record(
        fault=f"f {title}",
        store=kind,
        trials=rounds,
        survived=rounds - lost,
        lost=lost,
        note=f"{processes * threads} promoters, {wins} of "
        f"{rounds * processes * threads * tries} promotions won",
    )
    assert wins > 0
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("store", report.stores("gcs"), indirect=True)
def test_of_racing_promoters_one_wins_each_move(promoters, store):
    run_rounds(promoters, store, "promoters racing one alias", lambda run: {"uri": str(run.uri)})


@pytest.mark.parametrize("store", report.stores("file"), indirect=True)
def test_of_promoters_at_two_control_planes_one_wins_each_move(promoters, store, tmp_path):
    _, root = store
    make_run(root / "first", STEPS)
    with contextlib.ExitStack() as servers:
        settings = [
            Settings(root=str(root), data_dir=tmp_path / f"data-{number}") for number in range(2)
        ]
        urls = [servers.enter_context(serve(create_app(one, jobs=False))) for one in settings]
        for url in urls:
            prepare_routes(url)
        run_rounds(
            promoters,
            store,
            "promoters racing one alias over HTTP",
            lambda run: {"urls": urls, "run": run.uri.name},
        )
