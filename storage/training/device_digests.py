"""Digests of arrays computed on the devices that hold them, to tell what did not change.

A frozen base that each step is given and gives back is another array every time. Its digest tells
that it holds what the last save stored, at the speed of the device's memory, so that it need not
cross the link to be compared on the host. They never leave the process. Imports JAX. See ADR 52.
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

__all__ = ["DeviceDigests", "Place", "compile_digests", "has_digest", "start_digests"]

_log = logging.getLogger("cairn")

_LANES: Final = 4
_KEYS: Final = np.frombuffer(secrets.token_bytes(8 * _LANES), np.uint32).reshape(_LANES, 2)
"""Two for each lane of a digest, drawn anew by each process."""

_MOST_TOGETHER: Final = 16
"""Arrays of a program. A leaf more or less means new programs for its neighbours only."""

_BLOCK: Final = 1 << 20
"""Elements that are digested at a time."""

_MOST_MEMORY: Final = 256 << 20
"""Bytes of a device that a program may take for itself; usually a block's lanes, 16 MiB."""

_FACTORS: Final = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))
"""Factors of MurmurHash3's 32-bit finalizer, by Austin Appleby, which is in the public domain."""


class Place(NamedTuple):
    """A part of a leaf.

    Attributes:
        device: on which it lies.
        shape: of it.
        dtype: of it, by name.
    """

    device: jax.Device
    shape: tuple[int, ...]
    dtype: str


class _Kind(NamedTuple):
    """Parts that one program digests.

    Attributes:
        place: of each.
        number: of them.
    """

    place: Place
    number: int


class DeviceDigests(NamedTuple):
    """Digests that devices compute.

    Attributes:
        paths: of the leaves that have one.
        rows: (path, number) of the parts that were digested together, with their digests.
        earlier: digests of other leaves, by path, which are what they were.
    """

    paths: frozenset[str] = frozenset()
    rows: Sequence[tuple[Sequence[tuple[str, int]], jax.Array]] = ()
    earlier: Mapping[str, bytes] = MappingProxyType({})

    def values(self) -> dict[str, bytes]:
        """All digests by path, once the devices have them.

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
    """Compiled programs by what they digest; they are compiled where nobody waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: dict[_Kind, Any] = {}
        self._asked: set[_Kind] = set()

    def get(self, kinds: Collection[_Kind]) -> dict[_Kind, Any]:
        """Those that are compiled; the others will be."""
        with self._lock:
            ready = {kind: self._compiled[kind] for kind in kinds if kind in self._compiled}
            new = [kind for kind in kinds if kind not in self._asked]
            self._asked.update(new)
        if new:
            threading.Thread(target=self._compile, args=(new,), name="cairn-digests").start()
        return ready

    def _compile(self, kinds: Sequence[_Kind]) -> None:
        for kind in kinds:
            # At its exit Python waits for this thread, once the main one has ended.
            if not threading.main_thread().is_alive():
                return
            device, shape, dtype = kind.place
            on = jax.sharding.SingleDeviceSharding(device)
            part = jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=on)
            try:
                program = jax.jit(_digests).lower(_KEYS, [part] * kind.number).compile()
                analysis: Any = program.memory_analysis()
                used = analysis.temp_size_in_bytes
            except Exception as exc:  # saves copy these leaves, as without digests
                _log.warning("no digests of arrays like %s on their device: %s", kind, exc)
                continue
            if used > _MOST_MEMORY:
                _log.warning("no digests of arrays like %s: they take %d bytes", kind, used)
                continue
            with self._lock:
                self._compiled[kind] = program


_programs: Final = _Programs()


def compile_digests(leaves: Mapping[str, Sequence[Place]]) -> None:
    """Have what digests leaves compiled, for `start_digests` of the same; nobody waits for it.

    Args:
        leaves: the places of their parts, by path.
    """
    _programs.get([kind for kind, _ in _groups(leaves)])


def start_digests(
    shards: Mapping[str, Sequence[jax.Array]], places: Mapping[str, Sequence[Place]]
) -> DeviceDigests:
    """Have devices digest leaves; whoever calls waits for nothing.

    Leaves whose programs are not compiled yet get no digest; they will be.

    Args:
        shards: by path, what of a leaf lies on one device each, of a dtype with digests.
        places: by path, where each of these lies.
    """
    groups = _groups(places)
    programs = _programs.get([kind for kind, _ in groups])
    rows: list[tuple[Sequence[tuple[str, int]], jax.Array]] = []
    for kind, names in groups:
        if kind in programs:
            parts = [shards[path][number] for path, number in names]
            try:
                rows.append((names, programs[kind](_KEYS, parts)))
            except jax.errors.JaxRuntimeError as exc:  # such as no memory for a block
                _log.warning("no digests of arrays like %s this time: %s", kind, exc)
    digested = Counter(path for names, _ in rows for path, _ in names)
    complete = [path for path, parts in shards.items() if digested[path] == len(parts)]
    return DeviceDigests(frozenset(complete), rows)


def _groups(
    leaves: Mapping[str, Sequence[Place]],
) -> list[tuple[_Kind, Sequence[tuple[str, int]]]]:
    """(path, number) of the parts that are digested together, with what they are."""
    alike: dict[Place, list[tuple[str, int]]] = {}
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
    """Tell whether arrays of this dtype can be digested: as words of 32 bits."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits in (8, 16, 32, 64)
    return dtype == np.bool_ or bool(jnp.issubdtype(dtype, jnp.integer))


def _digests(keys: jax.Array, arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([_digest(keys, array) for array in arrays])


def _digest(keys: jax.Array, array: jax.Array) -> jax.Array:
    """The sum of a function of each word and its place, which for one place is a bijection.

    A block at a time, so that whatever a compiler makes of it takes little memory.
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
    """The lanes of a block that begins at `start` of an axis."""
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
    """The elements as integers of at most 32 bits, or twice as many; no two are the same."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(array, f"uint{min(jnp.finfo(dtype).bits, 32)}")
    if dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    return array


def _mixed(words: jax.Array) -> jax.Array:
    """A bijection of 32 bits, in which each bit of the word reaches all."""
    first, second = _FACTORS
    words = (words ^ (words >> 16)) * first
    words = (words ^ (words >> 13)) * second
    return words ^ (words >> 16)
