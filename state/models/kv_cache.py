"""Cache of the keys and values of the tokens so far."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from cairn.interop.errors import ArgumentError


class KVCache(struct.PyTreeNode):
    """Keys and values of the tokens so far, in `S` slots for each row.

    All layers share one array, so that a compiled update works in place.

    Attributes:
        keys: keys after rotation; free slots are zero.
        values: values; free slots are zero.
        valid: slots that may be attended to (False: padding).
        starts: for each row, the first slot with a token; positions count from it.
        length: number of slots written so far, the same for all rows.
    """

    keys: Float[Array, "L B S K H"]
    values: Float[Array, "L B S K V"]
    valid: Bool[Array, "B S"]
    starts: Int[Array, " B"]
    length: Int[Array, ""]

    @classmethod
    def empty(
        cls,
        *,
        layers: int,
        batch_size: int,
        max_length: int,
        kv_heads: int,
        head_dim: int,
        dtype: Any,
        starts: jax.Array | None = None,
        value_dim: int | None = None,
    ) -> KVCache:
        """Return a cache without tokens.

        Args:
            layers: number of layers.
            batch_size: number of rows.
            max_length: number of slots in each row.
            kv_heads: number of key/value heads.
            head_dim: size of a key.
            dtype: dtype of keys and values.
            starts: for each row, the first slot with a token; slots before it are left padding.
                None for 0.
            value_dim: size of a value; None for that of a key.
        """
        shape = (layers, batch_size, max_length, kv_heads)
        sizes = (head_dim, head_dim if value_dim is None else value_dim)
        if starts is None:
            starts = jnp.zeros((batch_size,), jnp.int32)
        starts = jnp.broadcast_to(jnp.asarray(starts, jnp.int32), (batch_size,))
        valid = jnp.arange(max_length)[None, :] >= starts[:, None]
        # Two buffers: a cache can't be donated if keys and values are the same buffer.
        keys, values = (jnp.zeros((*shape, size), dtype) for size in sizes)
        return cls(keys, values, valid, starts, jnp.zeros((), jnp.int32))

    @property
    def max_length(self) -> int:
        """Number of slots."""
        return int(self.valid.shape[1])

    def check_room(self, tokens: int) -> None:
        """Check that the cache has free slots for more tokens.

        The length of a traced cache is unknown; then only the total number of slots is checked.

        Raises:
            ArgumentError: the cache has too few slots.
        """
        traced = isinstance(self.length, jax.core.Tracer)
        written = 0 if traced else int(self.length)
        if written + tokens > self.max_length:
            raise ArgumentError(
                path="cache",
                expected=f"at most {self.max_length} tokens, its max_length",
                found=f"{tokens} more after {'some' if traced else written}",
                next_step="give init_operations_cache a larger max_length",
            )

    def positions(self, tokens: int) -> Int[Array, "B T"]:
        """Return the positions of the next `tokens` tokens of each row; padding has position 0."""
        slots = self.length + jnp.arange(tokens, dtype=jnp.int32)
        return jnp.maximum(slots[None, :] - self.starts[:, None], 0)

    def mask_tokens(self, attention_mask: Array) -> KVCache:
        """Return the cache with padding marked: those of the next tokens that the mask has as 0."""
        update = attention_mask.astype(jnp.bool_)
        old = jax.lax.dynamic_slice(self.valid, (jnp.int32(0), self.length), update.shape)
        new = jax.lax.dynamic_update_slice(self.valid, old & update, (jnp.int32(0), self.length))
        masked: KVCache = self.replace(valid=new)
        return masked

    def visible(self, tokens: int) -> Bool[Array, "B T S"]:
        """Return a mask of the slots that each of the next `tokens` tokens may attend to."""
        return causal_mask(tokens, None, self)[None, :, :] & self.valid[:, None, :]

    def write(
        self, layer: int | jax.Array, key: Float[Array, "B T K H"], value: Float[Array, "B T K V"]
    ) -> tuple[KVCache, Float[Array, "B S K H"], Float[Array, "B S K V"]]:
        """Write one layer's new keys and values into the next slots.

        Returns the new cache, and all keys and values of that layer. `length` stays the same until
        `advance`.
        """
        zero = jnp.int32(0)
        at = (jnp.asarray(layer, jnp.int32), zero, self.length, zero, zero)
        keys = jax.lax.dynamic_update_slice(self.keys, key.astype(self.keys.dtype)[None], at)
        values = jax.lax.dynamic_update_slice(
            self.values, value.astype(self.values.dtype)[None], at
        )
        whole = [jax.lax.dynamic_index_in_dim(x, at[0], keepdims=False) for x in (keys, values)]
        return self.replace(keys=keys, values=values), whole[0], whole[1]

    def advance(self, tokens: int) -> KVCache:
        """Return the cache with its length increased by tokens that all layers have written."""
        advanced: KVCache = self.replace(length=self.length + jnp.int32(tokens))
        return advanced


def causal_mask(
    tokens: int, window: int | None, cache: KVCache | None = None
) -> Bool[Array, "T S"]:
    """Return a mask of the slots that each of the next tokens may attend to, ignoring padding.

    A token attends to its own slot and earlier ones.

    Args:
        tokens: number of tokens.
        window: maximum number of slots that a token attends to, including its own; None for all.
        cache: the cache whose next slots the tokens get; None if the tokens are the only slots.
    """
    first = jnp.int32(0) if cache is None else cache.length
    own = (first + jnp.arange(tokens, dtype=jnp.int32))[:, None]
    slots = jnp.arange(tokens if cache is None else cache.max_length, dtype=jnp.int32)[None, :]
    return slots <= own if window is None else (slots <= own) & (slots > own - window)
