"""`python -m tests.faults.promoter_child`: many promoters in many processes, round by round.

Reads one round's orders from a line of stdin, forks its processes, opens the gate for all of them
at once, and answers with one line: who won which sequence, and how often one lost. It imports
before it forks and touches no store itself, so that a round of ten processes starts in no time.
"""

import http.client
import json
import os
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from cairn import PreconditionFailedError, Run, parse_uri
from tests.storage.records import AliasWriter

ATTEMPT = 1
MOST_TURNS_MISSED = 20
NO_TURN = b"urn:cairn:problem:not-ready"
Promote = Callable[[int, str], int | None]


def by_store(order: dict[str, Any], _process: int) -> Promote:
    """Compare-and-swap in the store itself."""
    run = Run(parse_uri(order["uri"]))

    def promote(step: int, reason: str) -> int | None:
        found = run.aliases.get(order["alias"])
        try:
            moved = AliasWriter(run.objects).move(
                order["alias"],
                step=step,
                attempt=ATTEMPT,
                reason=reason,
                expect=found.sequence if found else None,
            )
        except PreconditionFailedError:
            return None
        return moved.sequence

    return promote


def by_http(order: dict[str, Any], process: int) -> Promote:
    """`If-Match` at one of the control planes."""
    url = urllib.parse.urlsplit(order["urls"][process % len(order["urls"])])
    run = f"/v1/roots/default/runs/{order['run']}"
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=120)

    def ask(method: str, path: str, body: Any = None, **headers: str) -> Any:
        data = None if body is None else json.dumps(body)
        sent = {"Content-Type": "application/json", **headers}
        for _ in range(MOST_TURNS_MISSED):
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            told = answer.status, answer.headers.get("ETag"), answer.read()
            if NO_TURN not in told[2]:
                break
            connection.close()  # a server does not keep an idle one for as long
            time.sleep(int(answer.headers["Retry-After"]))  # nothing of it was done
        return told

    def promote(step: int, reason: str) -> int | None:
        status, etag, text = ask("GET", f"{run}/aliases/{order['alias']}")
        if status not in (200, 404):
            raise RuntimeError(f"HTTP {status}: {text[:300]!r}")
        seen = {"If-Match": etag} if status == 200 else {"If-None-Match": "*"}
        body = {"alias": order["alias"], "reason": reason}
        path = f"{run}/checkpoints/{step}:promote"
        status, etag, text = ask("POST", path, body, **seen)
        if status == 412:
            return None
        if status != 200:
            raise RuntimeError(f"HTTP {status}: {text[:300]!r}")
        return int(etag.strip('"'))

    return promote


def race(order: dict[str, Any], process: int, gate: int) -> dict[str, Any]:
    """One process's threads, each trying as often as ordered once the gate is open."""
    os.environ.update(order["environment"])
    make = by_http if "urls" in order else by_store
    wins: list[tuple[int, int, str]] = []
    losses: list[str] = []
    errors: list[str] = []
    opened = threading.Event()

    def compete(thread: int) -> None:
        try:
            promote = make(order, process)
            opened.wait()
            for number in range(order["tries"]):
                step = order["steps"][(process + thread + number) % len(order["steps"])]
                reason = f"{process}.{thread}.{number}"
                sequence = promote(step, reason)
                if sequence is None:
                    losses.append(reason)
                else:
                    wins.append((sequence, step, reason))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=compete, args=(n,)) for n in range(order["threads"])]
    for thread in threads:
        thread.start()
    os.read(gate, 1)  # returns once nobody holds the other end
    opened.set()
    for thread in threads:
        thread.join()
    return {"wins": wins, "losses": losses, "errors": errors}


def run_round(order: dict[str, Any]) -> dict[str, Any]:
    """Fork, open the gate, gather."""
    gate_read, gate_write = os.pipe()
    children = []
    for process in range(order["processes"]):
        answer_read, answer_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(gate_write)
            status = 1
            try:
                found = race(order, process, gate_read)
                with os.fdopen(answer_write, "w") as out:
                    json.dump(found, out)
                status = 0
            finally:
                os._exit(status)
        os.close(answer_write)
        children.append((pid, answer_read))
    os.close(gate_read)
    os.close(gate_write)
    total: dict[str, Any] = {"wins": [], "losses": [], "errors": []}
    for pid, answer in children:
        with os.fdopen(answer) as text:
            told = text.read()
        status = os.waitpid(pid, 0)[1]
        found = json.loads(told) if told else {"errors": [f"process ended with {status}"]}
        for name, values in found.items():
            total[name] += values
    return total


def main() -> None:
    """Serve rounds until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(run_round(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
