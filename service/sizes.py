"""Human-readable sizes."""


class Size(int):
    """Number of bytes."""

    def __str__(self) -> str:
        """Format in the largest decimal unit that leaves a number of at least one: `1.5 GB`."""
        return size_text(int(self))


def size_text(size: int) -> str:
    """Format bytes in the largest decimal unit that leaves a number of at least one: `1.5 GB`."""
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95:  # a larger value would be rounded to 1000.0
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"
