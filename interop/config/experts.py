"""Mixtures of experts: what a config says of them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GROUP_SCORES", "ROUTER_SCORES", "ExpertsConfig"]

ROUTER_SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Feed-forward layers of which each token uses a few, as its router chooses.

    Attributes:
        count: experts of a layer.
        per_token: experts that each token goes to.
        intermediate_size: inner width of one expert.
        dense_layers: numbers of the layers that have one feed-forward layer instead.
        score: what makes the router's logits its scores, one of `ROUTER_SCORES`.
        normalize: the scores of a token's experts are divided by their sum.
        scale: and multiplied by this.
        groups: experts are in so many groups of neighbours.
        groups_per_token: each token's experts are in so many groups.
        group_score: a group's score, one of `GROUP_SCORES`: its best expert's, or its best two's.
        correction: a number for each expert is added to the scores by which experts are chosen,
            and not to those they are weighed by; nothing trains it.
        router_bias: a bias on the router.
        bias: biases on the experts' projections.
        shared_size: inner width of a feed-forward layer that every token goes through as well;
            None: there is none.
        shared_gate: that layer's output is multiplied by a sigmoid of its own.

    Source: arXiv 2401.04088 (Mixtral), 2412.19437 (DeepSeek-V3).
    """

    count: int
    per_token: int
    intermediate_size: int
    dense_layers: tuple[int, ...] = ()
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score: str = "max"
    correction: bool = False
    router_bias: bool = False
    bias: bool = False
    shared_size: int | None = None
    shared_gate: bool = False

    def problems(self) -> list[str]:
        """Return everything wrong with the values."""
        sizes = ("count", "per_token", "intermediate_size", "groups", "groups_per_token")
        problems = [
            f"experts.{name} {getattr(self, name)!r} must be a positive integer"
            for name in sizes
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1
        ]
        if problems:
            return problems
        if self.per_token > self.count:
            problems.append(
                f"experts.per_token {self.per_token} is above experts.count {self.count}"
            )
        if self.score not in ROUTER_SCORES:
            problems.append(f"experts.score {self.score!r} is none of {', '.join(ROUTER_SCORES)}")
        if self.group_score not in GROUP_SCORES:
            names = ", ".join(GROUP_SCORES)
            problems.append(f"experts.group_score {self.group_score!r} is none of {names}")
        if self.count % self.groups:
            problems.append(f"experts.count {self.count} is not a multiple of groups {self.groups}")
        elif self.groups_per_token > self.groups:
            problems.append(f"experts.groups_per_token is above experts.groups {self.groups}")
        elif self.per_token > self.groups_per_token * (self.count // self.groups):
            problems.append("experts.per_token is above what groups_per_token groups have")
        return problems
