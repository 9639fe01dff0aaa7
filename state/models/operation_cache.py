"""OperationCacheMixin: caches for the keys and values of generated tokens."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from cairn.interop.config.base import EDPretrainedConfig
from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.errors import ArgumentError
from cairn.state.models.kv_cache import KVCache


class OperationCacheMixin:
    """Creation of the caches that a model's forward pass takes as `cache=`."""

    if TYPE_CHECKING:
        config: EDPretrainedConfig
        dtype: np.dtype[Any]

    @property
    def takes_cache(self) -> bool:
        """True if the forward pass takes `cache=`; otherwise generation recomputes everything."""
        return "cache" in inspect.signature(type(self).__call__).parameters

    def init_operations_cache(
        self,
        batch_size: int,
        max_length: int,
        starts: jax.Array | None = None,
        dtype: Any = None,
    ) -> KVCache:
        """Return an empty cache.

        Args:
            batch_size: number of rows.
            max_length: slots in each row, for prompt and new tokens together.
            starts: for each row, the first slot with a token; slots before it are left padding.
                None for 0.
            dtype: dtype of keys and values; None for the model's compute dtype.

        Raises:
            ArgumentError: a size is below 1, `starts` are no slots of the rows, or the model's
                config is no `DecoderConfig`.
        """
        if batch_size < 1 or max_length < 1:
            raise ArgumentError(
                path="init_operations_cache",
                expected="batch_size and max_length of 1 or more",
                found=f"{batch_size} and {max_length}",
            )
        _check_starts(starts, batch_size, max_length)
        config = self.config
        if not isinstance(config, DecoderConfig):
            raise ArgumentError(
                path=f"{type(self).__name__}.init_operations_cache",
                expected="a DecoderConfig, which gives the number of layers and heads",
                found=type(config).__name__,
                next_step="override init_operations_cache in this model class",
            )
        return KVCache.empty(
            layers=config.num_hidden_layers,
            batch_size=batch_size,
            max_length=max_length,
            kv_heads=config.kv_heads,
            head_dim=config.head_size,
            value_dim=config.value_size,
            dtype=self.dtype if dtype is None else dtype,
            starts=starts,
        )


def _check_starts(starts: Any, batch_size: int, max_length: int) -> None:
    if starts is None:
        return
    integers = jnp.issubdtype(jnp.result_type(starts), jnp.integer)
    is_concrete = not isinstance(starts, jax.core.Tracer)
    if (
        not integers
        or jnp.shape(starts) not in ((), (1,), (batch_size,))
        or (
            is_concrete
            and not ((np.asarray(starts) >= 0) & (np.asarray(starts) < max_length)).all()
        )
    ):
        raise ArgumentError(
            path="starts",
            expected=f"integers from 0 to {max_length - 1}, one for each of {batch_size} rows",
            found=starts if is_concrete else f"shape {jnp.shape(starts)}",
        )
