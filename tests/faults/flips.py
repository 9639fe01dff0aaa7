"""A run to damage, ways to damage one file of it at a time, and those who must notice.

Step 8 is the one that is damaged. Step 7 has the same leaves with other values, so that its files
are as large and pass their own checks: the best forgeries there are.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from cairn import (
    Checkpointer,
    CheckpointReader,
    ModelInfo,
    Run,
    StorageError,
    StoreURI,
    VerifyReport,
    verify_step,
)
from cairn.state.checkpointing import trees
from cairn.state.states.checkpoint import META_FORMAT, META_VERSION, StoredCheckpoint
from cairn.storage.arrays.orbax_tree import nest
from cairn.storage.runs.records.layout import manifest_file, step_dir
from tests.storage.seams import chunks as chunk_shape
from tests.storage.seams import data_file_writers
from tests.storage.states import abstract, assert_same, floats, mesh, put, raw

STEP, OTHER_STEP = 8, 7
PARTIAL = ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))
CHUNK_BYTES = 16 << 10
DATA_FILE_BYTES = 64 << 10

_MTIME_NS = itertools.count(1_800_000_000_000_000_000, 1_000_000_000)


def make_items(seed: int) -> dict[str, Any]:
    """Three items over four devices: several chunks in a shard, every form a leaf is stored in."""
    four = mesh(4, dp=1)
    numbers = np.random.default_rng(seed)
    params = {
        "layers": {
            "0": {"kernel": put(floats(256, 128, seed=seed), "fsdp", None, on=four)},
            "1": {
                "kernel": put(
                    floats(128, 256, seed=seed + 1).astype(jnp.bfloat16), None, "fsdp", on=four
                )
            },
        },
        "norm": {"scale": put(floats(128, seed=seed + 2), on=four)},
    }
    other = {
        "int4": put(numbers.integers(-8, 8, (64, 128)).astype(jnp.int4), "fsdp", on=four),
        "uint4": put(numbers.integers(0, 16, (3, 5)).astype(jnp.uint4), on=four),
        "float8": put(floats(32, 64, seed=seed + 3).astype(jnp.float8_e4m3fn), "fsdp", on=four),
        "mask": put(numbers.integers(0, 2, (64, 16)).astype(bool), "fsdp", on=four),
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed + 1), 4),
        "empty": np.zeros((0, 3), np.float32),
    }
    moments = jax.tree.map(lambda leaf: leaf * 2, params)
    average = jax.tree.map(lambda leaf: leaf * 3, params)
    optimizer = (moments, {"count": put(np.int32(seed + 1), on=four)}, None)
    return {"model": {**params, "other": other}, "optimizer": optimizer, "average": average}


class StepFiles:
    """The files of one step of a run that has had one attempt.

    Attributes:
        run: the run's folder.
        folder: the step's.
        files: every file of the step, and its manifest.
    """

    def __init__(self, run: Path, step: int) -> None:
        self.run = run
        self.folder = run / step_dir(1, step)
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        self.files = [*files, run / manifest_file(step, 1)]

    def name(self, path: Path) -> str:
        """A file's name in the step's folder, or in the run for all others."""
        base = self.folder if path.is_relative_to(self.folder) else self.run
        return path.relative_to(base).as_posix()

    def kind(self, path: Path) -> str:
        """What kind of file it is: its name without numbers and hashes."""
        return re.sub(r"\d+", "N", re.sub(r"[0-9a-f]{32}", "<hash>", self.name(path)))


def save_steps(run: Path | StoreURI) -> dict[str, Any]:
    """Save steps 7 and 8, in small chunks and small files; what step 8 holds."""
    with pytest.MonkeyPatch.context() as patch, Checkpointer(run, writer_id="job") as checkpointer:
        patch.setattr(chunk_shape, "CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr(data_file_writers, "FILE_BYTES", DATA_FILE_BYTES)
        for step in (OTHER_STEP, STEP):
            items = make_items(step)
            meta = {"format": META_FORMAT, "version": META_VERSION, "position": step}
            model = ModelInfo(model_type="llama", model_class="Tiny", config={"layers": 2})
            saved = {"tokenizer.json": b"{}"}
            checkpointer.save(step, items, meta=meta, model=model, assets=saved).wait()
    return items


class Stored(StepFiles):
    """A run with steps 7 and 8, and the files of step 8.

    Attributes:
        items: what step 8 holds.
        pairs: files of equal size and other bytes, the second also of step 7.
    """

    def __init__(self, run: Path) -> None:
        self.items = save_steps(run)
        super().__init__(run, STEP)
        both = self.files + StepFiles(run, OTHER_STEP).files
        self.pairs = [
            (one, other)
            for index, one in enumerate(self.files)
            for other in both[index + 1 :]
            if one.stat().st_size == other.stat().st_size and one.read_bytes() != other.read_bytes()
        ]

    def leaf_paths(self) -> dict[str, list[str]]:
        return {item: trees.paths(tree) for item, tree in self.items.items()}


@dataclass(frozen=True)
class Damage:
    """One thing done to a file of the step.

    Attributes:
        how: "one flipped bit", "a truncated file", ….
        path: the file.
        detail: where in it, for people.
        inflict: a context manager in which the damage is done.
    """

    how: str
    path: Path
    detail: str
    inflict: Callable[[], contextlib.AbstractContextManager[None]]


def _put_bytes(path: Path, content: bytes) -> None:
    """As a new version of the file: nothing that goes by its time takes it for the old one."""
    path.write_bytes(content)
    moment = next(_MTIME_NS)
    os.utime(path, ns=(moment, moment))


@contextlib.contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    """The file holds other bytes meanwhile."""
    before = path.read_bytes()
    _put_bytes(path, content)
    try:
        yield
    finally:
        _put_bytes(path, before)


@contextlib.contextmanager
def removed(path: Path) -> Iterator[None]:
    """The file is gone meanwhile."""
    before = path.read_bytes()
    path.unlink()
    try:
        yield
    finally:
        _put_bytes(path, before)


def flip(path: Path, offset: int, bit: int) -> Damage:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    detail = f"bit {bit} of byte {offset} of {len(content)}"
    return Damage("one flipped bit", path, detail, lambda: replaced(path, bytes(content)))


def flip_together(path: Path, words: tuple[int, int]) -> Damage:
    """The top bits of two words of 64 bits: a sum modulo 2**64 of whole words may not see it."""
    content = bytearray(path.read_bytes())
    for word in words:
        content[8 * word + 7] ^= 0x80
    detail = f"the top bits of words {words}"
    return Damage("two top bits flipped", path, detail, lambda: replaced(path, bytes(content)))


def overwrite(path: Path, offset: int, data: bytes) -> Damage:
    content = path.read_bytes()
    changed = content[:offset] + data + content[offset + len(data) :]
    how = "a grown file" if len(changed) > len(content) else "bytes overwritten"
    detail = f"{len(data)} bytes at {offset} of {len(content)}"
    return Damage(how, path, detail, lambda: replaced(path, changed))


def truncate(path: Path, size: int) -> Damage:
    content = path.read_bytes()
    detail = f"{size} of {len(content)} bytes"
    return Damage("a truncated file", path, detail, lambda: replaced(path, content[:size]))


def remove(path: Path) -> Damage:
    return Damage("a missing file", path, "", lambda: removed(path))


def swap(one: Path, other: Path) -> Damage:
    @contextlib.contextmanager
    def swapped() -> Iterator[None]:
        first, second = one.read_bytes(), other.read_bytes()
        with replaced(one, second), replaced(other, first):
            yield

    return Damage("two files of equal size swapped", one, f"with {other}", swapped)


def flips(stored: StepFiles, count: int, rng: Random) -> list[Damage]:
    """`count` flips: in every file its first and its last byte, then anywhere, large files more."""
    files = [path for path in stored.files if path.stat().st_size]
    sizes = {path: path.stat().st_size for path in files}
    places = [(path, 0) for path in files] + [(path, sizes[path] - 1) for path in files]
    rng.shuffle(places)
    inside = [(path, rng.randrange(sizes[path])) for path in files]
    weights = [sizes[path] ** 0.5 for path in files]
    more = rng.choices(files, weights, k=max(0, count - len(inside) - len(places)))
    places = inside + places + [(path, rng.randrange(sizes[path])) for path in more]
    return [flip(path, offset, rng.randrange(8)) for path, offset in places[:count]]


def pairs_of_flips(stored: StepFiles, count: int, rng: Random) -> list[Damage]:
    """`count` pairs of top bits, in files that have two words."""
    files = [path for path in stored.files if path.stat().st_size >= 16]
    return [
        flip_together(path, tuple(rng.sample(range(path.stat().st_size // 8), 2)))
        for path in _cycled(files, count, rng)
    ]


def overwrites(stored: StepFiles, count: int, rng: Random) -> list[Damage]:
    """`count` stretches of other bytes, within the file."""
    made = []
    for path in _cycled([path for path in stored.files if path.stat().st_size], count, rng):
        content = path.read_bytes()
        offset = rng.randrange(len(content))
        length = min(rng.randint(1, 64), len(content) - offset)
        data = rng.randbytes(length)
        if data == content[offset : offset + length]:
            data = bytes([data[0] ^ 1]) + data[1:]
        made.append(overwrite(path, offset, data))
    return made


def growths(stored: StepFiles, count: int, rng: Random) -> list[Damage]:
    """`count` files with bytes behind their end."""
    return [
        overwrite(path, path.stat().st_size, rng.randbytes(rng.randint(1, 64)))
        for path in _cycled(stored.files, count, rng)
    ]


def truncations(stored: StepFiles, count: int, rng: Random) -> list[Damage]:
    """`count` truncations, by one byte, to nothing, or anywhere."""
    files = [path for path in stored.files if path.stat().st_size]
    made = []
    for path in _cycled(files, count, rng):
        size = path.stat().st_size
        made.append(truncate(path, rng.choice([0, size - 1, rng.randrange(size)])))
    return made


def removals(stored: StepFiles, count: int, rng: Random) -> list[Damage]:
    return [remove(path) for path in _cycled(stored.files, count, rng)]


def swaps(stored: Stored, count: int, rng: Random) -> list[Damage]:
    return [swap(*pair) for pair in _cycled(stored.pairs, count, rng)]


def _cycled(choices: list[Any], count: int, rng: Random) -> list[Any]:
    """`count` of the choices, each before any comes again."""
    shuffled = rng.sample(choices, len(choices))
    return list(itertools.islice(itertools.cycle(shuffled), count))


def load(stored: Stored, rng: Random) -> None:
    """All of the step as `load_state` takes it, onto the four devices or onto two of them.

    Raises:
        StorageError: the damage was noticed.
        AssertionError: it was not, and a value is wrong.
    """
    on = None if rng.random() < 0.5 else mesh(2, dp=1)
    checkpoint = StoredCheckpoint.open(f"{stored.run}/steps/{STEP}")
    for item, tree in stored.items.items():
        found = checkpoint.restore(item, abstract(tree, on))
        assert_same(found, tree)
    checkpoint.assets()


def _reader(stored: Stored) -> CheckpointReader:
    run = Run.open(stored.run)
    info = run.step(STEP)
    return CheckpointReader.open(run.step_uri(info), run.manifest(info))


def read(stored: Stored, _rng: Random) -> None:
    """Every leaf, whole, without JAX.

    Raises:
        StorageError: the damage was noticed.
        AssertionError: it was not, and a value is wrong.
    """
    reader = _reader(stored)
    for item, tree in stored.items.items():
        for path, leaf in trees.flatten(tree).items():
            if leaf is not None:
                assert raw(reader.read(item, path)) == raw(leaf), f"{item}/{path}"
        reader.leaves(item)
    reader.meta()


def read_parts(stored: Stored, rng: Random) -> None:
    """Every leaf in two parts, cut at a random row or column.

    Raises:
        StorageError: the damage was noticed.
        AssertionError: it was not, and a value is wrong.
    """
    reader = _reader(stored)
    for item, tree in stored.items.items():
        for path, leaf in trees.flatten(tree).items():
            if leaf is None:
                continue
            whole = np.asarray(_words(leaf))
            axis = rng.randrange(whole.ndim) if whole.ndim else 0
            cut = rng.randrange(whole.shape[axis]) if whole.size and whole.ndim else None
            for part in (slice(None, cut), slice(cut, None)) if cut is not None else (...,):
                index = (slice(None),) * axis + (part,)
                found = reader.read(item, path, index)
                assert raw(found) == raw(whole[index]), f"{item}/{path}"


def _words(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def verify(stored: Stored) -> VerifyReport:
    """What `cairn verify` finds."""
    return verify_step(Run.open(stored.run), STEP)


def load_with_orbax(stored: Stored, _rng: Random) -> None:
    """The leaves that are stored as they are, through plain Orbax.

    Raises:
        Exception: Orbax can't load them.
        AssertionError: a value is wrong.
    """
    for item, tree in stored.items.items():
        leaves = {
            path: leaf
            for path, leaf in trees.flatten(tree).items()
            if not path.startswith("other/") and leaf is not None
        }
        target = nest({path: abstract(leaf) for path, leaf in leaves.items()}, frozenset())
        with ocp.Context(pytree_options=PARTIAL):
            found = trees.flatten(ocp.load(stored.folder, target, checkpointable_name=item))
        for path, leaf in leaves.items():
            assert raw(found[path]) == raw(leaf), f"{item}/{path}"


LOADS: dict[str, Callable[[Stored, Random], None]] = {
    "load_state": load,
    "CheckpointReader": read,
    "CheckpointReader, in parts": read_parts,
}


def missed(stored: Stored, damage: Damage, rng: Random) -> dict[str, str]:
    """Who did not notice the damage, or noticed without saying where: what they did instead.

    A verification must name it, and tell whether loads are affected. If it says that they are not,
    every load gives what was saved; else each gives that or says where it failed, and one fails.
    """
    names = {stored.name(path) for path in stored.files}
    found: dict[str, str] = {}
    failed = 0
    with damage.inflict():
        report = verify(stored)
        if report.ok:
            found["cairn verify"] = "nothing"
        elif not _names(stored, "; ".join(report.problems), names):
            found["cairn verify"] = f"names no leaf and no file: {report.problems}"
        for who, detector in LOADS.items():
            try:
                detector(stored, rng)
            except StorageError as error:
                failed += 1
                if report.loads:
                    found[who] = f"an error, though loads are said to be sound: {error}"
                elif not _names(stored, str(error), names):
                    found[who] = f"names no leaf and no file: {type(error).__name__}: {error}"
            except AssertionError as error:
                found[who] = f"a wrong value: {error}"
            except Exception as error:
                found[who] = f"a foreign error: {type(error).__name__}: {error}"
        if not report.loads and not failed:
            found["cairn verify"] = f"says that loads fail, and none does: {report.problems}"
    return found


def _names(stored: Stored, text: str, files: set[str]) -> bool:
    """Whether an error names a file of the step, a leaf of it, or (without a manifest) the step."""
    if any(name in text for name in files) or f"step {STEP}" in text:
        return True
    return any(
        re.search(rf"\b{item}\b.*{re.escape(path)}", text)
        for item, paths in stored.leaf_paths().items()
        for path in paths
    )
