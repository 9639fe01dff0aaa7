"""Iterators of Grain and torchdata, as they are, go on where a step was saved."""

import asyncio

import grain
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from etils import epath
from grain.experimental import ElasticIterator
from grain.sharding import NoSharding, ShardOptions
from torchdata.stateful_dataloader import StatefulDataLoader

from cairn import Checkpointer, IteratorMismatchError, UnsupportedFormatError, UnsupportedLeafError
from cairn.storage.runs.records.layout import iterator_file
from tests.state.seams import NotStorableError, iterator_states, state_from_json, state_to_json
from tests.storage.counting import Numbers


def grains():
    return iter(grain.MapDataset.range(100).seed(3).shuffle().batch(4))


def grains_iterated():
    data = grain.MapDataset.range(100).seed(3).shuffle().to_iter_dataset()
    return iter(data.filter(lambda one: one % 3 > 0).batch(4))


def grains_loader():
    sampler = grain.samplers.IndexSampler(
        100, shard_options=NoSharding(), shuffle=True, num_epochs=2, seed=5
    )
    return iter(grain.DataLoader(data_source=range(100), sampler=sampler, worker_count=0))


def elastic():
    data = grain.MapDataset.range(100).seed(1).shuffle()
    return iter(ElasticIterator(data, 4, ShardOptions(0, 1)))


def tree():
    return {"model": {"w": jnp.ones((4, 4))}}


def next_ones(iterator, count=3):
    return np.concatenate([np.ravel(next(iterator)) for _ in range(count)]).tolist()


@pytest.mark.parametrize("make", [grains, grains_iterated, grains_loader, elastic])
def test_an_iterator_of_grain_goes_on_where_the_step_was_saved(tmp_path, make):
    train = make()
    next_ones(train, 5)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, tree(), iterators={"train": train})
        expected = next_ones(train)
        again = make()
        checkpointer.restore(tree(), iterators={"train": again})
        assert next_ones(again) == expected
        next_ones(train, 2)
        checkpointer.restore(tree(), iterators={"train": train})  # in place, wherever it was
        assert next_ones(train) == expected


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
@pytest.mark.parametrize("shuffle", [False, True])
def test_torchdatas_loader_goes_on_where_the_step_was_saved(tmp_path, shuffle):
    """A shuffled one keeps the state of its random numbers in a tensor."""

    def loader():
        return StatefulDataLoader(list(range(40)), batch_size=4, shuffle=shuffle, num_workers=0)

    train = loader()
    batches = iter(train)
    next_ones(batches)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, tree(), iterators={"train": train})
        expected = next_ones(batches, 7)
        again = loader()
        checkpointer.restore(tree(), iterators={"train": again})
    batches = iter(again)
    assert next_ones(batches, 7) == expected
    assert list(batches) == []


def test_a_dict_state_lies_where_grain_itself_reads_it(tmp_path):
    train = grains()
    next_ones(train)
    with Checkpointer(tmp_path / "run") as checkpointer:
        handle = checkpointer.save(1, tree(), iterators={"train": train})
    again = grains()
    folder = (epath.Path(handle.uri.local_path) / iterator_file("train", 0, 1)).parent

    async def load_with_grain():
        await (await again.load(folder))

    asyncio.run(load_with_grain())
    assert next_ones(again) == next_ones(train)


def test_a_dataset_that_is_no_iterator_yet_is_refused(tmp_path):
    checkpointer = Checkpointer(tmp_path / "run")
    with pytest.raises(UnsupportedLeafError, match=r"train: .*found grain\..*MapDataset without"):
        checkpointer.save(1, tree(), iterators={"train": grain.MapDataset.range(3)})


def test_an_iterator_of_another_kind_is_refused_by_its_name(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, tree(), iterators={"train": Numbers(2)})
        with pytest.raises(IteratorMismatchError, match=r"train: .*found KeyError: 'next_index'"):
            checkpointer.restore(tree(), iterators={"train": grains()})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float16, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_a_tensor_comes_back_bit_by_bit(dtype, shape):
    whole = torch.arange(6).to(dtype).reshape(2, 3).mT  # not as it lies in memory
    given = whole if shape == whole.shape else torch.ones(shape, dtype=dtype)
    found = state_from_json(state_to_json({"t": given}), path="state")["t"]
    assert (found.dtype, found.shape) == (dtype, given.shape)
    assert torch.equal(found, given)


def test_random_numbers_of_torch_go_on_as_they_would_have():
    own = torch.Generator()
    state = state_to_json(own.get_state())
    expected = torch.rand(3, generator=own)
    own.set_state(state_from_json(state, path="state"))
    assert torch.equal(torch.rand(3, generator=own), expected)


def test_tensors_that_are_more_than_their_bits_are_refused():
    given = [
        torch.zeros(2, requires_grad=True),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(2, device="meta"),
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, dtype=torch.complex64).conj(),
    ]
    with pytest.raises(NotStorableError) as caught:
        state_to_json(given)
    places = [problem.partition(": ")[0] for problem in caught.value.problems]
    assert places == [f"state[{number}]" for number in range(6)]


def test_tensors_are_not_read_where_pytorch_is_not_imported(monkeypatch):
    data = state_to_json([torch.zeros(2)])
    monkeypatch.setattr(iterator_states, "sys", type("Bare", (), {"modules": {}}))
    with pytest.raises(UnsupportedFormatError, match="Import torch"):
        state_from_json(data, path="here")
