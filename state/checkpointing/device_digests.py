"""Digests of arrays, computed on their devices to detect unchanged leaves.

A training step returns new arrays also for weights that it does not change (a frozen base). A
digest, computed at the speed of device memory, shows that such an array equals the one of the last
save, without a transfer to the host. Digests never leave the process. Imports JAX. See ADR 52.
"""

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["DeviceDigests", "DeviceShard", "compile_digests", "has_digest", "start_digests"]

_log = logging.getLogger("cairn")

_LANES: Final = 4
_KEYS: Final = np.frombuffer(secrets.token_bytes(8 * _LANES), np.uint32).reshape(_LANES, 2)
"""Two random keys for each lane of a digest, new in each process."""

_MOST_TOGETHER: Final = 16
"""Maximum arrays per compiled program. Small, so that one more leaf recompiles little."""

_BLOCK: Final = 1 << 20
"""Elements of a shard that are digested at once."""

_MOST_MEMORY: Final = 256 << 20
"""Maximum temporary device memory of a program, in bytes; usually a block needs 16 MiB."""

_FACTORS: Final = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))
"""Factors of MurmurHash3's 32-bit finalizer, by Austin Appleby, which is in the public domain."""


class DeviceShard(NamedTuple):
    """Device, shape and dtype of a shard of a leaf.

    Attributes:
        device: the device that has it.
        shape: shape of the shard.
        dtype: name of its dtype.
    """

    device: jax.Device
    shape: tuple[int, ...]
    dtype: str


class _Kind(NamedTuple):
    """Key of a compiled program, which digests several shards of one device, shape and dtype.

    Attributes:
        place: device, shape and dtype of every shard.
        number: number of shards.
    """

    place: DeviceShard
    number: int


class DeviceDigests(NamedTuple):
    """Digests of leaves, which devices may still be computing.

    Attributes:
        paths: paths of the leaves whose digests are computed.
        rows: for each program that runs: (path, number of the shard) of its shards, and its
            result, an array with one digest per shard.
        earlier: digests of unchanged leaves from an earlier save, by path.
    """

    paths: frozenset[str] = frozenset()
    rows: Sequence[tuple[Sequence[tuple[str, int]], jax.Array]] = ()
    earlier: Mapping[str, bytes] = MappingProxyType({})

    def values(self) -> dict[str, bytes]:
        """Wait for the devices and return all digests, by path of the leaf.

        Raises:
            JaxRuntimeError: a device failed.
        """
        parts = {
            part: row.tobytes()
            for names, digests in self.rows
            for part, row in zip(names, np.asarray(digests), strict=True)
        }
        computed = dict.fromkeys(self.paths, b"")
        for path, number in sorted(parts):
            if path in computed:
                computed[path] += parts[path, number]
        return {**self.earlier, **computed}


