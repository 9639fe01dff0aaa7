"""The answer to a request that started a job."""

from fastapi import Response

from cairn.service.schemas import Operation


def accepted(operation: Operation, response: Response) -> Operation:
    """The body of a 202 answer, with the operation's address in its `Location`."""
    response.headers["Location"] = f"/v1/operations/{operation.id}"
    return operation
