"""Sizes as people read them."""


def size_text(size: int) -> str:
    """Bytes in the largest decimal unit that leaves a number of at least one."""
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 1000:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"
