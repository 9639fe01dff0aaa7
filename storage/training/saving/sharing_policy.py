"""For how long steps share the files of values that do not change: a pure decision."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from cairn.storage.errors import PolicyError
from cairn.storage.store import is_above_zero

__all__ = ["SharingPolicy"]


@dataclass(frozen=True, kw_only=True)
class SharingPolicy:
    """For how long steps share the files of values that do not change.

    On a disk the steps that share a file have it only once: what damages it damages them all, until
    a save notices. So files are looked at again while they are shared, and written anew in time.

    Attributes:
        max_steps: steps that have one file at most, the one that wrote it among them; the next
            writes the values anew. 1 shares nothing; None has no limit.
        max_hours: the values are written anew by the first save this long after they were written;
            None: never for that reason.
        verify_hours: a file on a disk that was neither written nor read for so long is read, and
            compared with what was written, before another step shares it. Where an object store
            tells the checksum of a copy, that is compared each time, and nothing is read.

    Raises:
        PolicyError: a number that is not above 0, or none at all; all are listed.
    """

    max_steps: int | None = 100
    max_hours: float | None = 24.0
    verify_hours: float = 1.0

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}, expected a number above 0"
            for name, value in [
                ("max_hours", self.max_hours),
                ("verify_hours", self.verify_hours),
            ]
            if not is_above_zero(value) and (value is not None or name == "verify_hours")
        ]
        steps = self.max_steps
        if steps is not None and (type(steps) is not int or steps < 1):
            problems.append(f"max_steps is {steps!r}, expected an integer of 1 or more")
        if problems:
            raise PolicyError(
                "the sharing policy can't act",
                expected="limits that can be kept",
                found="; ".join(problems),
                next_step="Correct these, or leave them out.",
            )

    def may_share(self, *, steps: int, written: datetime, now: datetime) -> bool:
        """Whether one more step may have a file.

        Args:
            steps: that have it.
            written: when it was.
            now: the present moment.
        """
        if self.max_steps is not None and steps >= self.max_steps:
            return False
        return self.max_hours is None or now - written < timedelta(hours=self.max_hours)

    def must_verify(self, *, seen: datetime, now: datetime) -> bool:
        """Whether a file is to be read before one more step has it.

        Args:
            seen: when its bytes were last written or read.
            now: the present moment.
        """
        return now - seen >= timedelta(hours=self.verify_hours)
