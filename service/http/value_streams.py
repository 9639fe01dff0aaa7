"""Answers made of stored values: few at a time, and with reserved memory."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from itertools import chain

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.types import Receive, Scope, Send

from cairn.service.http.limiters import ANSWER_SECONDS, StoreLimiter
from cairn.storage.store.deadlines import deadline_after


class ValueStream(StreamingResponse):
    """Answer that is read from the store while it is sent.

    It reads its first values before it sends a status, so an error there still gets its own status.
    In memory it has the blocks that were read ahead, however slowly its client reads.
    """

    def __init__(
        self,
        blocks: Callable[[], Iterator[bytes]],
        request: Request,
        root: str,
        held_bytes: int,
        headers: Mapping[str, str],
    ) -> None:
        """Prepare the answer; nothing is read yet.

        Args:
            blocks: Function that yields the content from its start: a head, then the values.
            request: Request that is answered.
            root: Name of the root that is read.
            held_bytes: Memory that the answer needs, in bytes.
            headers: Headers of the answer, its length included.
        """
        super().__init__(iter(()), headers=headers, media_type="application/octet-stream")
        self._blocks = blocks
        self._slot = partial(_slot, request.app.state.stream_limiter, request, root, held_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the values, and send them."""
        async with self._slot():
            content = await run_in_threadpool(_with_first_blocks, self._blocks())
            self.body_iterator = iterate_in_threadpool(content)
            await super().__call__(scope, receive, send)


class ValueRead(Response):
    """Short answer that is computed from stored values.

    An answer that reads much waits for a slot of the long answers. Another one has an ordinary slot
    of the root, and the ordinary time limit.
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
        """Prepare the answer; nothing is read yet.

        Args:
            make: Function that reads the values and returns the answer. If it raises an error, the
                answer is that error's problem.
            request: Request that is answered.
            root: Name of the root that is read.
            held_bytes: Memory that the answer needs, in bytes.
            is_long: The answer reads much.
        """
        super().__init__()
        state = request.app.state
        limiter = state.stream_limiter if is_long else state.store_limiter
        self._make, self._slot = make, partial(_slot, limiter, request, root, held_bytes)
        self._is_long = is_long

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the values, then make and send the answer."""
        with nullcontext() if self._is_long else deadline_after(ANSWER_SECONDS):
            async with self._slot():
                response = await run_in_threadpool(self._make)
        await response(scope, receive, send)


@asynccontextmanager
async def _slot(
    limiter: StoreLimiter, request: Request, root: str, held_bytes: int
) -> AsyncIterator[None]:
    """Hold a slot of a root, and reserved memory, during the block.

    Raises:
        NotReadyError: The slot or the memory did not become free in time.
    """
    caller, memory = request.state.caller.name, request.app.state.memory_limiter
    async with (
        limiter.slot(root, caller),
        memory.reserve((f"root {root}", f"caller {caller}"), held_bytes),
    ):
        yield


def _with_first_blocks(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Read the first two blocks now, the head and the first values; return an iterator of all."""
    first = [next(blocks, b""), next(blocks, b"")]
    return chain(first, blocks)
