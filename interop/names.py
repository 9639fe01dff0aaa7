"""Enums of argument values: tasks, quantization methods, JAX backends and kernel platforms."""

from enum import StrEnum

from cairn.interop.errors import ArgumentError

__all__ = [
    "EasyDeLBackends",
    "EasyDeLPlatforms",
    "EasyDeLQuantizationMethods",
    "TaskType",
]


def _refuse(argument: str, names: type[StrEnum], value: object) -> ArgumentError:
    listed = ", ".join(repr(str(name)) for name in names)
    return ArgumentError(path=argument, expected=f"one of {listed}", found=repr(value))


class TaskType(StrEnum):
    """Task of a model. `AUTO_BIND` means the task of the model's class."""

    AUTO_BIND = "auto-bind"
    CAUSAL_LM = "causal-lm"
    BASE_MODULE = "base-module"

    @classmethod
    def _missing_(cls, value: object) -> "TaskType":
        raise _refuse("model_task", cls, value)


class EasyDeLQuantizationMethods(StrEnum):
    """Quantization method of a model's weights; those with an `a` also quantize activations."""

    NF4 = "nf4"
    INT8 = "8bit"
    A8BIT = "a8bit"
    A8Q = "a8q"
    A4Q = "a4q"
    AQT = "aqt"

    @classmethod
    def _missing_(cls, value: object) -> "EasyDeLQuantizationMethods":
        raise _refuse("quantization_method", cls, value)


class EasyDeLBackends(StrEnum):
    """JAX backend whose devices hold a model; `JAX` means JAX's default backend."""

    JAX = "jax"
    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"

    @classmethod
    def _missing_(cls, value: object) -> "EasyDeLBackends":
        raise _refuse("backend", cls, value)


class EasyDeLPlatforms(StrEnum):
    """Platform of a model's operations: JAX on any device, a device kind, or a kernel language.

    `JAX` means JAX's default devices; `CPU`, `GPU` and `TPU` mean devices of that kind. `TRITON`
    and `PALLAS` are kernel languages; a call that asks for one of them is refused, because the
    models here are plain JAX.
    """

    JAX = "jax"
    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"
    TRITON = "triton"
    PALLAS = "pallas"

    @classmethod
    def _missing_(cls, value: object) -> "EasyDeLPlatforms":
        raise _refuse("platform", cls, value)
