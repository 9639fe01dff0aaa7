"""A server of two roots, `a` and `b`, asked with keys for `a` alone about what is forged there.

Whatever it answers, and whatever it writes below `a`, must have nothing of what lies elsewhere. And
it stays up meanwhile: quick, small, and without errors that nobody documented.
"""

import json
import os
import re
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch
from urllib.parse import quote, urlencode

import google_crc32c
import httpx
import numpy as np
from fastapi.routing import APIRoute

from cairn import Client, Run, Settings, adopt, parse_uri, promote_step
from cairn.service.dashboard.routers import ROUTERS as PAGES
from cairn.service.routes import health, metrics
from cairn.storage.arrays.digests import box_digest
from tests.plain_orbax import manager_of_items
from tests.service import jobs
from tests.service.access.conftest import Keys
from tests.service.fuzzing.forging import (
    ADOPTED,
    COPIED,
    REAL,
    STEPS,
    Abroad,
    Forged,
    Forgery,
    add_samples,
    rewrite,
)
from tests.service.jobs import CONFIG, save_llama, shapes_of
from tests.service.planes import running_plane
from tests.service.seams import API_PREFIX, ROUTERS
from tests.service.stores import annotate
from tests.storage.plain_steps import as_plain_step

MIB: Final = 1 << 20
PEAK_BYTES: Final = 512 * MIB
"""Most memory that a forged run may take, beside what the server has when nobody asks."""

HEALTHY_SECONDS: Final = 1.0
"""Longer on a machine that others use too, by as much as the server's share of it is smaller."""

_CORES: Final = os.cpu_count() or 1
_ANSWER_SECONDS: Final = 15.0
"""An answer that takes longer is a fault: nothing that is asked for is large."""

_KILLED_BYTES: Final = 1536 * MIB
"""A server that takes so much more is killed: others need the machine."""

_PATIENCE: Final = 40.0
_FILE_BYTES: Final = 16 * MIB
"""Of a file that is downloaded, which may be as large as whoever wrote it made it."""

_ANSWER_BYTES: Final = 64 * MIB
_CANARY: Final = "canary-5f1c0d7e"
_WEIGHT: Final = 7654321.5
_CONFIG: Final = replace(CONFIG, hidden_size=48, intermediate_size=80)  # other sizes of files
_BODIES: Final[dict[str, list[dict[str, Any]]]] = {
    ":plan": [{"mesh": {"axes": {"fsdp": 2, "tp": 2}}}],
    ":gather": [{"items": ["model"]}],
    ":convert": [{}, {"format": "gguf"}],
    ":restore": [{"run": "{run}-fork"}],
    ":promote": [{"alias": "best"}],
    ":repair": [{"dry_run": True}, {"dry_run": False}],
    ":applyRetention": [{"policy": {"keep_last": 1}, "dry_run": dry} for dry in (True, False)],
    ":gc": [{"dry_run": True}, {"dry_run": False}],
    ":takeOver": [{"attempt": 1}],
    "/checkpoints": [{"step": "{step}"}],
    "/{step}": [{"labels": {"asked": "yes"}}],
    "/{run}": [{"labels": {"asked": "yes"}}],
    ":adopt": [{"folder": "orbax-{run}", "run": "{run}-again"}],
}
"""What is asked by the end of a path; an operation that is not here gets an empty body."""

_LAST: Final = ("DELETE", ":takeOver", ":gc", ":applyRetention", ":repair")
"""Asked after all others, which need what these remove."""

_LEAVES: Final = {
    REAL: [("model", "model/norm/scale"), ("optimizer", "mu/embedding")],
    COPIED: [("model", "model/norm/scale"), ("optimizer", "count")],
    ADOPTED: [("params", "w"), ("params", "b")],
}
"""Item and path of leaves that are asked for."""


class Question(NamedTuple):
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str] = {}
    body: dict[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.path[:200]}"


