"""What an import asks a store for: each byte of the weights once, and none of them in vain."""

import math

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from cairn import ConversionError, DecoderForCausalLM, open_files
from cairn.state.paths import named_leaves
from cairn.storage.safetensors.format import encode_header
from tests.programs.program import run
from tests.state.hf_models import save, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tiny_llama(), tmp_path_factory.mktemp("hub"), max_shard_size="40KB")


@pytest.fixture(scope="module")
def leaves(folder):
    """The weights on one device, by path."""
    model = DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    return {named.path: np.asarray(named.leaf) for named in named_leaves(nnx.state(model))}


def uploaded(folder, gcs):
    source, target = open_files(folder), open_files(gcs.bucket_uri)
    for path in folder.iterdir():
        source.copy(path.name, target, path.name)
    return gcs.bucket_uri


def read(gcs):
    """Bytes of weights that the store has sent."""
    return sum(
        one.answered
        for one in gcs.server.requests
        if (one.bucket, one.operation) == (gcs.bucket, "media.get")
        and one.name.endswith(".safetensors")
    )


def headers(folder):
    heads = (path.read_bytes()[:8] for path in folder.glob("*.safetensors"))
    return sum(8 + int.from_bytes(head, "little") for head in heads)


@pytest.mark.parametrize("mesh", [(1, 4, 2, 1), (8, 1, 1, 1), (2, 2, 2, 1), None])
def test_one_process_reads_each_byte_once_however_many_devices_hold_it(mesh, folder, gcs, leaves):
    uri = uploaded(folder, gcs)
    if mesh is None:
        model = DecoderForCausalLM.from_pretrained(uri, auto_shard_model=False)
    else:
        model = DecoderForCausalLM.from_pretrained(uri, sharding_axis_dims=mesh)
    assert read(gcs) == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    for named in named_leaves(nnx.state(model)):
        for shard in named.leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, leaves[named.path][shard.index])


def test_devices_own_what_they_hold(folder):
    model = DecoderForCausalLM.from_pretrained(folder, sharding_axis_dims=(8, 1, 1, 1))
    kernel = model.model.norm.scale
    before = np.array(kernel[...])
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(kernel[...])
    again = DecoderForCausalLM.from_pretrained(folder, sharding_axis_dims=(8, 1, 1, 1))
    np.testing.assert_array_equal(np.asarray(again.model.norm.scale[...]), before)
    for shard in doubled.addressable_shards:
        np.testing.assert_array_equal(shard.data, before * 2)


def test_tensors_of_one_weight_in_several_dtypes_are_named_before_any_is_read(tmp_path, gcs):
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 16}
    config = MixtralConfig(
        **{"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"num_key_value_heads": 2, **experts},
    )
    save(MixtralForCausalLM(config).to(torch.bfloat16), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    (name,) = [name for name in tensors if name.endswith("experts.1.w2.weight")]
    tensors[name] = tensors[name].to(torch.float16)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(ConversionError, match="tensors of one dtype where they become") as caught:
        DecoderForCausalLM.from_pretrained(uploaded(tmp_path, gcs), param_dtype=None)
    (problem,) = caught.value.problems
    assert "model/layers/0/mlp/experts/down_proj/kernel: " in problem
    assert f"{name} float16" in problem
    assert read(gcs) == headers(tmp_path)


def test_all_that_does_not_fit_is_told_before_any_weight_is_read(folder, tmp_path, gcs):
    for path in folder.glob("config.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = {
        name: array
        for path in folder.glob("*.safetensors")
        for name, array in load_file(path).items()
    }
    del tensors["model.norm.weight"]
    tensors["model.other.weight"] = np.zeros(3, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T.copy()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError) as caught:
        DecoderForCausalLM.from_pretrained(uploaded(tmp_path, gcs))
    assert len(caught.value.problems) == 3
    for said in (
        "missing tensor: model.norm.weight",
        "unexpected tensor: model.other.weight (3,)",
        "shape of lm_head.weight: expected (32, 96) for lm_head/kernel, found (96, 32)",
    ):
        assert any(said in problem for problem in caught.value.problems), said
    assert read(gcs) == headers(tmp_path)


PEAK = """
import re, sys
import jax
from cairn import DecoderForCausalLM

def peak():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1]) * 1024

options = {"sharding_axis_dims": (1, 1, 8, 1)}
DecoderForCausalLM.from_pretrained(sys.argv[1], **options)
before = peak()
model = DecoderForCausalLM.from_pretrained(sys.argv[2], **options)
held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
print(held, peak() - before - held)
"""


def zeros(folder, vocabulary):
    """A model of zeros, which take no room on the disk; two tensors of `vocabulary` rows."""
    sizes = {"hidden_size": 4096, "intermediate_size": 8, "num_attention_heads": 8}
    config = LlamaConfig(
        **{"vocab_size": vocabulary, "num_hidden_layers": 1, "num_key_value_heads": 8},
        **{"head_dim": 2, "tie_word_embeddings": False, **sizes},
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        made = LlamaForCausalLM(config)
    tensors = {name: tuple(one.shape) for name, one in made.state_dict().items()}
    header = encode_header([(n, np.dtype(np.float32), shape) for n, shape in tensors.items()], {})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * sum(math.prod(shape) for shape in tensors.values()))
    return folder


def test_host_memory_of_an_import_is_below_one_tensor(tmp_path):
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    small, large = zeros(tmp_path / "small", 8), zeros(tmp_path / "large", 8192)
    done = run(["-c", PEAK, str(small), str(large)])
    assert done.returncode == 0, done.stderr
    held, more = map(int, done.stdout.split())
    tensor = 4 * 4096 * 8192
    assert held > 2 * tensor
    # A slice is an eighth of a tensor; one lies where it is read, and one is being transposed.
    assert more < tensor
