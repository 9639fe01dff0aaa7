"""Policy for sharing files of unchanged values between steps (dedup). A pure decision."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from cairn.storage.errors import PolicyError
from cairn.storage.store.clock import is_above_zero

__all__ = ["DedupPolicy"]


@dataclass(frozen=True, kw_only=True)
class DedupPolicy:
    """Limits on how long steps share the files of unchanged values.

    On a disk the steps that share a file have it only once: damage to it affects them all, until a
    save notices. So shared files are verified again, and rewritten in time.

    Attributes:
        max_steps: maximum number of steps with the same file, including the one that wrote it; the
            next step writes the values anew. 1 shares nothing; None has no limit.
        max_hours: age of a file from which on the next save writes its values anew; None: no limit.
        verify_hours: a file on a disk that was neither written nor read for so long is read and
            verified before another step shares it. Where an object store returns the checksum of a
            copy, each save compares that, and nothing is read.

    Raises:
        PolicyError: a number that is not above 0, or no number; all are listed.
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
                "the dedup policy can't act",
                expected="limits that can be kept",
                found="; ".join(problems),
                next_step="Correct these, or leave them out.",
            )

    def may_link(self, *, steps: int, written: datetime, now: datetime) -> bool:
        """Return True if one more step may have a file.

        Args:
            steps: number of steps that have it.
            written: time of its write.
            now: current time.
        """
        if self.max_steps is not None and steps >= self.max_steps:
            return False
        return self.max_hours is None or now - written < timedelta(hours=self.max_hours)

    def must_verify(self, *, seen: datetime, now: datetime) -> bool:
        """Return True if a file must be read before one more step has it.

        Args:
            seen: time when its bytes were last written or read.
            now: current time.
        """
        return now - seen >= timedelta(hours=self.verify_hours)
