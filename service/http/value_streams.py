"""Long answers made of stored values: few at a time, and none begun that can't be."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from itertools import chain

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.types import Receive, Scope, Send

from cairn.service.http.store_turns import ANSWER_SECONDS, StoreTurns
from cairn.storage.store import within


class ValueStream(StreamingResponse):
    """An answer that is read from the store while it is sent.

    Its first values are read before its status is sent, once it has a turn: each answer that is
    under way holds what was read ahead, however slowly its client takes it.
    """

    def __init__(
        self,
        blocks: Callable[[], Iterator[bytes]],
        request: Request,
        root: str,
        held_bytes: int,
        headers: Mapping[str, str],
    ) -> None:
        """Of a file.

        Args:
            blocks: Makes it, from its beginning: a head, then the values.
            request: That is answered.
            root: Name of the root that is read.
            held_bytes: Memory that it takes while it is made.
            headers: Of the answer, its length among them.
        """
        super().__init__(iter(()), headers=headers, media_type="application/octet-stream")
        self._blocks = blocks
        self._turn = partial(_turn, request.app.state.streams, request, root, held_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read and send it."""
        async with self._turn():
            begun = await run_in_threadpool(_begun, self._blocks())
            self.body_iterator = iterate_in_threadpool(begun)
            await super().__call__(scope, receive, send)


class ValueRead(Response):
    """A short answer that is made of values.

    One for which much is read waits for the turns of long answers; another has a turn of the root's
    and ends in the time that one may take.
    """

    def __init__(
        self,
        make: Callable[[], Response],
        request: Request,
        root: str,
        held_bytes: int,
        *,
        is_long: bool = True,
    ) -> None:
        """Of an answer.

        Args:
            make: Reads what it needs, and makes it. What it raises becomes the answer.
            request: That is answered.
            root: Name of the root that is read.
            held_bytes: Memory that it takes while it is made.
            is_long: Whether much is read.
        """
        super().__init__()
        state = request.app.state
        turns = state.streams if is_long else state.turns
        self._make, self._turn = make, partial(_turn, turns, request, root, held_bytes)
        self._is_long = is_long

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, make and send it."""
        with nullcontext() if self._is_long else within(ANSWER_SECONDS):
            async with self._turn():
                made = await run_in_threadpool(self._make)
        await made(scope, receive, send)


@asynccontextmanager
async def _turn(
    turns: StoreTurns, request: Request, root: str, held_bytes: int
) -> AsyncIterator[None]:
    """A turn of a root, and memory."""
    caller, memory = request.state.caller.name, request.app.state.value_memory
    async with (
        turns.turn(root, caller),
        memory.room((f"root {root}", f"caller {caller}"), held_bytes),
    ):
        yield


def _begun(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The same, its head and its first values already read."""
    first = [next(blocks, b""), next(blocks, b"")]
    return chain(first, blocks)
