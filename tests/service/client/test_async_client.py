"""The client that is awaited: what only it can get wrong; all else is as in the one that waits."""

import asyncio
import json
import os
import socket
import time
from contextlib import aclosing, contextmanager
from threading import Event

import anyio
import httpx
import pytest

from cairn import AsyncClient
from cairn.service.errors import ProblemResponseError, ServerUnreachableError
from cairn.service.schemas import Health, OperationState
from tests.service.jobs import save_llama
from tests.service.planes import running_plane
from tests.service.seams import awaited_file, whole_file
from tests.service.servers import reply, scripted, serve
from tests.service.stores import make_run

HEALTHY = reply(200, Health(version="1").model_dump_json().encode())
STREAM = {"Content_Type": "text/event-stream"}
BLOCK = bytes(64 << 10)
AT_ONCE = 100
"""Requests of a client that are under way at a time."""


def event(number, state, done=0):
    operation = {
        "id": "op-1",
        "kind": "convert",
        "state": state,
        "progress": {"done_bytes": done},
        "request": {},
        "created": "2026-11-21T10:00:00Z",
        "updated": "2026-11-21T10:00:00Z",
    }
    return f"id: {number}\ndata: {json.dumps(operation)}\n\n".encode()


class Endless:
    """Answers with bytes until its client goes away; says when it has begun, and when it ended."""

    def __init__(self, first=BLOCK, **headers):
        self.first, self.headers = first, headers
        self.begun, self.ended = Event(), Event()

    def __call__(self, handler):
        handler.send_response(200)
        for name, value in self.headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(self.first)
                self.begun.set()
                time.sleep(0.01)
        except OSError:
            self.ended.set()


async def happened(event):
    assert await anyio.to_thread.run_sync(event.wait, 20)


def on_loop(work):
    """Run something in an event loop of its own, which must be left with nothing under way."""

    async def run():
        complaints = []
        asyncio.get_running_loop().set_exception_handler(lambda _, found: complaints.append(found))
        result = await work()
        await asyncio.sleep(0.05)  # httpx leaves generators to the loop, each in the next
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert (left, complaints) == (set(), [])
        return result

    return asyncio.run(run())


@pytest.fixture
def url(app):
    with serve(app) as url:
        yield url


def test_the_whole_job_is_done_by_one_client(tmp_path):
    saved = save_llama(tmp_path / "store" / "llama", (1, 2))

    async def job(url):
        async with AsyncClient(url) as cairn:
            assert [run.name async for run in cairn.runs(refresh=True)] == ["llama"]
            newest = await anext(cairn.checkpoints("llama"))
            assert newest.step == 2
            alias = await cairn.promote("llama", newest.step, "production", expect=None)
            with pytest.raises(ProblemResponseError, match="Precondition failed"):
                await cairn.promote("llama", 1, "production", expect=None)
            assert (await cairn.alias("llama", "production")).step == 2
            started = await cairn.convert("llama", alias.step)
            states = [state async for state in cairn.follow(started.id)]
            assert states[-1].state is OperationState.SUCCEEDED
            ended = await cairn.wait(started.id)
            artifact = await cairn.artifact(ended.result["artifact_id"])
            sizes = await asyncio.gather(
                *(cairn.download(artifact.id, f.name, tmp_path / f.name) for f in artifact.files)
            )
            assert sizes == [file.bytes for file in artifact.files]
            leaves = [leaf async for leaf in cairn.tensors("llama", 2, item="model", page_size=3)]
            assert {leaf.path for leaf in leaves} == set(saved[2])
            target = tmp_path / "leaf.npy"
            await cairn.download_tensor("llama", 2, "model/norm/scale", target)
            pages = [page async for page in cairn.diff("llama", 1, 2)]
            assert sum(len(page.differences) for page in pages) > 0
            plan = await cairn.plan("llama", 2, {"fsdp": 2}, page_size=3)
            assert {leaf.path for leaf in leaves} < {leaf.path for leaf in plan.leaves}
            events = [one.kind async for one in cairn.events(kind="alias.moved")]
            assert events == ["alias.moved"]
            blocks = [block async for block in cairn.artifact_blocks(artifact.id, "config.json")]
            return b"".join(blocks)

    with running_plane(tmp_path / "store", tmp_path) as (url, _):
        config = on_loop(lambda: job(url))
    assert json.loads(config)["model_type"] == "llama"
    assert (tmp_path / "config.json").read_bytes() == config
    assert not list(tmp_path.glob(".*.part"))


def test_more_than_may_be_under_way_are_asked_at_once(url, root):
    make_run(root / "run", [1, 2, 3])
    count = AT_ONCE + 20

    async def ask():
        async with AsyncClient(url) as cairn:
            asked = (cairn.checkpoint("run", 1 + number % 3) for number in range(count))
            return await asyncio.gather(*asked)

    assert [found.step for found in on_loop(ask)] == [1 + number % 3 for number in range(count)]


