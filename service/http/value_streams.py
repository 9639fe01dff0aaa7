"""Long answers made of stored values: few at a time, and none begun that can't be."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import chain

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.types import Receive, Scope, Send

from cairn.service.http.store_turns import StoreTurns


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
        headers: Mapping[str, str],
    ) -> None:
        """Of a file.

        Args:
            blocks: Makes it, from its beginning: a head, then the values.
            request: That is answered.
            root: Name of the root that is read.
            headers: Of the answer, its length among them.
        """
        super().__init__(iter(()), headers=headers, media_type="application/octet-stream")
        self._blocks, self._turn = blocks, _turn_of(request, root)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read and send it."""
        async with self._turn():
            begun = await run_in_threadpool(_begun, self._blocks())
            self.body_iterator = iterate_in_threadpool(begun)
            await super().__call__(scope, receive, send)


class LongRead(Response):
    """A short answer for which as much is read as for a long one: it waits for the same turns."""

    def __init__(self, make: Callable[[], Response], request: Request, root: str) -> None:
        """Of an answer.

        Args:
            make: Reads what it needs, and makes it. What it raises becomes the answer.
            request: That is answered.
            root: Name of the root that is read.
        """
        super().__init__()
        self._make, self._turn = make, _turn_of(request, root)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, make and send it."""
        async with self._turn():
            made = await run_in_threadpool(self._make)
        await made(scope, receive, send)


def _turn_of(request: Request, root: str) -> Callable[[], AbstractAsyncContextManager[None]]:
    turns: StoreTurns = request.app.state.streams
    return partial(turns.turn, root, request.state.caller.name)


def _begun(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The same, its head and its first values already read."""
    first = [next(blocks, b""), next(blocks, b"")]
    return chain(first, blocks)
