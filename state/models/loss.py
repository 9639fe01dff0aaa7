"""Loss of causal language models: that of transformers, and optionally z-loss and a router's loss.

`with_loss` adds it to a forward pass that does not compute a loss.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from cairn.interop.errors import ArgumentError, require_known
from cairn.state.models.outputs import CausalLMOutput

__all__ = ["IGNORE_INDEX", "LossConfig", "causal_lm_loss", "with_loss"]

IGNORE_INDEX = -100
"""Labels with this value are ignored (PyTorch's convention)."""

LOSS_TYPES = ("cross_entropy",)


@dataclass(frozen=True)
class LossConfig:
    """Parts of a language model's loss.

    Attributes:
        loss_type: "cross_entropy".
        label_smoothing: share of the target spread evenly over the vocabulary, in [0, 1).
        z_loss_coefficient: weight of the squared log normaliser (PaLM, section 5, uses 1e-4).
        auxiliary_loss_coefficient: weight of a model's own auxiliary loss, such as a router's.
    """

    loss_type: str = "cross_entropy"
    label_smoothing: float = 0.0
    z_loss_coefficient: float = 0.0
    auxiliary_loss_coefficient: float = 0.0

    def __post_init__(self) -> None:
        require_known("loss_type", self.loss_type, LOSS_TYPES)
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ArgumentError(
                path="label_smoothing", expected="a number in [0, 1)", found=self.label_smoothing
            )
        for name in ("z_loss_coefficient", "auxiliary_loss_coefficient"):
            if not getattr(self, name) >= 0.0:
                raise ArgumentError(path=name, expected="a number >= 0", found=getattr(self, name))


def causal_lm_loss(
    logits: jax.Array,
    labels: jax.Array,
    config: LossConfig | None = None,
    *,
    auxiliary_loss: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the mean cross entropy of predicting each token from those before it, and its parts.

    Logits at position t are compared with the label at t + 1. Labels equal to `IGNORE_INDEX` do not
    count. Sums are computed in float32. If no token counts, loss and gradients are 0 (in PyTorch
    NaN). A label outside of the vocabulary makes the loss NaN, since compiled code can't raise
    errors (PyTorch raises IndexError).

    Args:
        logits: floating, (batch, tokens, vocabulary).
        labels: integers, (batch, tokens).
        config: parts of the loss; None for plain cross entropy.
        auxiliary_loss: scalar that is added with the weight `auxiliary_loss_coefficient`, such as
            `load_balancing_loss` of a router; None for none.

    Returns:
        The loss, a float32 scalar, and its parts: "cross_entropy", "z_loss" and "auxiliary_loss"
        (if they have a weight), "accuracy" and "tokens" (the number of tokens that count).

    Raises:
        ArgumentError: if shapes or dtypes of the arguments are wrong or do not fit together.

    Source: transformers `ForCausalLMLoss`, PyTorch `CrossEntropyLoss` (label smoothing),
        PaLM (arXiv 2204.02311, section 5: z-loss; its coefficient there is 1e-4).
    """
    config = LossConfig() if config is None else config
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ArgumentError(path="logits", expected="a floating dtype", found=logits.dtype)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ArgumentError(path="labels", expected="an integer dtype", found=labels.dtype)
    if auxiliary_loss is not None and jnp.shape(auxiliary_loss) != ():
        raise ArgumentError(
            path="auxiliary_loss", expected="a scalar", found=f"shape {jnp.shape(auxiliary_loss)}"
        )
    if logits.ndim != 3 or logits.shape[:-1] != labels.shape:
        raise ArgumentError(
            path="labels",
            expected=f"shape (batch, tokens) of logits {logits.shape}",
            found=f"shape {labels.shape}",
        )
    scores = logits[:, :-1].astype(jnp.float32)
    targets = labels[:, 1:]
    counts = targets != IGNORE_INDEX
    in_vocabulary = (targets >= 0) & (targets < logits.shape[-1])
    safe_targets = jnp.where(counts & in_vocabulary, targets, 0)
    tokens = counts.astype(jnp.float32).sum()

    def mean(values: jax.Array) -> jax.Array:
        return jnp.where(counts, values, 0.0).sum() / jnp.maximum(tokens, 1.0)

    normaliser = jax.nn.logsumexp(scores, axis=-1)
    chosen = jnp.take_along_axis(scores, safe_targets[..., None], axis=-1)[..., 0]
    losses = jnp.where(in_vocabulary, normaliser - chosen, jnp.nan)
    if config.label_smoothing:
        spread = normaliser - scores.mean(axis=-1)
        losses = (1.0 - config.label_smoothing) * losses + config.label_smoothing * spread
    metrics = {
        "cross_entropy": mean(losses),
        "accuracy": mean((scores.argmax(axis=-1) == safe_targets).astype(jnp.float32)),
        "tokens": tokens,
    }
    loss = metrics["cross_entropy"]
    if config.z_loss_coefficient:
        metrics["z_loss"] = config.z_loss_coefficient * mean(jnp.square(normaliser))
        loss = loss + metrics["z_loss"]
    if config.auxiliary_loss_coefficient and auxiliary_loss is not None:
        metrics["auxiliary_loss"] = config.auxiliary_loss_coefficient * jnp.asarray(
            auxiliary_loss, jnp.float32
        )
        loss = loss + metrics["auxiliary_loss"]
    return loss, metrics


def with_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass with the additional arguments `labels` and `loss_config`.

    If labels are given, the outputs have `loss` and `metrics`, its parts; plain logits become a
    `CausalLMOutput`. An `auxiliary_loss` in the outputs is passed to the module's `compute_loss`.
    """
    signature = inspect.signature(forward)
    names_config = "loss_config" in signature.parameters

    @functools.wraps(forward)
    def call(
        self: Any,
        *args: Any,
        labels: jax.Array | None = None,
        loss_config: LossConfig | None = None,
        **kw: Any,
    ) -> Any:
        if names_config:
            kw["loss_config"] = loss_config
        outputs = forward(self, *args, **kw)
        if labels is None:
            return outputs
        if isinstance(outputs, Mapping):
            parts: Mapping[str, Any] = outputs
        else:
            parts = {
                "logits": getattr(outputs, "logits", outputs),
                "auxiliary_loss": getattr(outputs, "auxiliary_loss", None),
            }
        options = {"config": loss_config, "auxiliary_loss": parts.get("auxiliary_loss")}
        options = {name: value for name, value in options.items() if value is not None}
        loss, metrics = self.compute_loss(labels=labels, logits=parts["logits"], **options)
        if isinstance(outputs, Mapping):
            return {**outputs, "loss": loss, "metrics": metrics}
        if dataclasses.is_dataclass(outputs) and hasattr(outputs, "loss"):
            more = {"metrics": metrics} if hasattr(outputs, "metrics") else {}
            replaced: Any = dataclasses.replace(outputs, loss=loss, **more)  # type: ignore[type-var]
            return replaced
        return CausalLMOutput(logits=parts["logits"], loss=loss, metrics=metrics)

    # Generation and `static_arguments` read the signature, so it must name the new arguments.
    call.__signature__ = _with_parameters(  # type: ignore[attr-defined]
        signature, {"labels": jax.Array | None, "loss_config": LossConfig | None}
    )
    return call


def _with_parameters(signature: inspect.Signature, added: Mapping[str, Any]) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    end = len(parameters) - any(p.kind is p.VAR_KEYWORD for p in parameters)
    parameters[end:end] = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in added.items()
        if name not in signature.parameters
    ]
    return signature.replace(parameters=parameters)
