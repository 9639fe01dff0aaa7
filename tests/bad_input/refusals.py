"""One clear error, and nothing changed: how the tests of wrong states and models look at a call."""

import jax
import pytest
from flax import nnx

from cairn import InteropError, StorageError
from tests.contract.subjects import host


def refused(subject, call, kind, *texts):
    """The one error of a call; `subject` has the same bits in the same places afterwards."""
    tree = nnx.state(subject) if isinstance(subject, nnx.Module) else subject
    before, places = host(tree), [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert isinstance(error, InteropError | StorageError)
    for text in texts:
        assert text in str(error), str(error)
    tree = nnx.state(subject) if isinstance(subject, nnx.Module) else subject
    after = host(tree)
    assert after.keys() == before.keys()
    for path, leaf in before.items():
        assert (leaf.dtype, leaf.tobytes()) == (after[path].dtype, after[path].tobytes()), path
    assert [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)] == places
    return error
