"""Two models that are written into one folder: it holds one of them, or somebody is told."""

import logging
import threading

import jax
import numpy as np
import pytest
from flax import nnx

from cairn import CorruptionError, DecoderForCausalLM, StoreFullError, open_files, parse_uri
from cairn.storage.safetensors.reader import read_header, read_tensor
from tests.state.seams import whole_folder
from tests.tiny import TINY

SHARDS = {"max_shard_size": "20KB"}
CONFIG = TINY.replace(sharding_axis_dims=(1, 1, 1, 1))


@pytest.fixture(scope="module")
def models():
    """Two of one config: their files have the same names and sizes."""
    first = DecoderForCausalLM(CONFIG, rngs=nnx.Rngs(0))
    graph, state = nnx.split(first)
    return first, nnx.merge(graph, jax.tree.map(lambda leaf: leaf * 2, state))


@pytest.fixture
def after_first(monkeypatch):
    """What is to happen once, after the first file of a model is written."""
    real, due = whole_folder.write_shard, []

    def write(files, rel, shard, **options):
        size = real(files, rel, shard, **options)
        if due:
            due.pop()()
        return size

    monkeypatch.setattr(whole_folder, "write_shard", write)
    return due


def tensors(uri):
    files = open_files(parse_uri(uri))
    found = {}
    for entry in files.list():
        if entry.name.endswith(".safetensors"):
            header = read_header(files, entry.name)
            for name in header.tensors:
                found[name] = np.array(read_tensor(files, entry.name, name, header=header))
    return found


def holds(uri, model):
    """Whether a folder holds all of a model, and nothing of another."""
    found, expected = tensors(uri), model.to_torch()
    expected.pop("lm_head.weight")  # tied: the same tensor, under its other name
    assert found.keys() == expected.keys()
    return all(np.array_equal(found[name], expected[name].numpy()) for name in found)


@pytest.mark.parametrize("options", [SHARDS, {"max_shard_size": "10KB"}], ids=["same", "others"])
def test_the_second_writer_of_a_folder_on_a_disk_waits_for_the_first(
    models, after_first, tmp_path, caplog, options
):
    first, second = models
    waits = threading.Event()

    class Waiting(logging.Handler):
        def emit(self, record):
            if "waiting" in record.getMessage():
                waits.set()

    other = threading.Thread(target=lambda: second.save_pretrained(tmp_path, **options))

    def overtake():
        other.start()
        assert waits.wait(20), "the second does not wait"

    handler = Waiting()
    logging.getLogger("cairn.storage.store.files_local").addHandler(handler)
    try:
        after_first.append(overtake)
        first.save_pretrained(tmp_path, **SHARDS)
        other.join(60)
    finally:
        logging.getLogger("cairn.storage.store.files_local").removeHandler(handler)
    assert holds(tmp_path, second)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("options", [SHARDS, {"max_shard_size": "10KB"}], ids=["same", "others"])
def test_a_writer_of_a_bucket_that_was_overtaken_says_that_the_folder_may_be_of_two(
    models, after_first, gcs, options
):
    first, second = models
    uri = f"{gcs.bucket_uri}/models"
    after_first.append(lambda: second.save_pretrained(uri, **options))
    with pytest.raises(CorruptionError, match="two have written this folder at the same time"):
        first.save_pretrained(uri, **SHARDS)
    second.save_pretrained(uri, **SHARDS)
    assert holds(uri, second)


def test_a_folder_is_never_complete_with_files_of_the_model_before(models, after_first, tmp_path):
    first, second = models
    first.save_pretrained(tmp_path, **SHARDS)

    def fail():
        raise StoreFullError("the store is full", path=tmp_path)

    after_first.append(fail)
    with pytest.raises(StoreFullError):
        second.save_pretrained(tmp_path, **SHARDS)
    left = {path.name for path in tmp_path.iterdir()}
    assert not left & {"config.json", "model.safetensors.index.json"}
    second.save_pretrained(tmp_path, **SHARDS)
    assert holds(tmp_path, second)


def test_a_model_whose_first_file_does_not_fit_leaves_the_one_before(models, monkeypatch, tmp_path):
    first, second = models
    first.save_pretrained(tmp_path, **SHARDS)
    real = whole_folder.write_shard

    def full(files, rel, shard, *, on_data, **options):
        def stop(data):
            on_data(data)
            raise StoreFullError("the store is full", path=tmp_path)

        return real(files, rel, shard, on_data=stop, **options)

    monkeypatch.setattr(whole_folder, "write_shard", full)
    with pytest.raises(StoreFullError):
        second.save_pretrained(tmp_path, **SHARDS)
    assert holds(tmp_path, first)
    assert (tmp_path / "config.json").is_file()
