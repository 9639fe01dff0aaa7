"""The ETag of an alias: its sequence number in quotes."""


def etag(sequence: int) -> str:
    """The ETag of an alias at a sequence number."""
    return f'"{sequence}"'
