"""Two control planes and two workers on one PostgreSQL, each of which is killed in turn.

`CAIRN_FAULTS=long` has them do, and be asked for, more.
"""

import itertools
import json
import os
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from cairn import CheckpointReader, Run, open_files, parse_uri, plan_shards, write_shard
from cairn.interop.weights.export import export_sources
from cairn.storage.safetensors.reader import read_header, read_tensor
from tests.faults.report import trials
from tests.programs.program import Program
from tests.service.jobs import save_llama, until
from tests.service.stores import add_steps, make_run, publish

SERVE = ("-m", "cairn.service.command.cli", "serve", "--no-worker", "--port")
WORK = ("-m", "cairn.service.command.cli", "worker", "--name")
CONVERTS = trials(short=4, long=60)  # each process is killed once meanwhile, and maybe later
BETWEEN_KILLS = trials(short=1, long=2)
LISTS = trials(short=200, long=4000)
PATIENCE = 120.0


class Fleet:
    """Processes that are started again under their names after they were killed."""

    def __init__(self, root, data, url):
        self._environment = {
            **os.environ,
            "CAIRN_ROOT": str(root),
            "CAIRN_DATA_DIR": str(data),
            "CAIRN_DATABASE_URL": url,
            "CAIRN_JOBS_DATABASE_URL": url,
            "CAIRN_SCAN_SECONDS": "1",
        }
        self._errors = data / "errors.log"
        self.ports = [free_port(), free_port()]
        self._commands = [
            *((*SERVE, str(port)) for port in self.ports),
            *((*WORK, name) for name in ("one", "two")),
        ]
        self.processes = []
        self._http = httpx.Client(timeout=30)  # one: to make it takes longer than to ask

    def __enter__(self):
        self.processes = [self._start(command) for command in self._commands]
        return self

    def __exit__(self, *_failure):
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait(60)
        self._http.close()

    def ask(self, ports, method, path, **more):
        """Whichever server answers; one that is being started again does not."""
        ends = time.monotonic() + PATIENCE
        for port in itertools.cycle(ports):
            try:
                answer = self._http.request(method, f"http://127.0.0.1:{port}{path}", **more)
            except httpx.TransportError:
                assert time.monotonic() < ends
                time.sleep(0.05)
                continue
            return answer
        raise AssertionError

    def kill(self, number):
        """With SIGKILL; the same one begins anew."""
        self.processes[number].kill()
        self.processes[number].wait(60)
        self.processes[number] = self._start(self._commands[number])

    def _start(self, command):
        with self._errors.open("a") as errors:
            process = Program(command, env=self._environment, stdout=subprocess.PIPE, stderr=errors)
        if not process.stdout.readline().startswith("cairn: "):
            raise AssertionError(self._errors.read_text())
        return process


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.safetensors")}


def written_alone(root, step):
    """The files of an export, written here one after the other."""
    run = Run(parse_uri(root / "llama"))
    info = run.step(step)
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
    sources, _ = export_sources(run.manifest(info), reader)
    here = root.parent / f"alone-{step}"
    here.mkdir()
    for shard in plan_shards(sources, "20KB"):
        write_shard(open_files(parse_uri(here)), shard.file_name, shard)
    return contents(here)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("fleet") / "store"
    root.mkdir()
    return root


@pytest.fixture(scope="module")
def fleet(root, postgresql):
    (root.parent / "data").mkdir()
    with Fleet(root, root.parent / "data", postgresql.create()) as processes:
        yield processes


def test_every_conversion_is_done_once_and_right_whoever_is_killed_meanwhile(fleet, root):
    saved = save_llama(root / "llama", steps=tuple(range(1, CONVERTS + 1)))
    operations = {}
    for step, ports in zip(saved, itertools.cycle([fleet.ports, fleet.ports[::-1]]), strict=False):
        answer = fleet.ask(
            ports,
            "POST",
            f"/v1/roots/default/runs/llama/checkpoints/{step}:convert",
            json={"max_shard_size": "20KB"},
            headers={"Idempotency-Key": f"step {step}"},
        )
        assert answer.status_code == 202, answer.text
        operations[step] = answer.json()["id"]
        if step % BETWEEN_KILLS == 0:
            fleet.kill(step // BETWEEN_KILLS % len(fleet.processes))

    def states():
        return [
            fleet.ask(fleet.ports, "GET", f"/v1/operations/{one}").json()["state"]
            for one in operations.values()
        ]

    for number in (2, 3, 0, 1)[: trials(short=0, long=4)]:  # once more, while the rest is done
        if all(state == "succeeded" for state in states()):
            break
        fleet.kill(number)
    until(lambda: all(state in ("succeeded", "failed", "cancelled") for state in states()))
    assert set(states()) == {"succeeded"}
    for step, operation in operations.items():
        result = fleet.ask(fleet.ports, "GET", f"/v1/operations/{operation}").json()["result"]
        artifact = fleet.ask(fleet.ports, "GET", f"/v1/artifacts/{result['artifact_id']}").json()
        files = open_files(parse_uri(artifact["uri"]))
        index = json.loads(files.read_range("model.safetensors.index.json", 0, 1 << 20))
        name = "model.layers.1.mlp.down_proj.weight"
        shard = index["weight_map"][name]
        np.testing.assert_array_equal(
            read_tensor(files, shard, name, header=read_header(files, shard)),
            saved[step]["model/layers/1/mlp/down_proj/kernel"].T,
        )
        if step <= 3:
            assert contents(parse_uri(artifact["uri"]).local_path) == written_alone(root, step)
        (published,) = (root / "llama/exports" / f"{step}.1").glob("*.json")
        assert published.exists()


def test_no_list_fails_or_is_stale_after_an_announcement_beside_a_trainer_that_publishes(
    fleet, root
):
    run = make_run(root / "run")
    attempt = add_steps(run, [])
    announced, over, problems = [-1], threading.Event(), []

    def train():
        for step in itertools.count():
            if over.is_set():
                return
            publish(Run.open(run.uri), attempt.number, step)
            path = "/v1/roots/default/runs/run/checkpoints"
            answer = fleet.ask([fleet.ports[step % 2]], "POST", path, json={"step": step})
            if answer.status_code != 200:
                problems.append(answer.text)
            announced[0] = step

    def look(port):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            for _ in range(LISTS // 4):
                known = announced[0]
                path = "/v1/roots/default/runs/run/checkpoints?page_size=5"
                answer = client.get(path)
                steps = [one["step"] for one in answer.json().get("checkpoints", ())]
                if answer.status_code != 200 or (known >= 0 and (not steps or steps[0] < known)):
                    problems.append((answer.status_code, known, steps[:3], answer.text[:300]))

    with ExitStack() as ended:
        threads = [threading.Thread(target=look, args=(port,)) for port in fleet.ports * 2]
        trainer = threading.Thread(target=train)
        ended.callback(trainer.join)
        ended.callback(over.set)
        for thread in [trainer, *threads]:
            thread.start()
        for thread in threads:
            thread.join()
    assert announced[0] > 0
    assert problems == []
