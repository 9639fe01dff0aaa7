"""Limit on the size of request bodies."""

from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES: Final = 1 << 20


class BodyLimit:
    """ASGI middleware that answers 413 as soon as a body exceeds the limit.

    Starlette's own limit answers in plain text; this one raises a problem.
    """

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with a `receive` that counts bytes."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        too_large = declared.isdigit() and int(declared) > self.max_bytes
        seen = 0

        async def limited() -> Message:
            nonlocal seen, too_large
            if not too_large:
                message = await receive()
                seen += len(message.get("body", b""))
                too_large = seen > self.max_bytes
                if not too_large:
                    return message
            raise HTTPException(
                413, f"The body has more than {self.max_bytes} bytes. Nothing was done."
            )

        await self.app(scope, limited, send)
