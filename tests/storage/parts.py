"""Parts of arrays, and ways to cut them, as Hypothesis draws them."""

from hypothesis import strategies as st


def inside(origin, shape):
    return tuple(slice(at, at + size) for at, size in zip(origin, shape, strict=True))


@st.composite
def boxes(draw, shape):
    """(origin, shape) of a part of an array."""
    origin = tuple(draw(st.integers(0, size - 1)) for size in shape)
    part = tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, origin, strict=True))
    return origin, part


@st.composite
def cuts(draw):
    """(shape, outer shard, inner chunk), each dividing the one before."""
    rank = draw(st.integers(0, 4))
    chunk = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    shard = tuple(size * draw(st.integers(1, 3)) for size in chunk)
    shape = tuple(size * draw(st.integers(1, 3)) for size in shard)
    return shape, shard, chunk
