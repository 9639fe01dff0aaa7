"""Config of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GROUP_SCORES", "ROUTER_SCORES", "ExpertsConfig"]

ROUTER_SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts: a router chooses a few feed-forward layers (experts) for each token.

    Attributes:
        count: number of experts of a layer.
        per_token: number of experts that each token uses.
        intermediate_size: inner width of one expert.
        dense_layers: numbers of the layers with one MLP instead of experts.
        score: the function from the router's logits to scores, one of `ROUTER_SCORES`.
        normalize: whether the scores of a token's chosen experts are divided by their sum.
        scale: factor on the scores of the chosen experts.
        groups: number of groups of consecutive experts.
        groups_per_token: number of groups from which each token's experts are chosen.
        group_score: a group's score, one of `GROUP_SCORES`: the best score in it, or the sum of the
            best two.
        correction: whether each expert has a number that is added to its score when experts are
            chosen, but not when their outputs are weighted; it is not trained.
        router_bias: whether the router has a bias.
        bias: whether the experts' projections have biases.
        shared_size: inner width of the shared expert, which every token uses besides; None: no
            shared expert.
        shared_gate: whether the shared expert's output is multiplied by the sigmoid of a learned
            projection.

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
