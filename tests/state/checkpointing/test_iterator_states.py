"""The state of an iterator comes back bit by bit, or is refused by the place of what is in it."""

import inspect
import json
import random
import sys
from collections import Counter, OrderedDict, namedtuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cairn import CorruptionError, UnsupportedFormatError
from tests.state.seams import NotStorableError, state_from_json, state_to_json

KEYS = st.text() | st.integers() | st.none() | st.binary() | st.tuples(st.integers(), st.text())
ARRAYS = hnp.arrays(
    st.sampled_from(["|b1", "<u1", "<i8", ">i2", "<f2", "<f8", "<c16"]),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text()
    | st.binary()
    | ARRAYS
)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS | st.sampled_from(["$bytes", "$", "$dict"]), inner)
    ),
    max_leaves=12,
)


NAMED = ("seen", "point", "text", "half", "eighth", "wide", "names", "huge")


def told(state):
    """Text that is equal only for states of the same types, order and bits."""
    if isinstance(state, dict):
        return ["dict", [(told(key), told(value)) for key, value in state.items()]]
    if isinstance(state, list | tuple):
        return [type(state).__name__, [told(one) for one in state]]
    if isinstance(state, np.ndarray):
        return ["array", state.dtype.str, state.shape, state.tobytes()]
    return [type(state).__name__, repr(state)]


def back(state):
    return state_from_json(state_to_json(state), path="state")


@given(STATES)
def test_a_state_comes_back_in_types_order_and_bits(state):
    assert told(back(state)) == told(state)


def test_random_numbers_go_on_as_they_would_have():
    own, numpy = random.Random(1), np.random.default_rng(2)
    old = np.random.RandomState(3)  # its state holds an array
    states = [own.getstate(), numpy.bit_generator.state, old.get_state()]
    expected = [own.random(), numpy.random(), old.rand()]
    own.setstate(back(states[0]))
    numpy.bit_generator.state = back(states[1])
    old.set_state(back(states[2]))
    found = [own.random(), numpy.random(), old.rand()]
    assert told(found) == told(expected)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (np.int64(2**62 + 1), 2**62 + 1),
        (np.uint8(7), 7),
        (np.bool_(True), True),
        (np.float32(0.1), float(np.float32(0.1))),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    ],
)
def test_numbers_of_numpy_become_pythons_of_equal_value(given, found):
    assert told(back({"at": given})) == told({"at": found})


def test_what_is_json_is_stored_as_it_is():
    state = {"next": [3, -1.5, "é", None, True, {}], "seed": 7}
    assert state_to_json(state) == json.dumps(state, ensure_ascii=False).encode()


def test_what_can_not_be_stored_is_named_by_its_place_and_all_of_it():
    point = namedtuple("point", "x y")
    within: list[object] = []
    within.append(within)
    state = {
        "rng": [jnp.arange(2)],
        "at": {3: (object(), {1, 2})},
        "seen": Counter("a"),
        "point": point(1, 2),
        "text": "\ud800",
        "half": np.zeros(2, ml_dtypes.bfloat16),
        "eighth": np.zeros(2, ml_dtypes.float8_e5m2),  # of NumPy's own kind of floats
        "wide": np.zeros(2, np.longdouble),
        "names": np.array(["a"]),
        "huge": 1 << 10_000,
        "fine": 3,
        object(): 1,
    }
    with pytest.raises(NotStorableError) as caught:
        state_to_json(state)
    places = [problem.partition(": ")[0] for problem in caught.value.problems]
    assert places == [
        "state['rng'][0]",
        "state['at'][3][0]",
        "state['at'][3][1]",
        *(f"state[{name!r}]" for name in NAMED),
        "state",
    ]
    assert "ArrayImpl" in caught.value.problems[0]
    assert caught.value.problems[-1].startswith("state: its key: builtins.object")
    with pytest.raises(NotStorableError, match="within itself"):
        state_to_json(within)


@pytest.mark.parametrize("wrap", [lambda one: [one], lambda one: (one,), lambda one: {1: one}])
def test_what_is_saved_can_be_read_wherever_it_is_read(wrap):
    def further_in(calls, read):
        return read() if calls == 0 else further_in(calls - 1, read)

    state = 7
    for _ in range(100):
        state = wrap(state)
    data = state_to_json(state)
    room = sys.getrecursionlimit() - len(inspect.stack(0)) - 400
    assert further_in(room, lambda: state_from_json(data, path="here")) == state
    with pytest.raises(NotStorableError, match="more than 100 containers deep"):
        state_to_json(wrap(state))


def test_what_is_restored_is_nobody_elses():
    data = state_to_json({"array": np.zeros(2)})
    one, other = (state_from_json(data, path="state") for _ in range(2))
    one["array"][0] = 1
    assert other["array"][0] == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[1",
        b"\xff",
        b'{"$bytes": "?"}',
        b'{"$array": {"dtype": "|O", "shape": [1], "data": "AAAAAAAAAAA="}}',
        b'{"$array": {"dtype": "<i8", "shape": [2], "data": "AAAAAAAAAAA="}}',
        b'{"$array": 3}',
        b'{"$dict": [[[1], 2]]}',
        b'{"$float": "x"}',
    ],
)
def test_what_is_no_stored_state_is_an_error(data):
    with pytest.raises(CorruptionError, match="the state of an iterator can't be read: here"):
        state_from_json(data, path="here")


def test_parts_of_a_newer_release_are_refused():
    with pytest.raises(UnsupportedFormatError, match=r"found \$set. Upgrade Cairn"):
        state_from_json(b'{"a": {"$set": [1]}}', path="here")
