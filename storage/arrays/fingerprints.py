"""Fingerprints of arrays, by which a save tells what did not change. Imports no JAX.

    sum over i of swap(word[i] x F modulo 2**64) x key(i), modulo 2**64

over the 64-bit words of the leaf, as the last axis has them in memory; `swap` turns the order of
the eight bytes around. Keys are those of digests.py, made from another seed, and odd as F is: a
change in one word always changes the sum, which is not linear in any element. F and the seed are
drawn at random in each process and never leave it. Nobody can tell which changes would cancel, and
no fingerprint means anything to another process: what is stored are digests. See ADR 17.

A word counts by its place in the leaf, so that parts which do not cut through words add up.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from cairn.storage.arrays.digests import WORDS_AT_ONCE, KeyedSum, box_sum, scratch

__all__ = ["box_fingerprint"]

_FACTOR: Final = np.uint64(secrets.randbits(64) | 1)
_FEW: Final = 1024
"""Words that are mixed in one piece: for small leaves the rest takes longer."""

_OTHER_ORDER: Final = np.dtype(np.uint64).newbyteorder()

Words = np.ndarray[Any, np.dtype[np.uint64]]


def box_fingerprint(values: np.ndarray, origin: Sequence[int]) -> int:
    """The fingerprint of a part of a leaf.

    Holds at most some 3 MiB beside the part.

    Args:
        values: the part's elements.
        origin: index of its first element in the leaf.
    """
    return box_sum(values, origin, _FINGERPRINT)


def _mixed_sums(rows: Words, keys: Words) -> Words:
    """The sum of each row, its words mixed."""
    if rows.size <= _FEW:
        small = np.multiply(rows, _FACTOR).byteswap(inplace=True)
        sums: Words = np.einsum("ij,j->i", small, keys)
        return sums
    found = np.empty(len(rows), np.uint64)
    at_once = min(len(rows), max(1, WORDS_AT_ONCE // rows.shape[1]))
    shape = at_once, rows.shape[1]
    with scratch(*shape) as products, scratch(*shape) as swapped:
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            product, mixed = products[: len(part)], swapped[: len(part)]
            np.multiply(part, _FACTOR, out=product)
            # A copy into the other order: `byteswap` would keep other threads from running.
            np.copyto(mixed.view(_OTHER_ORDER), product)
            found[start : start + at_once] = np.einsum("ij,j->i", mixed, keys)
    return found


_FINGERPRINT: Final = KeyedSum(word=8, seed=secrets.randbits(64), row_sums=_mixed_sums)
