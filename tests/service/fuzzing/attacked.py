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

from cairn.service.app import API_PREFIX, ROUTERS
from cairn.service.client.client import Client
from cairn.service.dashboard import ROUTERS as PAGES
from cairn.service.settings import Settings
from cairn.storage.adoption import adopt
from cairn.storage.runs import Run, promote_step
from cairn.storage.store import parse_uri
from examples.demo.servers import control_plane
from tests.faults.report import is_long
from tests.plain_orbax import manager_of_items
from tests.service import jobs
from tests.service.access.conftest import Keys
from tests.service.fuzzing.forging import (
    ADOPTED,
    OLDER,
    REAL,
    STEPS,
    Abroad,
    Forged,
    Forgery,
    add_samples,
    reseal_source,
    rewrite,
)
from tests.service.jobs import CONFIG, save_llama, shapes_of
from tests.service.planes import start
from tests.service.stores import annotate
from tests.storage.older_steps import as_version_3

MIB: Final = 1 << 20
PEAK_BYTES: Final = 512 * MIB
"""Most memory that a forged run may take, beside what the server has when nobody asks."""

HEALTHY_SECONDS: Final = 1.0
_KILLED_BYTES: Final = 1536 * MIB
"""A server that takes so much more is killed: others need the machine."""

_PATIENCE: Final = 40.0
_ANSWER_BYTES: Final = 64 * MIB
_CANARY: Final = "canary-5f1c0d7e"
_WEIGHT: Final = 7654321.5
_CONFIG: Final = replace(CONFIG, hidden_size=48, intermediate_size=80)  # other sizes of files
_DOCUMENTED: Final = ("corrupt", "store-unsound")
"""Problems that are answered with 500, as what is stored is damaged."""

_BODIES: Final[dict[str, list[dict[str, Any]]]] = {
    ":plan": [{"mesh": {"axes": {"fsdp": 2, "tp": 2}}}],
    ":verify": [{}],
    ":gather": [{"items": ["model"]}],
    ":convert": [{}, {"format": "gguf"}],
    ":restore": [{"run": "{run}-fork"}],
    ":promote": [{"alias": "best"}],
    ":repair": [{"dry_run": True}, {"dry_run": False}],
    ":applyRetention": [{"policy": {"keep_last": 1}, "dry_run": dry} for dry in (True, False)],
    ":gc": [{"dry_run": True}, {"dry_run": False}],
    ":undelete": [{}],
    ":takeOver": [{"attempt": 1}],
    "/checkpoints": [{"step": "{step}"}],
    "/{step}": [{"labels": {"asked": "yes"}}],
    "/{run}": [{"labels": {"asked": "yes"}}],
    "/runs:adopt": [{"folder": "orbax-{run}", "run": "{run}-again"}],
}
"""What is asked by the end of a path; an operation that is not here gets an empty body."""

_LAST: Final = ("DELETE", ":takeOver", ":gc", ":applyRetention", ":repair")
"""Asked after all others, which need what these remove."""


class Leaf(NamedTuple):
    item: str
    path: str


_LEAVES: Final = {
    REAL: [Leaf("model", "model/norm/scale"), Leaf("optimizer", "mu/embedding")],
    OLDER: [Leaf("model", "model/norm/scale"), Leaf("optimizer", "count")],
    ADOPTED: [Leaf("params", "w"), Leaf("params", "b")],
}


class Question(NamedTuple):
    """One request, and whose it is."""

    method: str
    path: str
    headers: Mapping[str, str] = {}
    body: dict[str, Any] | None = None


