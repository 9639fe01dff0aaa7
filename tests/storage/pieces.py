"""Bytes as the sinks of data files take them."""


def pieces(parts):
    """Asks for memory for each part, and fills it."""
    for part in parts:
        memory = yield len(part)
        memory[:] = part
