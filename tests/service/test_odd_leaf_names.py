"""Leaves whose keys are no usual names: each is read by the path that the list of leaves has."""

import itertools
from urllib.parse import quote, urlencode

import httpx
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cairn import AsyncClient, Checkpointer, UnsupportedLeafError
from cairn.service.errors import ProblemResponseError
from cairn.storage.arrays.leaf_paths import path_of
from tests.service.conftest import BASE_URL, PEER

HARD = ("w", "w\n", "w\r\n", "w/", "/w", "w//w", "w%2F", "w%0A", "%", "%25", "w?w=1", "w#w")
HARD += (
    "..",
    ".",
    "../w",
    "w/..",
    "w\\w",
    "w:diff",
    "\u00e9",
    "e\u0301",
    "\u202ew",
    " ",
    "\x7f",
    "",
)
KEYS = st.sampled_from(HARD) | st.text("w/\n\r%2F.?#:;&+ é\u2028\x00", max_size=5)
RUNS = itertools.count()


def leaf(number):
    return np.full(2, number, np.int32)


def tree_of(keys):
    """A tree with a leaf for each key, and the path of each."""
    tree, numbers = {"layers": {}}, {}
    for number, key in enumerate(keys):
        if number % 2:
            tree["layers"][key] = {"w": leaf(number)}
            numbers[path_of(("layers", key, "w"))] = number
        else:
            tree[key] = leaf(number)
            numbers[path_of((key,))] = number
    return tree, numbers


async def ask(app, run, numbers):
    transport = httpx.ASGITransport(app, client=PEER)
    at = f"/v1/roots/default/runs/{run}/checkpoints/1/tensors"
    async with (
        AsyncClient(BASE_URL, transport=transport) as cairn,
        httpx.AsyncClient(transport=transport, base_url=BASE_URL) as http,
    ):
        assert {one.path async for one in cairn.tensors(run, 1)} == numbers.keys()
        changed = {one.path async for page in cairn.diff(run, 1, 2) for one in page.differences}
        assert changed == numbers.keys()
        for path, number in numbers.items():
            assert path in {one.path async for one in cairn.tensors(run, 1, prefix=path)}
            found = await cairn.tensor_values(run, 1, path)
            assert (found.path, found.values) == (path, [number] * 2)
            assert (await cairn.tensor_statistics(run, 1, path)).min == number
            head = await http.head(f"{at}/{quote(path, safe='')}")
            assert (head.status_code, head.headers["content-length"]) == (200, "136")
            query = urlencode({"item": "model", "path": path})
            for part in ("tensor", "tensor/picture"):
                page = await http.get(f"/ui/default/{run}/steps/1/{part}?{query}")
                assert page.status_code == 200, page.text
        for path in {path + end for path in [*numbers][:2] for end in ("\n", "/", "%0A")} - {
            *numbers
        }:
            with pytest.raises(ProblemResponseError) as refused:
                await cairn.tensor_values(run, 1, path)
            assert refused.value.problem["type"] == "urn:cairn:problem:leaf-not-found"


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(KEYS, min_size=1, max_size=4, unique=True))
@example(["w", "x", "w\n", "x\n"])
@example(["w", "w/", "/w", "w%2F", "../w", "w?w=1", "w#w", "%"])
def test_each_leaf_that_is_listed_is_read_by_its_path_and_is_no_other(http, app, root, keys):
    run = f"run-{next(RUNS)}"
    tree, numbers = tree_of(keys)
    with Checkpointer(str(root / run)) as checkpointer:
        try:
            checkpointer.save(1, {"model": tree}, meta={}).wait()
        except UnsupportedLeafError:  # names its keys: `bad_input/test_names.py`
            return
        other = jax.tree.map(lambda values: -1 - values, tree)
        checkpointer.save(2, {"model": other}, meta={}).wait()
    http.portal.call(ask, app, run, numbers)
