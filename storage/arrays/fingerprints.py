"""Fingerprints of chunks, by which a save detects unchanged ones.

The 128 bits of XXH3 (https://github.com/Cyan4973/xxHash) over the stored bytes of a chunk. Each
process draws the seed at random and never reveals it: a fingerprint means nothing to another
process, and nobody can construct changes that cancel. Fingerprints are not stored; digests are. See
ADR 17 and 50.
"""

import secrets
from typing import Final

import xxhash

__all__ = ["fingerprint"]

_SEED: Final = secrets.randbits(64)


def fingerprint(data: bytes | memoryview) -> int:
    """Return the fingerprint of a chunk's bytes."""
    return xxhash.xxh3_128_intdigest(data, _SEED)
