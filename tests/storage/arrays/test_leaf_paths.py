import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.arrays.leaf_paths import keys_of, path_of

KEYS = st.lists(
    st.one_of(st.text(min_size=1), st.text("%/25F.~", min_size=1, max_size=8)), max_size=4
)


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        (("layers", "0", "kernel"), "layers/0/kernel"),
        (("model.layers.0.weight",), "model.layers.0.weight"),
        (("linear/~/w",), "linear%2F~%2Fw"),
        (("linear", "~", "w"), "linear/~/w"),
        (("100%",), "100%"),
        (("50%2",), "50%2"),
        (("a%2Fb",), "a%252Fb"),
        (("a%25",), "a%2525"),
        (("a%2f",), "a%2f"),
        ((), ""),
    ],
)
def test_paths_are_what_was_agreed(keys, path):
    assert path_of(keys) == path
    assert keys_of(path) == keys


@given(KEYS)
def test_the_keys_come_back_from_the_path(keys):
    assert keys_of(path_of(keys)) == tuple(keys)


@given(KEYS, KEYS)
def test_other_keys_have_another_path(one, other):
    assert (path_of(one) == path_of(other)) == (one == other)
