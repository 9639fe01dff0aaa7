"""Clients that ask a bucket again as often as ever, with hardly a pause between."""

import asyncio
import gc
import types
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import gcsfs.retry

from tests.storage.seams import objects, s3

GCSFS_HASTE = 0.001
BOTOCORE_TRIES = 4
"""Its pauses double: four take at most some seconds."""


@contextmanager
def impatient(**tries: object) -> Iterator[None]:
    """Contexts that TensorStore's clients open meanwhile, gcsfs and botocore wait next to nothing.

    Args:
        tries: settings of TensorStore's retries beside their delays; default: as they are.
    """

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds * GCSFS_HASTE)

    quick = {"initial_delay": "1ms", "max_delay": "5ms", **tries}
    with (
        patch.object(objects, "_RETRIES", {**objects._RETRIES, **quick}),
        patch.object(objects, "_LONG_RETRIES", {**objects._LONG_RETRIES, **quick}),
        patch.object(gcsfs.retry, "asyncio", types.SimpleNamespace(sleep=sleep)),
        patch.object(s3, "_ATTEMPTS", BOTOCORE_TRIES),
        patch.object(s3, "_RETRY_MODE", "standard"),  # the other waits longer for each refusal
    ):
        _forget_contexts()
        yield
    _forget_contexts()
    gc.collect()  # tasks that failed log themselves here, not inside whatever comes next


def _forget_contexts() -> None:
    objects.store_context.cache_clear()
    objects.long_retry_context.cache_clear()
    s3._connected.cache_clear()  # after a refusal it asks less often, too
