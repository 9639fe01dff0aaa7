"""Check of streamed answers."""

import httpx

from cairn.service.client.protocol.responses import raise_for_problem


async def check(response: httpx.Response) -> None:
    """Raise the problem of an unsuccessful answer; leave the body of a success unread.

    Raises:
        ProblemResponseError: The answer is not a success.
    """
    if not response.is_success:
        await response.aread()
        raise_for_problem(response)
