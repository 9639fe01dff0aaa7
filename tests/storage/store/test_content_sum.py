import google_crc32c
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.store.checksums import ContentSum, splitmix64


def content_of(*pieces):
    found = ContentSum()
    for piece in pieces:
        found.update(piece)
    return found.text()


def as_defined(data):
    padded = data + bytes(-len(data) % 8)
    total = sum(
        int.from_bytes(padded[at : at + 8], "little")
        * (splitmix64(at // 8 % 512) | 1)
        * ((2 * (at // 4096) + 1) * 0x9E3779B97F4A7C15)
        for at in range(0, len(padded), 8)
    )
    return f"words-64:{total % 2**64:016x}"


@given(data=st.data(), size=st.integers(0, 20_000), seed=st.integers(0, 9))
def test_pieces_of_any_size_give_the_sum_that_is_defined(data, size, seed):
    whole = np.random.default_rng(seed).bytes(size)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    assert content_of(*pieces) == as_defined(whole)


@given(size=st.integers(1, 20_000), at=st.integers(0, 20_000), change=st.integers(1, 255))
def test_a_change_of_one_byte_always_changes_the_sum(size, at, change):
    data = bytearray(np.random.default_rng(size).bytes(size))
    before = content_of(bytes(data))
    data[at % size] ^= change
    assert content_of(bytes(data)) != before


def sealed(part):
    return part + google_crc32c.value(part).to_bytes(4, "little")


def test_it_tells_apart_what_crc32c_does_not():
    numbers = np.random.default_rng(0)
    parts = [sealed(numbers.bytes(9000)) for _ in range(4)]
    first, second = parts[0] + parts[1], parts[2] + parts[3]
    assert google_crc32c.value(first) == google_crc32c.value(second)
    assert content_of(first) != content_of(second)
    assert content_of(first) != content_of(parts[1] + parts[0])


@given(st.integers(0, 999), st.integers(0, 999), st.integers(1, 64))
def test_pieces_that_change_places_anywhere_change_the_sum(first, second, length):
    words = np.random.default_rng(7).integers(0, 2**63, 2000, dtype=np.uint64)
    moved = words.copy()
    a, b = slice(first, first + length), slice(1000 + second, 1000 + second + length)
    length = min(len(words[a]), len(words[b]))
    a, b = slice(a.start, a.start + length), slice(b.start, b.start + length)
    moved[a], moved[b] = words[b], words[a]
    assert content_of(words.tobytes()) != content_of(moved.tobytes())


def test_sectors_that_change_places_within_a_page_change_the_sum():
    page = np.random.default_rng(8).bytes(4096)
    assert content_of(page) != content_of(page[512:1024] + page[:512] + page[1024:])
