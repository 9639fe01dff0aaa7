"""The key-value store that the processes of a job share: JAX's coordination service.

JAX has no public way to it, nor has Orbax: this is the one file that reaches into a private module
for it (ADR 16). Used where no device may be: in the background, and while others may have failed.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from orbax.checkpoint._src.futures import signaling_client

__all__ = ["Coordination", "coordination"]


class Coordination(Protocol):
    """What the processes tell each other. Within a job of one process all of it is local."""

    def key_value_set(self, key: str, value: str) -> None:
        """Say something once; raises if the key has a value."""

    def key_value_try_get(self, key: str) -> str | None:
        """What was said, or None."""

    def blocking_key_value_get(self, key: str, timeout_secs: int) -> str:
        """What is said within some seconds; raises `jax.errors.JaxRuntimeError` if nothing is."""

    def key_value_dir_get(self, key: str) -> Sequence[tuple[str, str]]:
        """(key, value) of all below `key`, which ends in "/"."""

    def key_value_delete(self, key: str) -> None:
        """Forget it, and all below it if it ends in "/"."""


def coordination() -> Coordination:
    """The one of this job."""
    return cast("Coordination", signaling_client.get_signaling_client())