@dataclass
class Outcome:
    """What came of one forgery."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: dict[str, list[str]] = field(default_factory=dict)
    slow: float = 0.0
    peak: int = 0

    def fault(self, kind: str, where: str = "") -> None:
        """Note a fault, and where it was."""
        self.faults.setdefault(kind, []).append(where)


class Watch:
    """Looks at the process of a server while it is asked: how quick, how large, whom it calls."""

    def __init__(self, url: str, pid: int) -> None:
        self._url, self._pid, self._ended = url, pid, threading.Event()
        self.slowest, self.killed, self.rss = 0.0, False, 0
        self.base = _memory(pid, "VmRSS")
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

    @property
    def peak(self) -> int:
        """Most bytes at any moment, beyond those at the beginning."""
        return max(_memory(self._pid, "VmHWM"), self.rss) - self.base

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=_PATIENCE) as http:
            while True:
                began = time.monotonic()
                with suppress(httpx.HTTPError):
                    http.get("/healthz")
                self.slowest = max(self.slowest, time.monotonic() - began)
                if self._ended.wait(0.05):
                    return

    def _guard(self) -> None:
        while not self._ended.wait(0.02):
            self.rss = max(self.rss, _memory(self._pid, "VmRSS"))
            if self.rss - self.base > _KILLED_BYTES and not self.killed:
                self.killed = True
                os.kill(self._pid, 9)


def _memory(pid: int, name: str) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


@contextmanager
def _listening() -> Iterator[tuple[int, list[object]]]:
    """A port where nobody may call, and who did."""
    calls: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, peer = server.accept()
                    calls.append(peer)
                    connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield server.getsockname()[1], calls
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextmanager
def attack(folder: Path, *, serving: bool = True) -> Iterator["Attack"]:
    """A server under attack, in an empty folder; or what it would serve alone."""
    with _listening() as (port, calls):
        begun = Attack(folder, port, calls, serving=serving)
        try:
            yield begun
        finally:
            begun.close()


class Attack:
    """The server, the roots, and what must not be seen.

    Attributes:
        bases: the runs that are forged, as real code wrote them.
        abroad: what a forger points at.
    """

    def __init__(self, folder: Path, port: int, calls: list[object], *, serving: bool) -> None:
        self._folder, self._calls = folder, calls
        self._root, self._other, self._kept = (folder / name for name in ("a", "b", "kept"))
        self._stack, self._number = ExitStack(), 0
        self._questions = _routes()
        self.bases = self._make_runs()
        canary = folder / "elsewhere" / "canary.txt"
        canary.parent.mkdir()
        canary.write_text(_CANARY * 4321)
        data = folder / "control-plane"
        self.abroad = Abroad(self._other / "victim", canary, data, port)
        self._secrets, self._sizes = self._needles()
        if serving:
            self.start()
            if is_long():
                self._export()
        for forged in self.bases.values():
            add_samples(forged)
            shutil.copytree(forged.run, self._kept / forged.base, symlinks=True)
        shutil.copytree(self.bases[ADOPTED].files.parent, self._kept / "orbax", symlinks=True)
        self._before = self._outside()

    def close(self) -> None:
        """End the server."""
        self._stack.close()

    # What there is

    def _make_runs(self) -> dict[str, Forged]:
        for name in (REAL, OLDER):
            save_llama(self._root / name, STEPS[REAL])
        run = Run.open(parse_uri(self._root / OLDER))
        as_version_3(run, run.step(STEPS[OLDER][0]))
        tree = {"w": np.ones((4, 4), np.float32), "b": np.arange(6, dtype=np.int32)}
        manager_of_items(self._root / f"orbax-{ADOPTED}", tree)
        adopt(self._root / f"orbax-{ADOPTED}", self._root / ADOPTED)
        victim = self._other / "victim"
        _save_victim(victim)
        bases = {}
        for base, steps in STEPS.items():
            made = Run.open(parse_uri(self._root / base))
            annotate(made, steps[0], labels={"by": "test"}, metrics={"loss": 0.5})
            promote_step(made, steps[0], "production", expect=None)
            bases[base] = self._forged(base, base)
        return bases

    def _forged(self, base: str, name: str) -> Forged:
        run = self._root / name
        files = self._root / f"orbax-{name}/5" if base == ADOPTED else run / "attempts/1/3"
        return Forged(base, run, files)

    def _needles(self) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
        """What no answer may have: texts and values; and checksums and sizes of whole files."""
        number = np.float32(_WEIGHT).tobytes() * 4
        texts = [
            _CANARY.encode(),
            b"7654321.5",
            number,
            b"SQLite format 3\0",
            b"root:x:0:0",
            b"\0PWD=",
        ]
        own = {_sums(path) for path in _files(self._root)}
        foreign = {_sums(path) for path in (*_files(self._other), self.abroad.canary)} - own
        crcs = {crc for _, crc in foreign} - {crc for _, crc in own}
        sizes = {size for size, _ in foreign if size > 10_000} - {size for size, _ in own}
        told = b"|".join([*(crc.encode() for crc in crcs)])
        many = b"|".join(b"%d" % size for size in sizes)
        return (
            re.compile(b"|".join([*map(re.escape, texts), told])),
            re.compile(b"(?<![0-9.:])(" + many + b")(?![0-9])"),  # and no part of a second
        )

    def _outside(self) -> dict[str, tuple[int, int, int]]:
        """What is outside of root `a`, with what changes if anybody touches it."""
        stats = {}
        for path in (*_files(self._other), self.abroad.canary):
            stat = path.stat()
            stats[str(path)] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return stats

    # The server

    def start(self) -> None:
        """Start it, with databases in which nothing was noted yet."""
        self._stack.close()
        shutil.rmtree(self.abroad.data, ignore_errors=True)
        roots = {"a": str(self._root), "b": str(self._other)}
        url = f"http://127.0.0.1:{self.abroad.port}"
        settings = {
            "CAIRN_ROOTS": json.dumps(roots),
            "CAIRN_AUTH": "keys",
            "CAIRN_RATE_LIMIT": "0",
            "CAIRN_SCAN_SECONDS": "1",
            "CAIRN_WEBHOOK_NETWORKS": "127.0.0.0/8",
            "TENSORSTORE_GCS_HTTP_URL": url,
            "AWS_ENDPOINT_URL": url,
            _CANARY.upper().replace("-", "_"): _CANARY,
        }
        (self._folder / "default").mkdir(exist_ok=True)
        self.abroad.data.mkdir()
        keys = Keys(Settings(data_dir=self.abroad.data).database_url)
        scopes = {"read": ["a"], "admin": ["a"], "all": None}
        self._keys = {
            name: keys.make(name if roots else _CANARY, name if roots else "admin", roots=roots)
            for name, roots in scopes.items()
        }
        begun = control_plane(str(self._folder / "default"), self._folder, settings, 0, start)
        self._url, _, process = self._stack.enter_context(begun)
        self._pid = process.pid
        limits = httpx.Limits(max_connections=16)
        self._http = httpx.Client(base_url=self._url, timeout=_PATIENCE, limits=limits)
        self._stack.callback(self._http.close)
        with Client(self._url, key=self._keys["all"]) as client:
            client.create_webhook("http://127.0.0.1:9/")

    def _export(self) -> None:
        """Have real exports in the runs that can be exported."""
        with Client(self._url, key=self._keys["all"]) as client:
            for base in (REAL, OLDER):
                client.wait(client.convert(base, STEPS[base][0], root="a").id)
            client.wait(client.convert("victim", 3, root="b").id)

    # One forgery

    def try_out(self, forgery: Forgery, *, jobs: bool) -> Outcome:
        """Forge a run, ask everything about it, and judge."""
        self._number += 1
        name = f"forged-{self._number}"
        forged = self._copy(forgery.base, name)
        try:
            try:
                forgery.forge(forged)
            except BaseException as exc:
                exc.add_note(str(forgery))
                raise
            return self._judged(forgery, forged, jobs=jobs)
        finally:
            for left in self._root.glob(f"*{name}*"):
                left.unlink() if left.is_symlink() or left.is_file() else _remove(left)

    def _copy(self, base: str, name: str) -> Forged:
        forged = self._forged(base, name)
        if base == ADOPTED:
            shutil.copytree(self._kept / "orbax", forged.files.parent)
        shutil.copytree(self._kept / base, forged.run, symlinks=True)
        if base == ADOPTED:
            reseal_source(forged, self.bases[ADOPTED].files.parent)
        return forged

    def _judged(self, forgery: Forgery, forged: Forged, *, jobs: bool) -> Outcome:
        outcome, known = Outcome(), {str(path): _stamp(path) for path in _files(self._root)}
        self._calls.clear()
        with Watch(self._url, self._pid) as watch:
            self._watch = watch
            self._ask_all(forgery, forged.run.name, outcome, jobs=jobs)
        outcome.slow, outcome.peak = watch.slowest, watch.peak
        if watch.slowest > HEALTHY_SECONDS:
            outcome.fault("/healthz is slow", f"{watch.slowest:.1f} s")
        if watch.peak > PEAK_BYTES:
            outcome.fault("memory", f"{watch.peak / MIB:.0f} MiB more{', killed' * watch.killed}")
        if self._calls:
            outcome.fault("calls to where nobody may call", str(len(self._calls)))
        if self._outside() != self._before:
            outcome.fault("changed what lies outside")
            self._before = self._outside()
        for path in _files(self._root):
            if known.get(str(path)) != _stamp(path) and path.stat().st_size < _ANSWER_BYTES:
                found = self._secrets.search(path.read_bytes())
                if found:
                    outcome.fault(f"writes {_label(found[0])} below the root", str(path))
        if not self._answers():
            outcome.fault("a good run of the root is not answered any more")
            self.start()
        return outcome

    def _answers(self) -> bool:
        """Whether the server still serves the root."""
        for _ in range(3):
            with suppress(httpx.HTTPError):
                path = f"/v1/roots/a/runs/{REAL}/checkpoints/3/tensors"
                headers = {"Authorization": f"Bearer {self._keys['read']}"}
                if self._http.get(path, headers=headers).status_code == 200:
                    return True
            time.sleep(1)
        return False

    def _ask_all(self, forgery: Forgery, run: str, outcome: Outcome, *, jobs: bool) -> None:
        gets = [one for one in self._of(run, forgery, "GET")]
        with ThreadPoolExecutor(4) as pool:
            answers = [*pool.map(lambda one: self._ask(one, "read", forgery, outcome), gets)]
            names = {name for answer in answers if answer for name in _file_names(answer)}
            files = [one for name in sorted(names)[:12] for one in _of_file(run, forgery, name)]
            [*pool.map(lambda one: self._ask(one, "read", forgery, outcome), files)]
        if not jobs:
            return
        posts = [
            one for verb in ("POST", "PATCH", "DELETE") for one in self._of(run, forgery, verb)
        ]
        posts.sort(key=lambda one: any(end in f"{one.method} {one.path}" for end in _LAST))
        for question in posts:
            answer = self._ask(question, "admin", forgery, outcome)
            with suppress(ValueError, TypeError, KeyError):
                self._wait(json.loads(answer or b"")["id"], forgery, outcome)

    def _wait(self, operation: str, forgery: Forgery, outcome: Outcome) -> None:
        """Until a job has ended; then ask for its events, and for what it made."""
        path = f"/v1/operations/{operation}"
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            answer = self._ask(Question("GET", path), "read", forgery, outcome)
            state = json.loads(answer or b"{}")
            if state.get("state") not in ("pending", "running", None):
                break
            time.sleep(0.05)
        else:
            outcome.fault("a job does not end", operation)
            self._ask(Question("POST", f"{path}:cancel"), "admin", forgery, outcome)
            return
        outcome.statuses[f"job {state['state']}"] += 1
        asked = [f"{path}/events", f"/operations/{operation}"]
        artifact = (state.get("result") or {}).get("artifact_id")
        if artifact:
            asked += [f"/v1/artifacts/{artifact}", f"/artifacts/{artifact}"]
        for one in asked:
            told = self._ask(Question("GET", one), "read", forgery, outcome)
            for name in sorted(_file_names(told or b""))[:4] if "/v1/artifacts" in one else ():
                self._ask(Question("GET", f"{one}/files/{quote(name)}"), "read", forgery, outcome)

    def _ask(
        self, question: Question, key: str, forgery: Forgery, outcome: Outcome
    ) -> bytes | None:
        """The body of the answer, once it was judged; None without an answer."""
        if self._watch.killed:
            return None
        headers = {"Authorization": f"Bearer {self._keys[key]}", **question.headers}
        asked = f"{question.method} {question.path[:200]}"
        try:
            with self._http.stream(
                question.method, question.path, headers=headers, json=question.body
            ) as answer:
                body = b""
                for part in answer.iter_bytes():
                    body += part
                    if len(body) > _ANSWER_BYTES:
                        outcome.fault("an answer of more than 64 MiB", asked)
                        break
        except httpx.TransportError as exc:
            broken = isinstance(exc, httpx.RemoteProtocolError) and "incomplete" in str(exc)
            if not broken:  # a file that turned out damaged ends early, as documented
                if not self._watch.killed:
                    outcome.fault(type(exc).__name__, asked)
            outcome.statuses["broken off" if broken else "no answer"] += 1
            return None
        outcome.statuses[str(answer.status_code)] += 1
        head = b"\n".join(b"%s: %s" % one for one in answer.headers.raw)
        own = "forged-" in question.path and not forgery.tells_sizes  # lists tell of older runs too
        for pattern in (self._secrets, self._sizes if own else None):
            found = pattern and (pattern.search(body) or pattern.search(head))
            if found:
                outcome.fault(f"{answer.status_code} tells {_label(found[0])}", asked)
        if b"<script>forged()" in body and b"html" in head:
            outcome.fault("markup in a page", asked)
        if "set-cookie" in answer.headers and "forged" in answer.headers["set-cookie"]:
            outcome.fault("a header of the forger", asked)
        if answer.status_code >= 500 and answer.status_code not in (503, 507):
            kind = re.search(rb"urn:cairn:problem:([a-z-]+)", body)
            slug = kind[1].decode() if kind else "?"
            if slug not in _DOCUMENTED:
                outcome.fault(f"{answer.status_code} {slug}", f"{asked}: {body[:300]!r}")
        return body

    def _of(self, run: str, forgery: Forgery, method: str) -> Iterator[Question]:
        """Every request of a method, about a run."""
        steps = STEPS[forgery.base]
        for verb, path in self._questions:
            if verb != method or ("{root}" not in path and "{" in path):
                continue
            if "{name}" in path or (method != "GET" and "{run}" not in path):
                continue
            if method != "GET" and path.endswith("runs:adopt") and forgery.base != ADOPTED:
                continue
            names = {"root": "a", "run": run, "alias": "production", "step": str(steps[0])}
            for leaf in _LEAVES[forgery.base] if "{leaf}" in path else [Leaf("", "")]:
                url = path.format(leaf=quote(leaf.path), **names)
                if method == "GET":
                    for query in _queries(path, leaf, forgery.base):
                        yield Question(method, f"{url}{query}")
                elif method == "POST" or method == "PATCH":
                    end = next((end for end in _BODIES if path.endswith(end)), None)
                    for body in _BODIES[end] if end else [{}]:
                        filled = json.dumps(body).replace("{run}", run)
                        body = json.loads(filled.replace('"{step}"', names["step"]))
                        yield Question(
                            method, url, {"If-None-Match": "*"} if end == ":promote" else {}, body
                        )
                else:
                    yield Question(method, url, {"If-Match": "*"})


def _routes() -> list[tuple[str, str]]:
    """Method and path of every operation and every page."""
    routers = [(API_PREFIX, router) for router in ROUTERS] + [("", router) for router in PAGES]
    return [
        (method, prefix + route.path_format)
        for prefix, router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods)
    ]


def _queries(path: str, leaf: Leaf, base: str) -> list[str]:
    """What is asked besides, by the end of a path."""
    if path.endswith("{leaf}"):
        kinds = [{}, {"format": "safetensors"}, {"format": "json"}, {"stats": "true"}]
        kinds += [{"slice": "0:1", "format": one} for one in ("npy", "json")]
        return ["?" + urlencode({"item": leaf.item} | one) for one in kinds]
    last = path.rpartition("/")[2]
    if last in ("tensor", "statistics", "picture"):
        return ["?" + urlencode({"item": one.item, "path": one.path}) for one in _LEAVES[base]]
    other = STEPS[base][-1]
    if "/compare" in path and "{step}" in path:
        return [f"?other={other}"]
    if path.endswith(":diff"):
        there = {"other": STEPS[REAL][0], "other_run": REAL, "other_root": "a"}
        return [
            f"?other={other}&values=true",
            "?" + urlencode(there),
            f"?{urlencode(there)}&values=true",
        ]
    if last in ("checkpoints", "runs", "aliases", "{run}", "{step}", "{alias}") and "/v1" in path:
        return ["?refresh=true", "?state=all"] if last == "checkpoints" else ["?refresh=true"]
    return [""]


def _of_file(run: str, forgery: Forgery, name: str) -> Iterator[Question]:
    path = f"/v1/roots/a/runs/{run}/checkpoints/{STEPS[forgery.base][0]}/files/{quote(name)}"
    for headers in ({"Range": "bytes=0-"}, {}, {"Range": "bytes=-100"}):
        yield Question("GET", path, headers)


def _file_names(answer: bytes) -> set[str]:
    """Names of files that an answer lists."""
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        return {one["name"] for one in json.loads(answer)["files"]}
    return set()


def _save_victim(run: Path) -> None:
    """A run whose every value, label and name tells whose it is."""
    weights = {
        path: np.full(shape, _WEIGHT, np.float32) for path, shape in shapes_of(_CONFIG).items()
    }
    Run.create(run, labels={"team": _CANARY})
    with patch.object(jobs, "leaves_of", lambda *_, **__: weights):
        save_llama(run, STEPS[REAL], config=_CONFIG)
    made = Run.open(parse_uri(run))
    for step in STEPS[REAL]:
        annotate(made, step, labels={"note": _CANARY}, metrics={"loss": _WEIGHT})
    promote_step(made, STEPS[REAL][0], "production", by=_CANARY, reason=_CANARY, expect=None)
    for name in ("lease.json", "attempts/1.json"):
        rewrite(run / name, lambda body: body.update(writer=_CANARY))


def _files(folder: Path) -> Iterator[Path]:
    """Regular files below a folder; no link is followed."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                yield path


def _label(secret: bytes) -> str:
    """What was told, in a word."""
    if re.fullmatch(rb"[0-9a-f]{8}", secret):
        return "a checksum"
    return "a size" if secret.isdigit() else repr(secret[:20])


def _sums(path: Path) -> tuple[int, str]:
    data = path.read_bytes()
    return len(data), f"{google_crc32c.value(data):08x}"


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