class _Programs:
    """Cache of compiled programs, filled in the background."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: dict[_Kind, Any] = {}
        self._asked: set[_Kind] = set()

    def get(self, kinds: Collection[_Kind]) -> dict[_Kind, Any]:
        """Return those programs that are compiled; start to compile the others."""
        with self._lock:
            ready = {kind: self._compiled[kind] for kind in kinds if kind in self._compiled}
            new = [kind for kind in kinds if kind not in self._asked]
            self._asked.update(new)
        if new:
            threading.Thread(target=self._compile, args=(new,), name="cairn-digests").start()
        return ready

    def _compile(self, kinds: Sequence[_Kind]) -> None:
        for kind in kinds:
            # Python's exit waits for this thread after the main thread has ended.
            if not threading.main_thread().is_alive():
                return
            device, shape, dtype = kind.place
            on = jax.sharding.SingleDeviceSharding(device)
            part = jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=on)
            try:
                program = jax.jit(_digests).lower(_KEYS, [part] * kind.number).compile()
                analysis: Any = program.memory_analysis()
                used = analysis.temp_size_in_bytes
            except Exception as exc:  # saves then copy these leaves, as without digests
                _log.warning("no digests of arrays like %s on their device: %s", kind, exc)
                continue
            if used > _MOST_MEMORY:
                _log.warning("no digests of arrays like %s: they take %d bytes", kind, used)
                continue
            with self._lock:
                self._compiled[kind] = program


_programs: Final = _Programs()


def compile_digests(leaves: Mapping[str, Sequence[DeviceShard]]) -> None:
    """Start to compile the programs for a later `start_digests`; return at once.

    Args:
        leaves: device, shape and dtype of each shard, by path of the leaf.
    """
    _programs.get([kind for kind, _ in _groups(leaves)])


def start_digests(
    shards: Mapping[str, Sequence[jax.Array]], places: Mapping[str, Sequence[DeviceShard]]
) -> DeviceDigests:
    """Start to compute digests of leaves on their devices; return an object to wait for them.

    A leaf whose programs are not compiled yet gets no digest this time; their compilation starts.

    Args:
        shards: each leaf's shards, each on one device, by path; `has_digest` must be True for
            their dtypes.
        places: device, shape and dtype of these shards, by path.
    """
    groups = _groups(places)
    programs = _programs.get([kind for kind, _ in groups])
    rows: list[tuple[Sequence[tuple[str, int]], jax.Array]] = []
    for kind, names in groups:
        if kind in programs:
            parts = [shards[path][number] for path, number in names]
            try:
                rows.append((names, programs[kind](_KEYS, parts)))
            except jax.errors.JaxRuntimeError as exc:  # for example no memory for a block
                _log.warning("no digests of arrays like %s this time: %s", kind, exc)
    digested = Counter(path for names, _ in rows for path, _ in names)
    complete = [path for path, parts in shards.items() if digested[path] == len(parts)]
    return DeviceDigests(frozenset(complete), rows)


def _groups(
    leaves: Mapping[str, Sequence[DeviceShard]],
) -> list[tuple[_Kind, Sequence[tuple[str, int]]]]:
    """Divide shards into groups, each for one program.

    Returns:
        For each group: its kind, and (path, number of the shard in its leaf) of its shards.
    """
    alike: dict[DeviceShard, list[tuple[str, int]]] = {}
    for path, parts in leaves.items():
        for number, place in enumerate(parts):
            alike.setdefault(place, []).append((path, number))
    return [
        (_Kind(place, len(some)), some)
        for place, names in alike.items()
        for at in range(0, len(names), _MOST_TOGETHER)
        if (some := names[at : at + _MOST_TOGETHER])
    ]


def has_digest(dtype: Any) -> bool:
    """Return True if arrays of this dtype can have a digest.

    Bools and integers can, and floats of 8, 16, 32 or 64 bits.
    """
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits in (8, 16, 32, 64)
    return dtype == np.bool_ or bool(jnp.issubdtype(dtype, jnp.integer))


def _digests(keys: jax.Array, arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([_digest(keys, array) for array in arrays])


def _digest(keys: jax.Array, array: jax.Array) -> jax.Array:
    """Return the digest of an array: a sum over all its words, each mixed with its position.

    For a given position the mixing is a bijection, so a change of one word changes the digest. The
    sum is computed a block at a time, which bounds the memory that the compiled program needs.
    """
    array = jnp.atleast_1d(array)
    axis = int(np.argmax(array.shape))
    length = array.shape[axis]
    step = min(length, max(1, _BLOCK * length // array.size))

    def added(total: jax.Array, start: Any, size: int) -> jax.Array:
        block = jax.lax.dynamic_slice_in_dim(array, start, size, axis)
        return total + _sums(keys, _bits(block).astype(jnp.uint32), axis, start)

    total: jax.Array = jax.lax.fori_loop(
        0,
        length // step,
        lambda number, total: added(total, number * step, step),
        jnp.zeros(_LANES, jnp.uint32),
    )
    rest = length % step
    return added(total, length - rest, rest) if rest else total


def _sums(keys: jax.Array, words: jax.Array, axis: int, start: Any) -> jax.Array:
    """Return a block's sums, one per lane.

    Args:
        keys: two keys per lane.
        words: the block's words.
        axis: the array's axis along which it was divided into blocks.
        start: index on that axis at which the block begins.
    """
    place = jnp.zeros(words.shape, jnp.uint32)
    for number in range(words.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, number)
        if number == axis:
            index += jnp.uint32(start)
        place = _mixed(place + index)
    return jnp.stack(
        [
            jnp.sum(_mixed(words ^ _mixed(_mixed(place ^ first) + second)), dtype=jnp.uint32)
            for first, second in keys
        ]
    )


def _bits(array: jax.Array) -> jax.Array:
    """Return the elements as integers of at most 32 bits: their own bits; 64 bits become two."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(array, f"uint{min(jnp.finfo(dtype).bits, 32)}")
    if dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    return array


def _mixed(words: jax.Array) -> jax.Array:
    """Apply a bijection on 32 bits in which each input bit affects all output bits."""
    first, second = _FACTORS
    words = (words ^ (words >> 16)) * first
    words = (words ^ (words >> 13)) * second
    return words ^ (words >> 16)