class Counting(httpx.AsyncBaseTransport):
    """Answers that the server is well, after a while; counts who waits for that."""

    def __init__(self):
        self.now, self.most = 0, 0

    async def handle_async_request(self, request):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        return httpx.Response(200, content=Health(version="1").model_dump_json())


def test_no_more_than_a_hundred_requests_are_under_way():
    counting = Counting()

    async def ask():
        async with AsyncClient(transport=counting) as cairn:
            await asyncio.gather(*(cairn.health() for _ in range(3 * AT_ONCE)))

    on_loop(ask)
    assert counting.most == AT_ONCE


def test_streams_that_last_keep_no_request_waiting():
    """As many are open as a pool of connections usually has; each is one more connection."""
    following = 110
    done = Event()

    def answer(handler):
        if handler.path == "/healthz":
            HEALTHY(handler)
            return
        reply(200, event(1, "running"), **STREAM)(handler)
        handler.wfile.flush()
        done.wait(30)

    async def ask(url):
        async with AsyncClient(url) as cairn:
            streams = [cairn.follow("op-1", patience=5) for _ in range(following)]
            try:
                states = [await anext(stream) for stream in streams]
                return len(states), (await cairn.health()).version
            finally:
                done.set()
                for stream in streams:
                    await stream.aclose()

    with scripted(answer) as (url, _):
        assert on_loop(lambda: ask(url)) == (following, "1")


def test_an_operation_is_followed_over_a_broken_stream_without_repeats():
    first = event(1, "pending") + event(2, "running", 10) + event(3, "running", 20)[:25]
    second = event(2, "running", 10) + event(3, "running", 20) + event(4, "succeeded", 100)
    replies = reply(200, first, length=10_000, **STREAM), reply(200, second, **STREAM)

    async def follow(url):
        async with AsyncClient(url) as cairn:
            return [state.progress.done_bytes async for state in cairn.follow("op-1")]

    with scripted(*replies) as (url, requests):
        assert on_loop(lambda: follow(url)) == [0, 10, 20, 100]
    assert [request.headers["Last-Event-ID"] for request in requests] == [None, "2"]


def test_what_is_not_followed_to_its_end_is_closed_where_that_is_said():
    endless = Endless(event(1, "running") + event(2, "running"), **STREAM)

    async def follow(url):
        async with AsyncClient(url) as cairn:
            async with aclosing(cairn.follow("op-1")) as states:
                async for state in states:
                    assert state.state is OperationState.RUNNING
                    break
            await happened(endless.ended)

    with scripted(endless) as (url, _):
        on_loop(lambda: follow(url))


def test_what_is_left_halfway_is_closed_with_the_client_at_the_latest():
    endless = Endless(event(1, "running"), **STREAM)

    async def follow(url):
        async with AsyncClient(url) as cairn:
            states = cairn.follow("op-1")
            await anext(states)
        await happened(endless.ended)

    with scripted(endless) as (url, _):
        on_loop(lambda: follow(url))


async def cancel_when(begun, work, how):
    """Cancel some work once it has begun, as asyncio does it, or as anyio does."""
    if how == "task":
        task = asyncio.ensure_future(work)
        await happened(begun)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: work)
            await happened(begun)
            await anyio.sleep(0.05)
            group.cancel_scope.cancel()


@pytest.mark.parametrize("how", ["task", "scope"])
def test_a_download_that_is_cancelled_leaves_nothing(tmp_path, how):
    (tmp_path / "f").write_bytes(b"before")
    endless = Endless(ETag='"v1"')

    async def download(url):
        async with AsyncClient(url) as cairn:
            await cancel_when(endless.begun, cairn.download("a", "f", tmp_path / "f"), how)
            await happened(endless.ended)
            assert (await cairn.health()).version == "1"

    with scripted(endless, HEALTHY) as (url, _):
        on_loop(lambda: download(url))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("f", b"before")]


@pytest.mark.parametrize("how", ["task", "scope"])
def test_requests_that_are_cancelled_give_their_turns_back(how):
    asked, release = Event(), Event()

    def answer(handler):
        if release.is_set():
            HEALTHY(handler)
            return
        asked.set()
        release.wait(30)

    async def ask(url):
        async with AsyncClient(url) as cairn:

            async def all_at_once():
                await asyncio.gather(*(cairn.health() for _ in range(AT_ONCE + 5)))

            await cancel_when(asked, all_at_once(), how)
            release.set()
            return await cairn.health()

    with scripted(answer) as (url, _):
        try:
            assert on_loop(lambda: ask(url)).version == "1"
        finally:
            release.set()


