# Made of asynchronous/streams.py by `python scripts/sync_client.py`: change that one.
"""Answers that are read as they come."""

import httpx

from cairn.service.client.protocol import raise_for_problem


def check(response: httpx.Response) -> None:
    """Nothing for a success, of which nothing is read.

    Raises:
        ProblemResponseError: The answer is another.
    """
    if not response.is_success:
        response.read()
        raise_for_problem(response)
