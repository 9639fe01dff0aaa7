"""Each map of another trainer's tree, by `make proofs`: every mistake in it, and its GGUF file."""

import numpy as np
import pytest
import torch

from cairn import CheckpointReader, Run, adopt
from cairn.interop.weights.export import mapped_model
from cairn.interop.weights.gguf_writing import stored_gguf
from cairn.storage.safetensors.writer import write_shard
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import parse_uri
from tests.interop.families.its_gelu import LIMIT_OF_ITS_GELU, with_its_gelu
from tests.interop.families.llama_cpp_engine import logits_of_file
from tests.interop.trainers.walk import TOLERANCE, KeptModel, walk
from tests.trainers.kept import KEPT, kept, store


@pytest.mark.parametrize("name", KEPT)
def test_no_mistake_in_an_operation_of_any_map_survives_the_trainers_logits(name):
    model = KeptModel(name)
    assert model.difference(model.map.rules) <= TOLERANCE
    assert not walk(model).survivors


@pytest.mark.parametrize("name", KEPT)
def test_llama_cpp_computes_the_same_from_the_gguf_file_of_a_trainers_step(name, tmp_path):
    store(name, tmp_path / "theirs")
    adopt(str(tmp_path / "theirs"), str(tmp_path / "run"))
    run = Run.open(str(tmp_path / "run"))
    manifest = run.manifest(run.latest())
    _, settings = kept(name)
    mapped = mapped_model(manifest, settings)
    reader = CheckpointReader.open(run.step_uri(run.latest()), manifest)
    shard, _ = stored_gguf(manifest, reader, {}, dtype="float32", mapped=mapped)
    write_shard(open_files(parse_uri(str(tmp_path))), shard.file_name, shard)

    model = KeptModel(name)
    model.load_leaves(model.map.rules)
    with torch.no_grad():
        expected = with_its_gelu(model.model)(torch.from_numpy(model.tokens)).logits.numpy()
    logits = [logits_of_file(tmp_path / shard.file_name, ids) for ids in model.tokens]
    limit = LIMIT_OF_ITS_GELU if "gelu" in mapped.config.hidden_act else TOLERANCE
    assert np.abs(logits - expected).max() <= limit * np.abs(expected).max()
