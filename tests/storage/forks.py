"""A run to fork from, in any store, and ways to damage it."""

from collections.abc import Iterator

import numpy as np

from cairn import Checkpointer, ModelInfo, ObjectStore, Run, StoreURI, open_files
from cairn.storage.runs.records.layout import INDEX_FILE

WRITER = "fork/test"
LEAF = np.arange(4096, dtype=np.float32).reshape(64, 64)


def save_parent(uri: StoreURI) -> Run:
    """A run with steps 3 and 6, of the same shapes and of other values."""
    with Checkpointer(uri) as checkpointer:
        for step in (3, 6):
            checkpointer.save(
                step,
                {"model": {"kernel": LEAF * step, "bias": LEAF[0] + step}},
                meta={"step": step},
                model=ModelInfo(model_type="llama"),
                assets={"tokenizer.json": b"{}"},
                metrics={"loss": 1 / step},
            ).wait()
    return Run.open(uri)


def contents(folder: StoreURI) -> dict[str, bytes]:
    """Every file below a folder but the index of a step, which is a copy's own."""
    files = open_files(folder)
    objects = ObjectStore.open(folder)
    names = (entry.name for entry in files.walk() if entry.name != INDEX_FILE)
    return {name: objects.read(name).value for name in names}


def put(folder: StoreURI, name: str, data: bytes) -> None:
    """Give a file other bytes, as a new one."""
    with open_files(folder).open_write(name) as sink:
        sink.write(data)


def flipped(data: bytes, offset: int | None = None) -> bytes:
    """With one bit the other way; with one byte if there is none."""
    changed = bytearray(data or b"?")
    changed[len(data) // 2 if offset is None else offset] ^= 16
    return bytes(changed)


def twins(run: Run, step: int, other: int) -> Iterator[tuple[str, bytes]]:
    """Files of a step, each with the bytes of one of the other's of the same size and crc32c."""
    ours, theirs = (
        {one.name: one for one in run.contents(run.step(number)).objects}
        for number in (step, other)
    )
    stored = contents(run.step_uri(run.step(other)))
    before = contents(run.step_uri(run.step(step)))
    for record in ours.values():
        for twin in theirs.values():
            same = (twin.size, twin.crc32c) == (record.size, record.crc32c)
            if same and stored[twin.name] != before[record.name]:
                yield record.name, stored[twin.name]
