"""Digests of arrays, computed on their devices to detect unchanged leaves.

A frozen base that a training step receives and returns is a new array each time. Its digest,
computed at the speed of device memory, shows that it equals what the last save stored, without a
transfer to the host. Digests never leave the process. Imports JAX. See ADR 52.
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
"""Arrays per compiled program. Few: another leaf recompiles only its neighbours' program."""

_BLOCK: Final = 1 << 20
"""Elements per block of a digest."""

_MOST_MEMORY: Final = 256 << 20
"""Maximum temporary device memory of a program, in bytes; a block's lanes usually take 16 MiB."""

_FACTORS: Final = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))
"""Factors of MurmurHash3's 32-bit finalizer, by Austin Appleby, which is in the public domain."""


class DeviceShard(NamedTuple):
    """Device, shape and dtype of a shard of a leaf.

    Attributes:
        device: where it lies.
        shape: of it.
        dtype: of it, by name.
    """

    device: jax.Device
    shape: tuple[int, ...]
    dtype: str


class _Kind(NamedTuple):
    """Key of a program: number and kind of the shards that it digests.

    Attributes:
        place: of each.
        number: of them.
    """

    place: DeviceShard
    number: int


class DeviceDigests(NamedTuple):
    """Digests that devices compute.

    Attributes:
        paths: of the leaves that have one.
        rows: (path, number) of the shards that were digested together, with their digests.
        earlier: digests of unchanged leaves from an earlier save, by path.
    """

    paths: frozenset[str] = frozenset()
    rows: Sequence[tuple[Sequence[tuple[str, int]], jax.Array]] = ()
    earlier: Mapping[str, bytes] = MappingProxyType({})

    def values(self) -> dict[str, bytes]:
        """Wait for the devices and return all digests by path.

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
        """Return the compiled ones; start to compile the others."""
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
    """Start to compile the programs for a later `start_digests`; returns at once.

    Args:
        leaves: the places of their shards, by path.
    """
    _programs.get([kind for kind, _ in _groups(leaves)])


def start_digests(
    shards: Mapping[str, Sequence[jax.Array]], places: Mapping[str, Sequence[DeviceShard]]
) -> DeviceDigests:
    """Start digests of leaves on their devices; returns at once.

    Leaves whose programs are not compiled yet get no digest now; compilation starts.

    Args:
        shards: by path, a leaf's shards, each on one device, of a dtype with digests.
        places: by path, the places of these shards.
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
    """Return (path, number) of the shards that are digested together, with their kind."""
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
    """Return True if arrays of this dtype can be viewed as words of up to 32 bits."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits in (8, 16, 32, 64)
    return dtype == np.bool_ or bool(jnp.issubdtype(dtype, jnp.integer))


def _digests(keys: jax.Array, arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([_digest(keys, array) for array in arrays])


def _digest(keys: jax.Array, array: jax.Array) -> jax.Array:
    """Return the sum over words of a function that is a bijection for each position.

    Computes a block at a time, which bounds the memory of whatever the compiler makes of it.
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
    """Return the lanes of a block that begins at `start` of an axis."""
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
    """Return the elements as integers of at most 32 bits, injectively; 64 bits become two words."""
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