def test_a_pause_before_a_request_is_sent_again_can_be_cancelled():
    problem = b'{"type": "urn:cairn:problem:not-ready"}'
    busy = reply(503, problem, Content_Type="application/problem+json", Retry_After="500")

    async def ask(url):
        async with AsyncClient(url, retry_seconds=1000) as cairn, asyncio.timeout(0.5):
            await cairn.health()

    with scripted(busy, HEALTHY) as (url, requests):
        with pytest.raises(TimeoutError):
            on_loop(lambda: ask(url))
        assert len(requests) == 1


class SlowFile:
    """A file on a disk that takes its time."""

    def __init__(self, file, begun):
        self.file, self.begun, self.ended = file, begun, 0

    @property
    def is_writing(self):
        return self.begun.is_set() and not self.ended

    def write(self, data):
        self.begun.set()
        time.sleep(0.3)
        written = self.file.write(data)
        self.ended += 1
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.fixture
def slow_disk(monkeypatch):
    """What was opened on it; set once somebody writes."""
    real, begun, opened = whole_file.whole_file, Event(), []

    @contextmanager
    def slow(target):
        with real(target) as file:
            opened.append(SlowFile(file, begun))
            yield opened[0]

    monkeypatch.setattr(whole_file, "whole_file", slow)
    return opened, begun


def test_others_go_on_while_a_slow_disk_is_written(tmp_path, slow_disk):
    meanwhile = 0

    async def tick():
        nonlocal meanwhile
        while True:
            await asyncio.sleep(0.01)
            meanwhile += any(file.is_writing for file in slow_disk[0])

    async def download(url):
        async with AsyncClient(url) as cairn:
            ticking = asyncio.create_task(tick())
            size = await cairn.download("a", "f", tmp_path / "f")
            ticking.cancel()
            await asyncio.wait([ticking])
            return size

    with scripted(reply(200, b"1234")) as (url, _):
        assert on_loop(lambda: download(url)) == 4
    assert slow_disk[0][0].ended == 1
    assert meanwhile > 1


@pytest.mark.parametrize("how", ["task", "scope"])
def test_a_download_that_is_cancelled_while_it_writes_leaves_nothing(tmp_path, slow_disk, how):
    async def download(url):
        async with AsyncClient(url) as cairn:
            await cancel_when(slow_disk[1], cairn.download("a", "f", tmp_path / "f"), how)
            await asyncio.sleep(0.5)

    with scripted(Endless()) as (url, _):
        on_loop(lambda: download(url))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["task", "scope"])
def test_a_download_that_is_cancelled_after_its_last_byte_leaves_nothing_half(tmp_path, how):
    async def write(scope):
        async with awaited_file.whole_file(tmp_path / "f") as file:
            await file.write(b"all")
            if how == "task":
                asyncio.current_task().cancel()
            else:
                scope.cancel()

    async def download():
        with anyio.CancelScope() as scope:
            await asyncio.ensure_future(write(scope)) if how == "task" else await write(scope)

    if how == "task":
        with pytest.raises(asyncio.CancelledError):
            on_loop(download)
    else:
        on_loop(download)
    assert list(tmp_path.iterdir()) == []


def test_a_download_goes_on_where_it_broke(tmp_path):
    body = os.urandom(200_000)
    half = len(body) // 2
    replies = (
        reply(200, body[:half], length=len(body), ETag='"v1"'),
        reply(206, body[half:], length=len(body) - half, ETag='"v1"'),
    )

    async def download(url):
        async with AsyncClient(url) as cairn:
            return await cairn.download("a", "f", tmp_path / "f")

    with scripted(*replies) as (url, requests):
        assert on_loop(lambda: download(url)) == len(body)
    assert (tmp_path / "f").read_bytes() == body
    assert requests[1].headers["Range"] == f"bytes={half}-"


def test_a_problem_in_place_of_a_stream_is_told_whole(url, root, tmp_path):
    make_run(root / "run", [1])

    async def ask():
        async with AsyncClient(url) as cairn:
            with pytest.raises(ProblemResponseError, match="No such run"):
                await cairn.download_tensor("none", 1, "w", tmp_path / "f")
            with pytest.raises(ProblemResponseError, match="can't be used here"):
                await anext(cairn.follow("none"))

    on_loop(ask)
    assert not list(tmp_path.glob("*f*"))


def test_a_server_that_is_not_there_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

        async def ask():
            async with AsyncClient(url) as cairn:
                await cairn.health()

        with pytest.raises(ServerUnreachableError, match=rf"{url}: .*cairn serve"):
            on_loop(ask)


def test_a_client_may_be_made_before_there_is_a_loop(url):
    cairn = AsyncClient(url)

    async def ask():
        async with cairn:
            return await cairn.health()

    assert on_loop(ask).status == "ok"