@dataclass
class Outcome:
    """What came of one forgery: answers by status, faults by kind, and how large the server got."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: dict[str, list[str]] = field(default_factory=dict)
    peak: int = 0

    def fault(self, kind: str, where: object = "") -> None:
        """Note a fault, and where it was."""
        self.faults.setdefault(kind, []).append(str(where))


class Watch:
    """Looks at the process of a server while it is asked: how quick it is, and how large."""

    def __init__(self, url: str, pid: int) -> None:
        self._url, self._pid, self._ended = url, pid, threading.Event()
        self._before, self._largest = _memory(pid, "VmRSS"), 0
        self.slowest, self.killed = 0.0, False
        self._threads = [threading.Thread(target=one) for one in (self._ask, self._guard)]

    def __enter__(self) -> "Watch":
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")  # the peak begins anew
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self.peak = max(_memory(self._pid, "VmHWM"), self._largest) - self._before

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=_PATIENCE) as http:
            while not self._ended.wait(0.05):
                began = time.monotonic()
                with suppress(httpx.HTTPError):
                    http.get("/healthz")
                self.slowest = max(self.slowest, time.monotonic() - began)

    def _guard(self) -> None:
        while not self._ended.wait(0.02):
            self._largest = max(self._largest, _memory(self._pid, "VmRSS"))
            if self._largest - self._before > _KILLED_BYTES and not self.killed:
                self.killed = True
                os.kill(self._pid, 9)


def _memory(pid: int, name: str) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return 0 if found is None else int(found[1]) * 1024
    return 0


@contextmanager
def attack(folder: Path) -> Iterator["Attack"]:
    """A server under attack, in an empty folder."""
    calls: list[object] = []

    def answer(server: socket.socket) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, peer = server.accept()
                calls.append(peer)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=[server])
        thread.start()
        begun = Attack(folder, server.getsockname()[1], calls)
        try:
            begun.start()
            begun.keep()
            yield begun
        finally:
            begun.close()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


class Attack:
    """The server, its roots, and what must not be seen.

    Attributes:
        bases: the runs that are forged, as real code wrote them.
        abroad: what a forger points at.
    """

    def __init__(self, folder: Path, port: int, calls: list[object]) -> None:
        self._folder, self._calls, self._number = folder, calls, 0
        self._root, self._other, self._kept = (folder / name for name in ("a", "b", "kept"))
        self._stack = ExitStack()
        self.bases = {base: self._forged(base, base) for base in STEPS}
        canary = folder / "elsewhere" / "canary.txt"
        self.abroad = Abroad(self._other / "victim", canary, folder / "control-plane", port)
        self._make_runs()
        canary.parent.mkdir()
        canary.write_text(_CANARY * 4321)

    def _forged(self, base: str, name: str) -> Forged:
        run = self._root / name
        source = self._root / f"orbax-{name}" / "5"
        return Forged(base, run, source if base == ADOPTED else run / "attempts/1/3")

    def _make_runs(self) -> None:
        for base in (REAL, COPIED):
            save_llama(self._root / base, STEPS[base])
        copied = Run.open(parse_uri(self._root / COPIED))
        as_plain_step(copied, copied.step(STEPS[COPIED][0]))
        tree = {"w": np.ones((4, 4), np.float32), "b": np.arange(6, dtype=np.int32)}
        manager_of_items(self.bases[ADOPTED].files.parent, tree)
        adopt(self.bases[ADOPTED].files.parent, self._root / ADOPTED)
        for base, steps in STEPS.items():
            run = Run.open(parse_uri(self._root / base))
            annotate(run, steps[0], labels={"by": "test"}, metrics={"loss": 0.5})
            promote_step(run, steps[0], "production", expect=None)
        self._make_victim(self.abroad.run)

    def _make_victim(self, uri: Path) -> None:
        """A run whose every value, label and name tells whose it is."""
        shapes = shapes_of(_CONFIG).items()
        weights = {path: np.full(shape, _WEIGHT, np.float32) for path, shape in shapes}
        run = Run.create(uri, labels={"team": _CANARY})
        with patch.object(jobs, "leaves_of", lambda *_, **__: weights):
            save_llama(uri, STEPS[REAL], config=_CONFIG)
        for step in STEPS[REAL]:
            annotate(run, step, labels={"note": _CANARY}, metrics={"loss": _WEIGHT})
        promote_step(run, STEPS[REAL][0], "production", by=_CANARY, reason=_CANARY, expect=None)
        for name in ("lease.json", "attempts/1.json"):
            rewrite(uri / name, lambda body: body.update(writer=_CANARY))

    def _needles(self) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
        """What no answer may have: texts, values, checksums; and what a forger may have told."""
        known = [_CANARY.encode(), b"7654321.5", np.float32(_WEIGHT).tobytes() * 4]
        known += [b"SQLite format 3\0", b"root:x:0:0", b"\0PWD="]
        part = np.frombuffer(self.abroad.canary.read_bytes()[:64], np.uint8)
        known.append(b"%016x" % box_digest(part, (0,)))
        own = [*map(_size_and_sum, _files(self._root))]
        foreign = {*map(_size_and_sum, [*_files(self._other), self.abroad.canary])}.difference(own)
        sums = {text for _, text in foreign}.difference(text for _, text in own)
        sizes = {size for size, _ in foreign if size > 10_000}.difference(size for size, _ in own)
        numbers = b"|".join(b"%d" % size for size in sizes)
        return (
            re.compile(b"|".join([*map(re.escape, known), *sums])),
            # No parts of seconds or of hexadecimal ETags; and the name of a file that is there.
            re.compile(rb"(?<![\w.:-])(?:" + numbers + rb")(?![\w-])|catalog\.sqlite"),
        )

    def _outside(self) -> dict[Path, tuple[int, ...]]:
        return {path: _stamp(path) for path in (*_files(self._other), self.abroad.canary)}

    def start(self) -> None:
        """Start the server, with databases in which nothing was noted yet."""
        self.close()
        shutil.rmtree(self.abroad.data, ignore_errors=True)
        self.abroad.data.mkdir()
        keys = Keys(Settings(data_dir=self.abroad.data).database_url)
        self._keys = {scope: keys.make(scope, scope, roots=["a"]) for scope in ("read", "admin")}
        everywhere = keys.make(_CANARY, "admin")
        url = f"http://127.0.0.1:{self.abroad.port}"
        settings = {
            "CAIRN_ROOTS": json.dumps({"a": str(self._root), "b": str(self._other)}),
            "CAIRN_AUTH": "keys",
            "CAIRN_RATE_LIMIT": "0",
            "CAIRN_SCAN_SECONDS": "1",
            "CAIRN_WEBHOOK_NETWORKS": "127.0.0.0/8",
            "TENSORSTORE_GCS_HTTP_URL": url,
            "AWS_ENDPOINT_URL": url,
        }
        (self._folder / "default").mkdir(exist_ok=True)
        running = running_plane(self._folder / "default", self._folder, settings)
        self._url, process = self._stack.enter_context(running)
        self._pid = process.pid
        self._http = httpx.Client(base_url=self._url, timeout=_PATIENCE)
        self._stack.callback(self._http.close)
        with Client(self._url, key=everywhere) as client:
            client.create_webhook("http://127.0.0.1:9/")
            if not self._kept.exists():
                for root, run in (("a", REAL), ("a", COPIED), ("b", "victim")):
                    client.wait(client.convert(run, STEPS[REAL][0], root=root).id)

    def close(self) -> None:
        """End the server."""
        self._stack.close()

    def keep(self) -> None:
        """Keep the runs as they are now: copies of them are forged."""
        for base, forged in self.bases.items():
            add_samples(forged)
            shutil.copytree(forged.run, self._kept / base)
        self._source = self.bases[ADOPTED].files.parent
        shutil.copytree(self._source, self._kept / "orbax")
        self._secrets, self._told = self._needles()
        self._before = self._outside()

    def try_out(self, forgery: Forgery, *, jobs: bool) -> Outcome:
        """Forge a run, ask all about it, and judge; what was only slow, once more."""
        outcome = self._tried(forgery, jobs=jobs)
        if outcome.faults.keys() == {"/healthz is slow"}:
            outcome = self._tried(forgery, jobs=jobs)
        return outcome

    def _tried(self, forgery: Forgery, *, jobs: bool) -> Outcome:
        self._number += 1
        forged = self._forged(forgery.base, f"forged-{self._number}")
        shutil.copytree(self._kept / forgery.base, forged.run)
        if forgery.base == ADOPTED:
            source = forged.files.parent
            shutil.copytree(self._kept / "orbax", source)
            for path in (forged.run / "run.json", forged.manifest):
                rewrite(path, lambda body: _rename(body, f"{self._source}", f"{source}"))
        try:
            forgery.forge(forged)
            return self._judged(forgery, forged.run.name, jobs=jobs)
        except BaseException as exc:
            exc.add_note(str(forgery))
            raise
        finally:
            for left in self._root.glob(f"*forged-{self._number}*"):
                is_folder = left.is_dir() and not left.is_symlink()
                shutil.rmtree(left) if is_folder else left.unlink()  # it may be a pipe

    def _judged(self, forgery: Forgery, run: str, *, jobs: bool) -> Outcome:
        outcome, known = Outcome(), {path: _stamp(path) for path in _files(self._root)}
        self._calls.clear()
        with Watch(self._url, self._pid) as self._watch:
            self._ask_all(forgery, run, outcome, jobs=jobs)
        outcome.peak = self._watch.peak
        if self._watch.slowest > HEALTHY_SECONDS * max(1.0, os.getloadavg()[0] / _CORES):
            outcome.fault("/healthz is slow", f"{self._watch.slowest:.1f} s")
        if outcome.peak > PEAK_BYTES:
            outcome.fault(
                "memory", f"{outcome.peak / MIB:.0f} MiB" + ", killed" * self._watch.killed
            )
        if self._calls:
            outcome.fault("calls where nobody may call", len(self._calls))
        if self._outside() != self._before:
            outcome.fault("changed what lies outside")
            self._before = self._outside()
        for path in _files(self._root):
            if known.get(path) != _stamp(path) and path.stat().st_size < _ANSWER_BYTES:
                found = self._secrets.search(path.read_bytes())
                if found:
                    outcome.fault(f"writes {_label(found[0])} below the root", path)
        if self._watch.killed:
            self.start()
        elif not self._serves():
            outcome.fault("the root is not served any more")
            self.start()
        return outcome

    def _serves(self) -> bool:
        """Whether what is good in the root is still answered."""
        good = Question("GET", f"/v1/roots/a/runs/{REAL}/checkpoints/3/tensors")
        return any(self._asked(good, "read")[0] == 200 or time.sleep(1) for _ in range(5))

    # Requests

    def _ask_all(self, forgery: Forgery, run: str, outcome: Outcome, *, jobs: bool) -> None:
        def ask(question: Question) -> bytes:
            return self._ask(question, forgery, outcome)

        asked = [*questions("GET", run, forgery.base), *self._of_artifacts(run, forgery.base)]
        with ThreadPoolExecutor(4) as pool:
            answers = [*pool.map(ask, asked)]
            pairs = zip(asked, answers, strict=True)
            files = [one for question, answer in pairs for one in _of_files(question, answer)]
            [*pool.map(ask, files)]
        if not jobs:
            return
        changes = [one for way in _CHANGES for one in questions(way, run, forgery.base)]
        for question in sorted(changes, key=lambda one: any(end in str(one) for end in _LAST)):
            begun = _json(ask(question)).get("id")
            if isinstance(begun, str) and begun.startswith("op-"):
                self._follow(begun, forgery, outcome)

    def _of_artifacts(self, run: str, base: str) -> Iterator[Question]:
        for path in sorted((self._kept / base / "exports").glob("*/*.json")):
            step, attempt = path.parent.name.split(".")
            artifact = f"artifacts/a~{run}~{step}~{attempt}~{path.stem}"
            yield from (Question("GET", f"/v1/{artifact}"), Question("GET", f"/{artifact}"))

    def _follow(self, operation: str, forgery: Forgery, outcome: Outcome) -> None:
        """Wait until a job has ended; then ask for its events, and for what it made."""
        path, until = f"/v1/operations/{operation}", time.monotonic() + _PATIENCE
        state: dict[str, Any] = {}
        while state.get("state") in ("pending", "running", None) and not self._is_enough(outcome):
            if time.monotonic() > until:
                outcome.fault("a job does not end", operation)
                self._ask(Question("POST", f"{path}:cancel"), forgery, outcome)
                break
            time.sleep(0.05)
            state = _json(self._ask(Question("GET", path), forgery, outcome))
        outcome.statuses[f"job {state.get('state')}"] += 1
        asked = [Question("GET", f"{path}/events"), Question("GET", f"/operations/{operation}")]
        artifact = (state.get("result") or {}).get("artifact_id")
        if artifact:
            asked.append(Question("GET", f"/artifacts/{artifact}"))
            made = Question("GET", f"/v1/artifacts/{artifact}")
            asked += _of_files(made, self._ask(made, forgery, outcome))
        for one in asked:
            self._ask(one, forgery, outcome)

    def _is_enough(self, outcome: Outcome) -> bool:
        """Whether nothing more can be learnt of a forgery, or not in time."""
        return self._watch.killed or "slow answer" in outcome.faults

    def _asked(self, question: Question, key: str) -> tuple[int, httpx.Headers, bytes]:
        """The answer: its status, headers and body, of which the beginning is enough."""
        headers = {"Authorization": f"Bearer {self._keys[key]}", **question.headers}
        method, path, _, body = question
        try:
            with self._http.stream(method, path, headers=headers, json=body) as answer:
                content = bytearray()
                most = _FILE_BYTES if "/files/" in path else _ANSWER_BYTES
                for part in answer.iter_bytes():
                    content += part
                    if len(content) > most:
                        break
                return answer.status_code, answer.headers, bytes(content)
        except httpx.TransportError as exc:
            # A file that turns out to be damaged ends early, as documented.
            early = isinstance(exc, httpx.RemoteProtocolError) and "/files/" in path
            return (0 if early else -1), httpx.Headers(), repr(exc).encode()

    def _ask(self, question: Question, forgery: Forgery, outcome: Outcome) -> bytes:
        """The body of the answer, once it was judged."""
        if self._is_enough(outcome):
            return b""
        began = time.monotonic()
        status, headers, body = self._asked(
            question, "read" if question.method == "GET" else "admin"
        )
        if status == -1 and question.method == "GET":  # another's error may close a connection
            status, headers, body = self._asked(question, "read")
        if self._watch.killed:
            return b""
        if time.monotonic() - began > _ANSWER_SECONDS:
            outcome.fault("slow answer", f"{question}: {status}")
        outcome.statuses[{0: "ended early", -1: "no answer"}.get(status, str(status))] += 1
        if status == -1:
            outcome.fault("no answer", f"{question}: {body!r}")
        if len(body) > _ANSWER_BYTES:
            outcome.fault("an answer of more than 64 MiB", question)
        told = b"\n".join([body, *(b"%s: %s" % one for one in headers.raw)])
        # Lists tell of earlier runs, too, and those of what their forgers wrote.
        sized = "forged-" in question.path and not forgery.tells_sizes
        for pattern in (self._secrets, self._told)[: 1 + sized]:
            if found := pattern.search(told):
                outcome.fault(f"{status} tells {_label(found[0])}", question)
        if b"<script>forged()" in body and "html" in headers.get("content-type", ""):
            outcome.fault("markup in a page", question)
        if "forged=1" in headers.get("set-cookie", ""):
            outcome.fault("a header of the forger's", question)
        problem = re.search(rb"urn:cairn:problem:([a-z-]+)", body)
        kind = problem[1].decode() if problem else "?"
        if status >= 500 and status not in (503, 507):
            outcome.fault(f"{status} {kind}", f"{question}: {body[:300]!r}")
        return body


_CHANGES: Final = ("POST", "PATCH", "DELETE")
_ROUTES: Final = [
    (method, prefix + route.path_format)
    for prefix, routers in ((API_PREFIX, ROUTERS), ("", (*PAGES, health.router, metrics.router)))
    for router in routers
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in sorted(route.methods)
]


def questions(method: str, run: str, base: str) -> Iterator[Question]:
    """Every operation and every page of a method, about a run; to read, those about all as well."""
    step = STEPS[base][0]
    for way, path in _ROUTES:
        open_ = set(re.findall(r"{(\w+)}", path)) - {"root", "run", "step", "alias", "leaf"}
        adopts = path.endswith(":adopt") and base == ADOPTED
        if way != method or open_ or not (method == "GET" or "{run}" in path or adopts):
            continue
        for item, leaf in _LEAVES[base] if "{leaf}" in path else [("", "")]:
            url = path.format(root="a", run=run, step=step, alias="production", leaf=quote(leaf))
            if method == "GET":
                for query in _queries(path, item, base):
                    yield Question(method, f"{url}?{urlencode(query)}" if query else url)
                continue
            bodies = [_BODIES[end] for end in _BODIES if path.endswith(end)]
            for body in bodies[0] if bodies else [{}]:
                text = json.dumps(body).replace("{run}", run).replace('"{step}"', str(step))
                headers = {"If-None-Match" if "promote" in path else "If-Match": "*"}
                yield Question(method, url, headers, json.loads(text))


def _queries(path: str, item: str, base: str) -> list[dict[str, object]]:
    """What is asked besides, by the end of a path."""
    other = {"other": STEPS[base][-1]}
    elsewhere = {"other": STEPS[REAL][0], "other_run": REAL, "other_root": "a"}
    last = path.rpartition("/")[2]
    if last == "{leaf}":
        kinds = [{}, {"format": "safetensors"}, {"format": "json"}, {"stats": True}]
        parts = [{"slice": "0:1", "format": kind} for kind in ("npy", "json")]
        return [{"item": item} | kind for kind in [*kinds, *parts]]
    if last in ("tensor", "statistics", "picture"):
        return [{"item": item, "path": leaf} for item, leaf in _LEAVES[base]]
    if "/compare" in path and "{step}" in path:
        return [other]
    if path.endswith(":diff"):
        return [other | {"values": True}, elsewhere, elsewhere | {"values": True}]
    if path.startswith("/v1/") and last in ("runs", "aliases", "{run}", "{step}", "{alias}"):
        return [{"refresh": True}]
    return [{"refresh": True}, {"state": "all"}] if last == "checkpoints" else [{}]


def _of_files(question: Question, answer: bytes) -> Iterator[Question]:
    """Each file that an answer lists: all of it, and parts."""
    files = _json(answer).get("files")
    if question.path.startswith("/v1/") and isinstance(files, list):
        url = question.path.removesuffix("/files") + "/files"
        for name in sorted(one["name"] for one in files)[:12]:
            for headers in ({"Range": "bytes=0-"}, {}, {"Range": "bytes=-100"}):
                yield Question("GET", f"{url}/{quote(name)}", headers)


def _json(answer: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        value = json.loads(answer)
        return value if isinstance(value, dict) else {}
    return {}


def _files(folder: Path) -> Iterator[Path]:
    """Regular files below a folder; no link is followed."""
    for parent, _, names in os.walk(folder):
        paths = [Path(parent, name) for name in names]
        yield from (path for path in paths if path.is_file() and not path.is_symlink())


def _size_and_sum(path: Path) -> tuple[int, bytes]:
    data = path.read_bytes()
    return len(data), b"%08x" % google_crc32c.value(data)


def _stamp(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _rename(body: dict[str, Any], old: str, new: str) -> None:
    body |= json.loads(json.dumps(body).replace(old, new))


def _label(secret: bytes) -> str:
    """What was told, in a word."""
    if re.fullmatch(rb"[0-9a-f]{8}|[0-9a-f]{16}", secret):
        return "a checksum"
    return "a size" if secret.isdigit() else repr(secret[:20])
