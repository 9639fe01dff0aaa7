"""Multi-head latent attention: what a config says of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LatentAttentionConfig"]


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Attention whose keys and values are made of a short vector per token.

    A head's query and key have `content_dim` dimensions without positions, and then `rotary_dim`
    that turn; the turning part of the key is one for all heads.

    Attributes:
        query_rank: length of the vector that queries are made of; None: of the token itself.
        key_value_rank: length of the vector that keys and values are made of.
        content_dim: of each head's query and key.
        rotary_dim: of each head's query, and of the one key.
        value_dim: of each head's value.

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
