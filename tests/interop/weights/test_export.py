"""Export of a stored step without JAX: the tensors and config that transformers loads."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cairn import (
    ArgumentError,
    CheckpointReader,
    ConversionError,
    DecoderForCausalLM,
    TreeMismatchError,
    open_files,
    plan_shards,
    resolve_checkpoint,
    write_index,
    write_shard,
)
from cairn.interop.conversion.tensor_streams import whole
from cairn.interop.weights.export import export_sources
from tests.state.hf_models import LLAMA3_ROPE, save, tiny_llama, tokens, torch_logits


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A fine-tuned state as a training job saves it: folder of the originals, run, model."""
    root = tmp_path_factory.mktemp("export")
    theirs = tiny_llama(attention_bias=True, rope_parameters=LLAMA3_ROPE)
    folder = save(theirs, root / "theirs")
    model = DecoderForCausalLM.from_pretrained(folder, sharding_axis_dims=(2, 4, 1, 1))
    state = model.to_state(optax.adamw(1e-3))
    state.save_state(root / "run", step=3).wait()
    return theirs, root / "run"


def opened(run):
    found, step = resolve_checkpoint(str(run))
    manifest = found.manifest(step)
    return manifest, CheckpointReader.open(found.step_uri(step), manifest)


def test_export_gives_the_tensors_that_were_imported(stored):
    theirs, run = stored
    sources, config = export_sources(*opened(run))
    found = {source.name: whole(source) for source in sources}
    expected = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert None not in config.values()


def test_small_blocks_give_the_same_bytes(stored):
    _, run = stored
    sources, _ = export_sources(*opened(run))
    for source in sources:
        pieces = [block.reshape(-1) for block in source.blocks(256)]
        assert all(piece.nbytes <= 256 for piece in pieces)
        np.testing.assert_array_equal(np.concatenate(pieces), whole(source).reshape(-1))


def test_export_in_bfloat16_loads_in_transformers(stored, tmp_path):
    theirs, run = stored
    sources, config = export_sources(*opened(run), dtype="bfloat16")
    files = open_files(tmp_path)
    shards = plan_shards(sources, "20KB")
    for shard in shards:
        write_shard(files, shard.file_name, shard)
    write_index(files, "model.safetensors.index.json", shards)
    (tmp_path / "config.json").write_text(json.dumps(config))
    written = [load_file(tmp_path / shard.file_name) for shard in shards]
    tensors = {name: tensor for part in written for name, tensor in part.items()}
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensors[name], tensor.to(torch.bfloat16)), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = tokens(1, 12)
    expected = torch_logits(theirs, ids)
    assert np.abs(torch_logits(again, ids) - expected).max() <= 0.05 * np.abs(expected).max()


def test_export_needs_no_jax(stored):
    _, run = stored
    code = (
        "import sys\n"
        "from cairn.interop.weights.export import export_sources\n"
        "from cairn.storage.reading.reader import CheckpointReader\n"
        "from cairn.storage.runs.resolution import resolve_checkpoint\n"
        f"run, step = resolve_checkpoint({str(run)!r})\n"
        "manifest = run.manifest(step)\n"
        "reader = CheckpointReader.open(run.step_uri(step), manifest)\n"
        "sources, config = export_sources(manifest, reader)\n"
        "assert sum(b.nbytes for s in sources for b in s.blocks(1 << 20)) == "
        "sum(s.nbytes for s in sources)\n"
        "found = {'jax', 'flax', 'orbax', 'torch', 'transformers'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tied_embeddings_are_written_once(tmp_path):
    folder = save(tiny_llama(tie_word_embeddings=True), tmp_path / "theirs")
    model = DecoderForCausalLM.from_pretrained(folder)
    model.to_state().save_state(tmp_path / "run", step=0).wait()
    sources, config = export_sources(*opened(tmp_path / "run"))
    names = [source.name for source in sources]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert config["tie_word_embeddings"] is True


def test_a_step_without_a_model_is_refused(stored):
    manifest, reader = opened(stored[1])
    with pytest.raises(ConversionError, match="an item 'model' with its config; found the items a"):
        export_sources(manifest.model_copy(update={"items": ("a",), "model": None}), reader)


def test_a_model_without_a_config_is_told_so(stored):
    manifest, reader = opened(stored[1])
    with pytest.raises(ConversionError, match=r"a model config; .*saved without one"):
        export_sources(manifest.model_copy(update={"model": None}), reader)


def test_leaves_that_the_config_does_not_describe_are_all_named(stored):
    manifest, reader = opened(stored[1])
    wrong = {
        "attention_bias": False,
        "attention_out_bias": False,
        "vocab_size": 7,
        "num_hidden_layers": 3,
    }
    config = {**manifest.model.config, **wrong}
    model = manifest.model.model_copy(update={"config": config})
    with pytest.raises(TreeMismatchError) as caught:
        export_sources(manifest.model_copy(update={"model": model}), reader)
    problems = caught.value.problems
    name = "model/layers/1/self_attn/o_proj/bias"
    assert sum("unexpected in the checkpoint" in problem for problem in problems) == 8
    assert any(problem.startswith(f"{name}: unexpected") for problem in problems)
    name = "model/layers/2/input_layernorm/scale"
    assert f"{name}: missing from the checkpoint, expected shape [32]" in problems
    name = "model/embed_tokens/embedding"
    assert any(
        problem.startswith(f"{name}: expected shape [7, 32], stored") for problem in problems
    )


def test_unknown_dtype_lists_the_known_ones(stored):
    with pytest.raises(ArgumentError, match="bfloat16"):
        export_sources(*opened(stored[1]), dtype="float7")


def test_a_model_of_no_family_is_exported_under_its_own_names(tmp_path):
    from tests.state.my_model import my_model

    model = my_model()
    model.to_state().save_state(tmp_path / "run", step=0).wait()
    sources, config = export_sources(*opened(tmp_path / "run"))
    by_name = {source.name: source for source in sources}
    kernel = nnx.state(model)["layers"][1]["kernel"].get_value()
    np.testing.assert_array_equal(whole(by_name["layers.1.kernel"]), np.asarray(kernel))
    assert config["model_type"] == "my-model-of-the-tests"
    assert jnp.dtype(by_name["layers.1.kernel"].dtype) == jnp.float32
