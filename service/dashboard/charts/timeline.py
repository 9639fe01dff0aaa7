"""Timeline of a run's steps, by step number."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cairn.service.glossary import state_label
from cairn.service.schemas import Checkpoint, CheckpointState

WIDTH: Final = 1000
HEIGHT: Final = 84
_MARGIN: Final = 12
_LINE: Final = 56
_ROWS: Final = 2
_LETTER: Final = 7.2
_RADIUS: Final = 5.0
_SMALLEST: Final = 1.5


@dataclass(frozen=True)
class Mark:
    """Mark of a step on the line.

    Attributes:
        checkpoint: The step.
        x: Position on the line.
        kind: Result of `kind_of`, which decides how the mark is drawn.
        title: Tooltip.
    """

    checkpoint: Checkpoint
    x: float
    kind: str
    title: str


@dataclass(frozen=True)
class Name:
    """Aliases above the line.

    Attributes:
        text: Names of the aliases.
        x, y: Start of the text.
        at: Position of the step on the line.
    """

    text: str
    x: float
    y: float
    at: float


@dataclass(frozen=True)
class Timeline:
    """Drawing: marks, names above them, and the ends of the line.

    Attributes:
        radius: Radius of a mark, smaller if there are many.
    """

    marks: tuple[Mark, ...]
    names: tuple[Name, ...]
    first: int
    last: int
    radius: float = _RADIUS
    line: int = _LINE
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def kinds(self) -> dict[str, int]:
        """Number of marks per kind, in the order of the line."""
        return dict(Counter(mark.kind for mark in self.marks))

    @property
    def top(self) -> int:
        """Upper edge of the drawing; without names, the room for them is cut off."""
        return 0 if self.names else _LINE - 12


def timeline(checkpoints: Sequence[Checkpoint]) -> Timeline | None:
    """Draw steps on a line; return None if there are none."""
    if not checkpoints:
        return None
    steps = sorted(checkpoints, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt))
    first, last = steps[0].step, steps[-1].step
    room = WIDTH - 2 * _MARGIN
    marks = []
    for checkpoint in steps:
        x = _MARGIN + room * ((checkpoint.step - first) / (last - first) if last > first else 0.5)
        kind = kind_of(checkpoint)
        marks.append(
            Mark(checkpoint, round(x, 1), kind, f"Step {checkpoint.step}: {state_label(kind)}")
        )
    radius = max(_SMALLEST, min(_RADIUS, 0.4 * room / len(marks)))
    return Timeline(tuple(marks), tuple(_names(marks)), first, last, round(radius, 1))


def kind_of(checkpoint: Checkpoint) -> str:
    """Return a step's state, or `verified` for a listed step that passed a verification."""
    if checkpoint.state is CheckpointState.LISTED and checkpoint.verified is not None:
        return "verified"
    return checkpoint.state.value


def _names(marks: Sequence[Mark]) -> list[Name]:
    """Place the aliases of marks in two rows so that neighbours do not overlap.

    Aliases that find no room in either row are left out.
    """
    free = [0.0] * _ROWS
    names = []
    for mark in marks:
        if not mark.checkpoint.aliases:
            continue
        text = ", ".join(mark.checkpoint.aliases)
        wide = _LETTER * len(text)
        x = max(0.0, min(mark.x - wide / 2, WIDTH - wide))
        for row in range(_ROWS):
            if free[row] <= x:
                free[row] = x + wide + 2 * _LETTER
                names.append(Name(text, round(x, 1), _LINE - 18 - 17 * row, mark.x))
                break
    return names
