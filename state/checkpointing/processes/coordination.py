"""The key-value store of a job's processes: JAX's coordination service.

Neither JAX nor Orbax has a public API for it: this is the one file that uses a private module for
that (ADR 16). It serves where no device may be used: in the background, and while other processes
may have failed.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from orbax.checkpoint._src.futures import signaling_client

__all__ = ["Coordination", "coordination"]


class Coordination(Protocol):
    """Key-value store that a job's processes share; local in a job of one process."""

    def key_value_set(self, key: str, value: str) -> None:
        """Set a value once; raises if the key has one."""

    def key_value_try_get(self, key: str) -> str | None:
        """Return the value, or None."""

    def blocking_key_value_get(self, key: str, timeout_secs: int) -> str:
        """Wait for a value; raises `jax.errors.JaxRuntimeError` at the timeout."""

    def key_value_dir_get(self, key: str) -> Sequence[tuple[str, str]]:
        """Return (key, value) of all below `key`, which ends in "/"."""

    def key_value_delete(self, key: str) -> None:
        """Delete the key, and all below it if it ends in "/"."""


def coordination() -> Coordination:
    """Return this job's key-value store."""
    return cast("Coordination", signaling_client.get_signaling_client())
