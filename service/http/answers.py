"""Bodies of answers."""

from fastapi import Response
from pydantic import BaseModel


def json_answer(body: BaseModel) -> Response:
    """An answer with this body, made here: in the thread of its route, and checked once.

    The framework would check it anew in another thread, and write it while nothing else can be
    answered. Its route says `response_model`.
    """
    return Response(body.model_dump_json(), media_type="application/json")
