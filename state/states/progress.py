"""Progress lines on stderr."""

import sys

import jax

__all__ = ["print_progress", "size_text"]


def print_progress(verbose: bool, text: str) -> None:
    """Write a line to stderr, on the first process only."""
    if verbose and jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def size_text(nbytes: int) -> str:
    """Return a byte count as text, such as "1.5 GB"."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
