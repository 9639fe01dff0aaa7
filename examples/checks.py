"""What the examples print of their promises; the first one that does not hold ends the program."""

import time

_BEGAN = time.perf_counter()


def say(text: str) -> None:
    """Prints a line with the seconds since the start."""
    print(f"{time.perf_counter() - _BEGAN:6.1f} s  {text}", flush=True)


def check(what: str, holds: bool, found: object) -> None:
    """Prints whether something holds, and what was seen.

    Raises:
        SystemExit: It does not hold; the status is 1.
    """
    say(f"{'yes' if holds else 'NO '}  {what}: {found}")
    if not holds:
        raise SystemExit(1)
