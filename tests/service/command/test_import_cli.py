"""`cairn import`: weights that become a step of MaxText, and come back from it."""

import json

import pytest
from safetensors.numpy import load_file, save_file

from cairn import CheckpointReader, Run, adopt
from cairn.interop.weights.export import export_sources, mapped_model
from cairn.storage.safetensors.writer import plan_shards, write_shard
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import parse_uri
from tests.service.commands import cairn_here
from tests.trainers.kept import kept, store

FILE = "model.safetensors"


def exported(folder, settings, target):
    """Adopt and export a folder that MaxText could have written; return its leaves' shapes."""
    run = Run.open(adopt(folder, f"{folder}.run").run)
    manifest = run.manifest(run.latest())
    reader = CheckpointReader.open(run.step_uri(run.latest()), manifest)
    mapped = mapped_model(manifest, settings)
    sources, config = export_sources(manifest, reader, mapped=mapped, dtype="bfloat16")
    (shard,) = plan_shards(sources, 1 << 40)
    write_shard(open_files(parse_uri(str(target))), FILE, shard)
    (target / "config.json").write_text(json.dumps(config))
    return {f"items/{path}": info.shape for path, info in reader.leaves("items").items()}


def weights(name, folder):
    """Write a Hugging Face folder of a kept model of MaxText, and return its settings."""
    _, settings = kept(name)
    store(name, folder / "theirs")
    exported(folder / "theirs", settings, folder / "hf")
    return settings


@pytest.mark.parametrize(
    ("name", "scan"),
    [
        ("maxtext-llama3.1-scanned", True),
        ("maxtext-llama3.1-scanned", False),
        ("maxtext-gemma3-scanned", True),
    ],
)
def test_weights_become_a_step_that_comes_back_bit_for_bit(tmp_path, name, scan):
    settings = weights(name, tmp_path)
    arguments = [f"{tmp_path}/hf", f"{tmp_path}/steps", "--as", "maxtext"]
    done = cairn_here("import", *arguments, *(["--scan"] if scan else []))
    assert done.stdout.split() == [f"{tmp_path}/steps/0/items"]
    assert f"scan_layers={str(scan).lower()}" in done.stderr
    shapes = exported(tmp_path / "steps", settings, tmp_path / "again")
    if scan:
        assert shapes == {path: array.shape for path, array in kept(name)[0].items()}
    first, again = (load_file(tmp_path / folder / FILE) for folder in ("hf", "again"))
    assert first.keys() == again.keys()
    assert all(first[tensor].tobytes() == again[tensor].tobytes() for tensor in first)
    taken = cairn_here("import", *arguments)
    assert taken.returncode == 4
    assert "the step exists" in taken.stderr


def test_what_maxtext_does_not_have_is_refused_and_nothing_written(tmp_path):
    weights("maxtext-llama3.1-scanned", tmp_path)
    arguments = [f"{tmp_path}/hf", f"{tmp_path}/steps", "--as", "maxtext"]
    other = cairn_here("import", *arguments[:3], "tunix")
    assert other.returncode == 2
    assert "trainer: expected one of maxtext; found 'tunix'" in other.stderr
    tensors = load_file(tmp_path / "hf" / FILE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "hf" / FILE)
    lacking = cairn_here("import", *arguments)
    assert lacking.returncode == 2
    assert "missing tensor: model.layers.1.mlp.up_proj.weight" in lacking.stderr
    config = json.loads((tmp_path / "hf/config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    sizes = {key: config[key] for key in (*names, "num_hidden_layers", "num_attention_heads")}
    (tmp_path / "hf/config.json").write_text(json.dumps({**sizes, "model_type": "olmo2"}))
    unknown = cairn_here("import", *arguments)
    assert "MaxText: expected a model of one of gemma2, gemma3_text, llama" in unknown.stderr
    assert not (tmp_path / "steps").exists()
