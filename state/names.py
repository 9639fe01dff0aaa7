"""The names that arguments take: tasks a model can be bound to."""

from enum import StrEnum

from state.errors import ArgumentError

__all__ = ["TaskType"]


class TaskType(StrEnum):
    """What a model is for. `AUTO_BIND` means: whatever the model class says."""

    AUTO_BIND = "auto-bind"
    CAUSAL_LM = "causal-lm"
    BASE_MODULE = "base-module"

    @classmethod
    def _missing_(cls, value: object) -> "TaskType":
        known = ", ".join(repr(str(task)) for task in cls)
        raise ArgumentError(path="model_task", expected=f"one of {known}", found=repr(value))
