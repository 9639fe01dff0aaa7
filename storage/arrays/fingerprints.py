"""Fingerprints of chunks, by which a save tells what did not change. Imports no JAX.

The 128 bits of XXH3 (https://github.com/Cyan4973/xxHash) over the bytes of a chunk as they are
stored. Its seed is drawn at random in each process and never leaves it: no fingerprint means
anything to another process, and nobody can tell which changes would cancel. What is stored are
digests. See ADR 17 and 50.
"""

import secrets
from typing import Final

import xxhash

__all__ = ["fingerprint"]

_SEED: Final = secrets.randbits(64)


def fingerprint(data: bytes | memoryview) -> int:
    """The fingerprint of a chunk's bytes."""
    return xxhash.xxh3_128_intdigest(data, _SEED)
