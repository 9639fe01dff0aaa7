"""Answer (202) to a request that started a job."""

from fastapi import Response

from cairn.service.schemas import Operation


def accepted(operation: Operation, response: Response) -> Operation:
    """Put the operation's address into `Location`, and return it as the body of the 202 answer."""
    response.headers["Location"] = f"/v1/operations/{operation.id}"
    return operation
