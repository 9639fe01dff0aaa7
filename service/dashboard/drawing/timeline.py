"""The steps of a run on a line, by their numbers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

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
    """A step on the line.

    Attributes:
        checkpoint: The step.
        x: Where.
        kind: How it looks: its state, or that nobody has verified it.
        title: What is said of it.
    """

    checkpoint: Checkpoint
    x: float
    kind: str
    title: str


@dataclass(frozen=True)
class Name:
    """Aliases above the line.

    Attributes:
        text: Their names.
        x, y: Where their text begins.
        at: Where their step is.
    """

    text: str
    x: float
    y: float
    at: float


@dataclass(frozen=True)
class Timeline:
    """What is drawn: marks, names above them, and the ends of the line.

    Attributes:
        radius: Of a mark: small where there are many.
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
        """How many marks there are of each kind, in the order of the line."""
        return dict(Counter(mark.kind for mark in self.marks))

    @property
    def top(self) -> int:
        """Where the drawing begins: without names there is no room for them."""
        return 0 if self.names else _LINE - 12


def timeline(checkpoints: Sequence[Checkpoint]) -> Timeline | None:
    """Steps on a line; None if there are none."""
    if not checkpoints:
        return None
    steps = sorted(checkpoints, key=lambda one: (one.step, one.attempt))
    first, last = steps[0].step, steps[-1].step
    room = WIDTH - 2 * _MARGIN
    marks = []
    for one in steps:
        x = _MARGIN + room * ((one.step - first) / (last - first) if last > first else 0.5)
        kind = kind_of(one)
        marks.append(Mark(one, round(x, 1), kind, f"Step {one.step}: {kind.replace('_', ' ')}"))
    radius = max(_SMALLEST, min(_RADIUS, 0.4 * room / len(marks)))
    return Timeline(tuple(marks), tuple(_names(marks)), first, last, round(radius, 1))


def kind_of(checkpoint: Checkpoint) -> str:
    """A step's state in a word, `verified` where every byte of it was found to be right."""
    if checkpoint.state is CheckpointState.LISTED and checkpoint.verified is not None:
        return "verified"
    return checkpoint.state.value


def _names(marks: Sequence[Mark]) -> list[Name]:
    """Names in two rows, so that those of neighbours stand side by side; what has no room goes."""
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
