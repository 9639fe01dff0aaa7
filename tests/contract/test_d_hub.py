"""EasyDeLBaseModule: Hugging Face folders, PyTorch, and counting operations."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from cairn import Checkpointer
from tests.contract.subjects import DECODER, assert_same_bits, make_decoder, make_state
from tests.state import hub_server
from tests.state.forward import logits_of
from tests.state.hub.test_hub import run_with_hub
from tests.state.my_model import MyModel, batch


@pytest.fixture(scope="module")
def model():
    return make_decoder()


def test_save_pretrained_writes_a_dir_that_from_pretrained_reads(model, tmp_path):
    dir = tmp_path / "hf"
    model.save_pretrained(dir)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["model_type"] == "llama"
    again = type(model).from_pretrained(tmp_path / "hf")
    assert_same_bits(again.split_params(), model.split_params())


def test_max_shard_size_bounds_each_file(model, tmp_path):
    model.save_pretrained(tmp_path / "one", max_shard_size="5GB")
    names = model.save_pretrained(tmp_path / "many", max_shard_size="80KB")
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    assert shards[0].startswith("model-00001-of-")
    sizes = [
        sum(tensor.nbytes for tensor in load_file(tmp_path / "many" / shard).values())
        for shard in shards
    ]
    assert max(sizes) <= 80_000
    whole = load_file(tmp_path / "one/model.safetensors")
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(whole)


def test_from_pretrained_takes_sharding_and_dtype(model, tmp_path):
    model.save_pretrained(tmp_path / "hf")
    loaded = type(model).from_pretrained(
        tmp_path / "hf",
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
        auto_shard_model=True,
        sharding_axis_dims=(1, 4, 2, 1),
    )
    assert (loaded.dtype, loaded.module_dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert dict(loaded.mesh.shape) == {"dp": 1, "fsdp": 4, "tp": 2, "sp": 1}
    embedding = max(jax.tree.leaves(loaded.params), key=lambda leaf: leaf.size)
    assert embedding.addressable_shards[0].data.size < embedding.size


def test_from_pretrained_takes_a_quantization(model, tmp_path):
    model.save_pretrained(tmp_path / "hf")
    loaded = type(model).from_pretrained(tmp_path / "hf", quantization_method="nf4")
    assert loaded.is_quantized


def test_from_pretrained_takes_a_run(tmp_path):
    state = make_state()
    state.save_state(tmp_path / "run", wait=True, verbose=False)
    Checkpointer.for_run(tmp_path / "run").close()
    loaded = MyModel.from_pretrained(f"{tmp_path}/run")
    assert_same_bits(loaded.split_params(), state.graphstate)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_to_torch_fills_load_state_dict_strictly_and_keeps_the_dtype(dtype):
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    tensors = make_decoder(param_dtype=dtype).to_torch()
    wanted = getattr(torch, np.dtype(dtype).name)
    assert {tensor.dtype for tensor in tensors.values()} == {wanted}
    config = LlamaConfig(**{k: v for k, v in DECODER.to_hf().items() if k != "model_type"})
    theirs = AutoModelForCausalLM.from_config(config, dtype=wanted)
    theirs.load_state_dict(tensors, strict=True)


def test_to_pytorch_is_a_transformers_model_with_the_same_logits(model):
    import torch
    import transformers

    theirs = model.to_pytorch()
    assert isinstance(theirs, transformers.LlamaForCausalLM)
    with torch.no_grad():
        found = theirs(torch.tensor(np.asarray(batch(2, 6))).long()).logits.numpy()
    ours = logits_of(model, batch(2, 6))
    assert np.abs(found - ours).max() <= 1e-4 * np.abs(ours).max()


def closed_form(config, batch_size, tokens):
    """Twice the multiplications of every matrix product of a causal forward pass."""
    width, heads, kept, size = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    projections = width * size * (2 * heads + 2 * kept)
    attention = 2 * tokens * heads * size
    mlp = 3 * width * config.intermediate_size
    layers = config.num_hidden_layers * (projections + attention + mlp)
    return 2 * batch_size * tokens * (layers + width * config.vocab_size)


def test_flops_per_token_is_the_closed_form_over_batch_size_and_sequence_length(model):
    for batch_size, sequence_length in ((1, 16), (4, 32)):
        found = model.flops_per_token(batch_size=batch_size, sequence_length=sequence_length)
        expected = closed_form(DECODER, 1, sequence_length) / sequence_length
        np.testing.assert_allclose(found, expected, rtol=0.02)


def test_flop_takes_config_batch_size_and_sequence_length(model):
    base = model._flop(DECODER, 1, 16)
    assert model._flop(config=DECODER, batch_size=3, sequence_length=16) == 3 * base
    deeper = DECODER.replace(num_hidden_layers=4)
    np.testing.assert_allclose(model._flop(deeper, 1, 16), closed_form(deeper, 1, 16), rtol=0.02)


ONLINE = """
from cairn import DecoderForCausalLM
model = DecoderForCausalLM.from_pretrained("org/tiny", auto_shard_model=True)
assert model.config.num_hidden_layers == 2
url = model.push_to_hub("org/tiny", commit_message="Upload model")
assert url.endswith("/commit/" + "a" * 40), url
"""


def test_push_to_hub_and_from_pretrained_speak_to_the_hub_at_hf_endpoint(model, tmp_path):
    """push_to_hub and from_pretrained: HF_ENDPOINT leads the real client to a hub of this test."""
    model.save_pretrained(tmp_path / "hf")
    with hub_server.serve(tmp_path / "hf") as hub:
        run_with_hub(ONLINE, hub, tmp_path / "home")
    assert hub.messages == ["Upload model"]
    assert hub.pushed["config.json"] == (tmp_path / "hf/config.json").read_bytes()
    (tmp_path / "pushed").mkdir()
    for name, content in hub.pushed.items():
        (tmp_path / "pushed" / name).write_bytes(content)
    again = type(model).from_pretrained(tmp_path / "pushed")
    assert_same_bits(again.split_params(), model.split_params())
