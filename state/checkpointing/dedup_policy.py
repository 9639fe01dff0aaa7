"""Policy for sharing files of unchanged values between steps (dedup). A pure decision."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from cairn.storage.errors import PolicyError
from cairn.storage.store.clock import is_above_zero

__all__ = ["DedupPolicy"]


@dataclass(frozen=True, kw_only=True)
class DedupPolicy:
    """Limits on how long steps share the files of unchanged values.

    On a disk, steps share a single copy of a file, so damage to it affects all of them. That is why
    shared files are verified and, after some steps or hours, written again.

    Attributes:
        max_steps: maximum number of steps that share a file, including the one that wrote it; the
            next step writes the values again. 1 shares nothing; None sets no limit.
        max_hours: maximum age of a shared file, in hours; after that the next save writes the
            values again. None sets no limit.
        verify_hours: hours after which a file, if not written or read since, is read and verified
            before another step shares it. Google Cloud Storage, which lists the checksum of a copy,
            needs no read: each save compares the checksum.

    Raises:
        PolicyError: a limit is no number, or not above 0; all such limits are listed.
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
        """Return True if one more step may share a file.

        Args:
            steps: number of steps that have the file.
            written: time when it was written.
            now: the current time.
        """
        if self.max_steps is not None and steps >= self.max_steps:
            return False
        return self.max_hours is None or now - written < timedelta(hours=self.max_hours)

    def must_verify(self, *, seen: datetime, now: datetime) -> bool:
        """Return True if a file on a disk must be read and verified before another step shares it.

        Args:
            seen: time when its bytes were last written or read.
            now: the current time.
        """
        return now - seen >= timedelta(hours=self.verify_hours)
