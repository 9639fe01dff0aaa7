"""Weights of several dtypes that become one: cast to what is asked for, or refused by name."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file, save_file

from cairn import CheckpointReader, ConversionError, DecoderForCausalLM, resolve_checkpoint
from cairn.interop.conversion.tensor_streams import whole
from cairn.interop.weights.export import export_sources
from cairn.interop.weights.gguf_writing import stored_gguf
from cairn.state.paths import named_leaves
from tests.interop.families.known import test_falcon, test_gpt_oss, test_phi3
from tests.interop.families.matrix import SIZES, model_of, tensors_of, tiny

FUSED = {
    test_phi3: ("self_attn/q_proj", "layers.0.self_attn.qkv_proj.weight"),
    test_falcon: ("self_attn/q_proj", "h.0.self_attention.query_key_value.weight"),
    test_gpt_oss: ("mlp/experts/gate_proj", "layers.0.mlp.experts.gate_up_proj"),
}


def halve(model, part):
    """Puts these layers in bfloat16, the others stay as they are."""
    state = nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        if part in "/".join(map(str, path)):
            variable.set_value(variable.get_value().astype(jnp.bfloat16))
    nnx.update(model, state)
    dtypes = {named.leaf.dtype.name for named in named_leaves(model)}
    assert dtypes == {"float32", "bfloat16"}


@pytest.fixture(scope="module", params=FUSED, ids=lambda family: family.MODEL_TYPE)
def mixed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    part, name = FUSED[request.param]
    # llama.cpp has no windows in Phi-3, and no biases in Falcon.
    loadable = {test_phi3: "part_of_each_head", test_falcon: "newer_one_norm"}
    model_of(request.param, loadable.get(request.param)).save_pretrained(folder / "theirs")
    model = DecoderForCausalLM.from_pretrained(folder / "theirs", auto_shard_model=False)
    halve(model, part)
    model.to_state().save_state(folder / "run", step=0).wait()
    run, step = resolve_checkpoint(str(folder / "run"))
    stored = run.manifest(step), CheckpointReader.open(run.step_uri(step), run.manifest(step))
    return tensors_of(folder / "theirs"), model, stored, part, name


def test_leaves_of_several_dtypes_are_refused_by_name_rather_than_rounded(mixed, tmp_path):
    _, model, stored, part, name = mixed
    for export in (
        model.to_torch,
        lambda: model.save_pretrained(tmp_path),
        lambda: export_sources(*stored),
    ):
        with pytest.raises(ConversionError, match="name a floating dtype") as caught:
            export()
        (told,) = (one for one in caught.value.problems if f"{name}: " in one)
        assert f"layers/0/{part}/kernel bfloat16" in told
        assert "float32" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stated_dtype_casts_each_leaf_from_its_own(mixed, tmp_path, dtype):
    theirs, model, stored, _, name = mixed
    model.save_pretrained(tmp_path, float_dtype=dtype)
    found = tensors_of(tmp_path)
    sources, config = export_sources(*stored, dtype=dtype)
    assert config["dtype"] == dtype
    again = {source.name: whole(source).astype(np.float32) for source in sources}
    (full,) = (full for full in theirs if full.endswith(name))
    assert found.keys() == again.keys() == theirs.keys()
    for key, tensor in found.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert np.array_equal(tensor.float().numpy(), again[key])
        halves = theirs[key].bfloat16()
        if dtype == "bfloat16":
            assert torch.equal(tensor, halves)
        elif key == full:
            exact, rounded = tensor == theirs[key], tensor == halves.float()
            assert (exact | rounded).all()
            assert not exact.all()
            assert not rounded.all()


def test_a_gguf_rounds_no_leaf_to_its_neighbours_dtype(mixed):
    """It joins queries, keys and values of some families, and has a type of its own."""
    _, _, stored, _, _ = mixed
    shard, _ = stored_gguf(*stored, {}, dtype="float32")
    assert all(tensor.dtype == np.float32 for tensor in shard.tensors)
    sources, _ = export_sources(*stored, dtype="float32")
    numbers = np.sort(np.concatenate([whole(one).reshape(-1) for one in sources]))
    written = np.concatenate([whole(one).reshape(-1) for one in shard.tensors])
    assert np.isin(numbers, written).all()


def test_experts_of_several_dtypes_are_cast_on_their_way_in_or_refused(tmp_path):
    sizes = {**SIZES, "num_hidden_layers": 1, "num_local_experts": 3}
    tiny("mixtral", **sizes).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.block_sparse_moe.experts.{}.w2.weight"
    tensors[name.format(1)] = tensors[name.format(1)].half()
    tensors[name.format(2)] = tensors[name.format(2)].bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    model = DecoderForCausalLM.from_pretrained(tmp_path, auto_shard_model=False)
    stacked = model.model.layers[0].mlp.experts.down_proj.kernel
    for number in range(3):
        expected = tensors[name.format(number)].float().numpy().T
        np.testing.assert_array_equal(np.asarray(stacked[number]), expected)
    with pytest.raises(ConversionError, match="pass a param_dtype") as caught:
        DecoderForCausalLM.from_pretrained(tmp_path, auto_shard_model=False, param_dtype=None)
    (problem,) = caught.value.problems
    assert problem.startswith("model/layers/0/mlp/experts/down_proj/kernel: ")
    assert f"{name.format(1)} float16, {name.format(2)} bfloat16" in problem
