"""Config of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LatentAttentionConfig"]


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention: keys and values are projections of a short vector per token.

    A head's query and key have `content_dim` dimensions without positions, then `rotary_dim`
    rotated ones. All heads share the rotated part of the key.

    Attributes:
        query_rank: length of the vector from which queries are projected; None: they are projected
            from the token's hidden state.
        key_value_rank: length of the vector from which keys and values are projected.
        content_dim: dimensions without positions of each head's query and key.
        rotary_dim: rotated dimensions of each head's query, and of the shared key.
        value_dim: dimensions of each head's value.

    Source: arXiv 2405.04434 (DeepSeek-V2).
    """

    query_rank: int | None
    key_value_rank: int
    content_dim: int
    rotary_dim: int
    value_dim: int

    @property
    def key_dim(self) -> int:
        """Size of one head's query and key."""
        return self.content_dim + self.rotary_dim

    def problems(self) -> list[str]:
        """Return everything wrong with the values."""
        sizes = ("key_value_rank", "content_dim", "rotary_dim", "value_dim")
        problems = [
            f"latent.{name} {getattr(self, name)!r} must be a positive integer"
            for name in sizes
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1
        ]
        if self.query_rank is not None and self.query_rank < 1:
            problems.append(f"latent.query_rank {self.query_rank!r} must be positive, or None")
        return problems
