"""The key-value store of a job's processes: JAX's coordination service.

Neither JAX nor Orbax has a public API for it; only this file uses the private one (ADR 16). The
store needs no device, so it works in background threads and while other processes may have failed.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from orbax.checkpoint._src.futures import signaling_client

__all__ = ["Coordination", "coordination"]


class Coordination(Protocol):
    """Key-value store that a job's processes share; local in a job of one process."""

    def key_value_set(self, key: str, value: str) -> None:
        """Set the value of a key; raise `jax.errors.JaxRuntimeError` if the key has one already."""

    def key_value_try_get(self, key: str) -> str | None:
        """Return the value of a key; None if it has none."""

    def blocking_key_value_get(self, key: str, timeout_secs: int) -> str:
        """Wait for a key's value and return it; raise `jax.errors.JaxRuntimeError` if too late."""

    def key_value_dir_get(self, key: str) -> Sequence[tuple[str, str]]:
        """Return (key, value) of all keys below `key`, which ends in "/"."""

    def key_value_delete(self, key: str) -> None:
        """Delete a key; if it ends in "/", all keys below it."""


def coordination() -> Coordination:
    """Return this job's key-value store."""
    return cast("Coordination", signaling_client.get_signaling_client())
