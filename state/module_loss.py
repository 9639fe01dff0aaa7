"""The loss of a module's call: `labels=` adds it to whatever the forward pass returns."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from cairn.state.loss import LossConfig
from cairn.state.outputs import CausalLMOutput

__all__ = ["with_loss"]


def with_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a forward pass that knows of no labels, so that it takes `labels` and `loss_config`.

    With labels, the outputs get `loss` and its parts, `metrics`; logits alone become a
    `CausalLMOutput`. Outputs with an `auxiliary_loss` give it to the module's `compute_loss`.
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
        found = _parts(outputs)
        given = {"config": loss_config, "auxiliary_loss": found.get("auxiliary_loss")}
        given = {name: value for name, value in given.items() if value is not None}
        loss, metrics = self.compute_loss(labels=labels, logits=found["logits"], **given)
        if isinstance(outputs, Mapping):
            return {**outputs, "loss": loss, "metrics": metrics}
        if dataclasses.is_dataclass(outputs) and hasattr(outputs, "loss"):
            more = {"metrics": metrics} if hasattr(outputs, "metrics") else {}
            replaced: Any = dataclasses.replace(outputs, loss=loss, **more)  # type: ignore[type-var]
            return replaced
        return CausalLMOutput(logits=found["logits"], loss=loss, metrics=metrics)

    # The signature tells what a call takes: generation and jit's static arguments look at it.
    call.__signature__ = _with_parameters(  # type: ignore[attr-defined]
        signature, {"labels": jax.Array | None, "loss_config": LossConfig | None}
    )
    return call


def _parts(outputs: Any) -> Mapping[str, Any]:
    """Logits, and the auxiliary loss if there is one, of whatever a forward pass returns."""
    if isinstance(outputs, Mapping):
        return outputs
    return {
        "logits": getattr(outputs, "logits", outputs),
        "auxiliary_loss": getattr(outputs, "auxiliary_loss", None),
    }


def _with_parameters(signature: inspect.Signature, added: Mapping[str, Any]) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    end = len(parameters) - any(p.kind is p.VAR_KEYWORD for p in parameters)
    parameters[end:end] = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in added.items()
        if name not in signature.parameters
    ]
    return signature.replace(parameters=parameters)
