"""A file that appears once it is whole."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A file to write to, which is called `target` once the block has ended well."""
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("xb") as file:
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
