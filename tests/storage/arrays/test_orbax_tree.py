import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import CorruptionError, UnsupportedFormatError
from cairn.storage.arrays.leaf_paths import path_of
from cairn.storage.arrays.orbax_tree import (
    StoredForm,
    array_name,
    nest,
    parse_step_metadata,
    parse_tree_metadata,
)


def entry(*keys, value_type="jax.Array", skip=False, kind=2):
    return {
        "key_metadata": [{"key": key, "key_type": kind} for key in keys],
        "value_metadata": {"value_type": value_type, "skip_deserialize": skip},
    }


def tree(*entries, **fields):
    return json.dumps({"tree_metadata": dict(enumerate(entries)), **fields}).encode()


def test_leaves_are_named_by_their_keys():
    found = parse_tree_metadata(
        tree(
            entry("a", "b"),
            entry("n", value_type="None", skip=True),
            entry("s", value_type="string"),
            use_zarr3=True,
            store_array_data_equal_to_fill_value=True,
        ),
        path="x",
    )
    assert found.arrays == {"a/b": "a.b"}
    assert found.empties == {"n": None}
    assert found.strings == {"s": "s"}
    assert found.zarr3
    assert found.ocdbt
    assert not found.sparse


def test_two_leaves_with_one_path_are_refused():
    with pytest.raises(UnsupportedFormatError, match="two leaves at 'a/0'"):
        parse_tree_metadata(tree(entry("a", "0"), entry("a", 0, kind=1)), path="x")


def test_keys_with_slashes_are_leaves_of_their_own():
    found = parse_tree_metadata(tree(entry("a", "b"), entry("a/b"), entry("c/d")), path="x")
    assert found.arrays == {"a/b": "a.b", "a%2Fb": "a/b", "c%2Fd": "c/d"}
    assert {path: array_name(path) for path in found.arrays} == found.arrays


def test_a_leaf_is_found_by_the_path_that_older_manifests_have_of_it():
    found = parse_tree_metadata(tree(entry("a", "b"), entry("a/b"), entry("c/d")), path="x")
    assert found.current("c/d") == "c%2Fd"
    assert found.current("c%2Fd") == "c%2Fd"
    assert found.current("a/b") == "a/b"


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[]", b"{}", b'{"tree_metadata": 3}', b'{"tree_metadata": {"a": {}}}',
     tree({"key_metadata": [{"key": "a"}], "value_metadata": {}}), b"[" * 100_000],
)  # fmt: skip
def test_damaged_tree_metadata_is_corrupt_and_names_the_file(data):
    with pytest.raises(CorruptionError, match="gs://b/model/_METADATA"):
        parse_tree_metadata(data, path="gs://b/model/_METADATA")


@pytest.mark.parametrize("value_type", ["jax.Array", "np.ndarray", "scalar"])
def test_an_array_that_is_said_not_to_be_stored_is_no_empty_container(value_type):
    with pytest.raises(UnsupportedFormatError, match=r"aggregated leaves: x: .* 'a/b'"):
        parse_tree_metadata(tree(entry("a", "b", value_type=value_type, skip=True)), path="x")


def test_step_metadata_of_plain_orbax_has_no_forms():
    data = json.dumps({"item_handlers": {"b": "x", "a": "y"}, "commit_timestamp_nsecs": 3})
    found = parse_step_metadata(data.encode(), path="x")
    assert found.items == ("a", "b")
    assert found.committed
    assert found.forms == {}


def step(**cairn):
    return json.dumps({"item_handlers": {"m": ""}, "custom_metadata": {"cairn": cairn}}).encode()


def test_step_metadata_of_cairn_names_forms_and_items_without_leaves():
    found = parse_step_metadata(
        step(version=1, items=["m", "o"], forms={"m": {"z": ["empty", [0, 3], "float16"]}}),
        path="x",
    )
    assert found.items == ("m", "o")
    assert found.forms == {"m": {"z": StoredForm("empty", (0, 3), "float16")}}


def test_step_metadata_of_a_newer_cairn_is_refused():
    with pytest.raises(UnsupportedFormatError, match="version 2"):
        parse_step_metadata(step(version=2), path="x")


@pytest.mark.parametrize(
    "cairn",
    [{"forms": 3}, {"forms": {"m": {"z": ["empty"]}}}, {"items": 3}, 3, {"forms": {"m": 1}}],
)
def test_damaged_step_metadata_is_corrupt(cairn):
    data = {"item_handlers": {"m": ""}, "custom_metadata": {"cairn": cairn}}
    with pytest.raises(CorruptionError):
        parse_step_metadata(json.dumps(data).encode(), path="x")


json_trees = st.recursive(
    st.integers(0, 3),  # leaves are carried, never looked into
    lambda inner: st.lists(inner, min_size=1, max_size=12)
    | st.dictionaries(st.text(st.characters(codec="ascii"), min_size=1),
                      inner, min_size=1),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=20)
@given(st.dictionaries(st.text("abc", min_size=1), json_trees, min_size=1))
def test_nest_undoes_flattening(value):
    leaves, sequences = {}, set()

    def flatten(node, path):
        if isinstance(node, dict | list):
            if isinstance(node, list):
                sequences.add(path)
            items = node.items() if isinstance(node, dict) else enumerate(node)
            for key, child in items:
                segment = path_of([str(key)])
                flatten(child, f"{path}/{segment}" if path else segment)
        else:
            leaves[path] = node

    flatten(value, "")
    assert nest(leaves, frozenset(sequences)) == value
