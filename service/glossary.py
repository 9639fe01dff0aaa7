"""Words of Cairn that a user may not know, for the page `/help` and the reference pages."""

from collections.abc import Mapping
from typing import Final

GLOSSARY: Final[Mapping[str, str]] = {
    "root": "A folder or a bucket path in which runs are stored. A server serves one or more "
    "roots, each with a name.",
    "run": "All checkpoints of one training, in one folder below a root.",
    "step": "One checkpoint of a run, named by the number of the training step. `available`: its "
    "save is complete (`listed` in the API). `verified`: its data was read back and its checksums "
    "match.",
    "item": "A part of a checkpoint that is saved and loaded by name, such as `model`, `state` or "
    "a data iterator.",
    "leaf": "One array of an item, with a path such as `model/layers/0/mlp/up_proj/kernel`. The "
    "dashboard calls it a tensor.",
    "record": "A small JSON file of a run that says which steps, aliases and labels it has: its "
    "metadata.",
    "manifest": "The record of a step: its items, files, checksums and the model config.",
    "alias": "A name such as `production` that points to a step, and can be moved to another one.",
    "promote": "To point an alias to a step.",
    "policy": "What a server does to runs by itself, or which promotions it refuses: a schedule, "
    "retention, an automation or a gate.",
    "gate": "A condition that a step must meet before an alias may point to it.",
    "sequence": "A number of an alias that grows with each move. A request with it is refused "
    "if the alias has moved since.",
    "writer": "The training job that may save to a run. There is one at a time.",
    "lease": "The right to write to a run, for a minute or so. The writer renews it while it runs; "
    "`LeaseHeldError` means that another job holds it.",
    "attempt": "The number of a start of the writer. Each restart takes the next one. It is the "
    "fencing token of saves.",
    "fenced": "A writer whose attempt has been replaced by a later one. It can no longer save, "
    "and gets a `FencedError`.",
    "take over": "To end the attempt of a run's writer, so that another job can write.",
    "roll back": "To continue a run from an earlier step. Later steps become superseded.",
    "superseded": "A step that a later attempt went back before. It is kept, but no longer part of "
    "the run's history.",
    "strand": "To leave an alias on a superseded step. A roll back asks before it does.",
    "fork": "A new run that starts from a step of another one, and shares its files.",
    "import": "To list existing Orbax checkpoints in place as a run (`cairn adopt`).",
    "trash": "Where deleted steps stay until their grace period ends. They can be restored.",
    "garbage": "Files that no step needs any more, such as those of a save that was interrupted.",
    "retention policy": "Rules of which steps to keep. All others are deleted.",
    "operation": "Long work on the server, such as an export. It survives restarts.",
    "worker": "The process that runs operations.",
    "export": "The files that a conversion of a step has written: Hugging Face files or GGUF. "
    "`artifact` in the API.",
}
"""Explanation of each term, in Markdown."""

_STATES: Final = {"in_flight": "saving", "listed": "available", "trashed": "in trash"}


_TRAINERS: Final = {"maxtext": "MaxText", "tunix": "Tunix"}


def trainer_label(trainer: str) -> str:
    """Return the name of a trainer as it writes it itself, such as "MaxText" for `maxtext`."""
    return _TRAINERS.get(trainer, trainer)


def state_label(state: str) -> str:
    """Return the label of a state for people, such as "saving" for `in_flight`."""
    return _STATES.get(state, state.replace("_", " "))
