"""GGUF files: config, rotated rows, quantized types, and what is refused."""

import gguf
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from cairn import ConfigError, ConversionError, DecoderForCausalLM, RopeConfig
from cairn.interop.config.frequencies import inverse_frequencies, llama3_divisors
from tests.state.forward import logits_of
from tests.state.gguf_files import opened, write_llama
from tests.state.hf_models import tiny_llama, tokens, torch_logits

Types = gguf.GGMLQuantizationType


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_the_model_that_the_file_was_made_of(tied, tmp_path):
    theirs = tiny_llama(tie_word_embeddings=tied, attention_bias=False)
    model = DecoderForCausalLM.from_pretrained(
        write_llama(tmp_path / "tiny.gguf", theirs), auto_shard_model=False
    )
    assert model.config.tie_word_embeddings == tied
    assert model.config.hf_extra["eos_token_id"] == 2
    ids = tokens(2, 24)
    expected = torch_logits(theirs, ids)
    assert np.abs(logits_of(model, ids) - expected).max() <= 1e-4 * np.abs(expected).max()


def test_quantized_weights_equal_what_transformers_reads(tmp_path):
    theirs = tiny_llama(hidden_size=64, intermediate_size=64)
    path = write_llama(tmp_path / "tiny.gguf", theirs, quantization=Types.Q4_1)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).eval()
    model = DecoderForCausalLM.from_pretrained(path, auto_shard_model=False)
    found = model.to_torch()
    for name, tensor in again.state_dict().items():
        np.testing.assert_array_equal(found[name].numpy(), tensor.numpy(), err_msg=name)
    ids = tokens(1, 16)
    expected = torch_logits(again, ids)
    assert np.abs(logits_of(model, ids) - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "BF16", "F16"])
def test_common_types_are_dequantized_near_the_original(kind, tmp_path):
    theirs = tiny_llama(hidden_size=64, intermediate_size=64)
    file = opened(write_llama(tmp_path / "tiny.gguf", theirs, quantization=Types[kind]))
    found = file.read("blk.0.ffn_up.weight")
    expected = theirs.state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 0.15


ALIGNMENT = b"general.alignment" + (4).to_bytes(4, "little")


@pytest.fixture(scope="module")
def aligned(tmp_path_factory):
    """A file whose tensors begin at multiples of 4096 bytes, and one of its tensors."""
    theirs = tiny_llama()
    path = tmp_path_factory.mktemp("aligned") / "tiny.gguf"
    write_llama(path, theirs, alignment=4096)
    return path, theirs.state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()


def test_a_file_of_another_alignment_is_read_by_it(aligned):
    path, expected = aligned
    np.testing.assert_array_equal(opened(path).read("blk.0.ffn_up.weight"), expected)


@pytest.mark.parametrize("said", [0, 1, 3, 4, 8, 32, 48, 1024, 1 << 16, 1 << 31, (1 << 32) - 1])
def test_an_alignment_by_which_the_tensors_do_not_lie_is_refused(aligned, tmp_path, said):
    raw = aligned[0].read_bytes()
    assert ALIGNMENT + (4096).to_bytes(4, "little") in raw
    file = tmp_path / "hostile.gguf"
    changed = ALIGNMENT + said.to_bytes(4, "little")
    file.write_bytes(raw.replace(ALIGNMENT + (4096).to_bytes(4, "little"), changed))
    with pytest.raises(ConversionError, match=r"general\.alignment|cannot reshape"):
        opened(file)


def test_an_alignment_of_another_type_is_refused_by_its_name(aligned, tmp_path):
    raw = aligned[0].read_bytes()
    wide = b"general.alignment" + (10).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little")
    file = tmp_path / "hostile.gguf"
    file.write_bytes(raw.replace(ALIGNMENT + (4096).to_bytes(4, "little"), wide))
    with pytest.raises(ConversionError, match=r"general\.alignment"):
        opened(file)


def test_llama3_scaling_is_recognised_by_its_frequencies(tmp_path):
    rope = RopeConfig(
        theta=500000.0,
        scaling="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    divisors = llama3_divisors(rope, inverse_frequencies(RopeConfig(theta=500000.0), 16))
    theirs = tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    path = write_llama(tmp_path / "tiny.gguf", theirs, rope_divisors=divisors)
    assert opened(path).config().rope == rope
    strange = write_llama(tmp_path / "strange.gguf", theirs, rope_divisors=divisors * 1.1)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        opened(strange).config()


def test_unsupported_tensor_type_names_tensor_type_and_what_is_supported(tmp_path):
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("fine.weight", np.ones(4, np.float32))
    writer.add_tensor("odd.weight", np.ones((2, 4), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConversionError, match="Q4_1") as caught:
        DecoderForCausalLM.from_pretrained(path, auto_shard_model=False)
    assert caught.value.problems == ("odd.weight: type I32",)
    assert str(path) in str(caught.value)


def test_unknown_architecture_lists_the_known_ones(tmp_path):
    path = write_llama(tmp_path / "x.gguf", tiny_llama(), architecture="mamba")
    with pytest.raises(ConfigError, match=r"one of .*llama.*found 'mamba'"):
        DecoderForCausalLM.from_pretrained(path, auto_shard_model=False)


def test_rope_scaling_that_is_not_built_in_is_refused(tmp_path):
    path = write_llama(tmp_path / "x.gguf", tiny_llama(), **{"rope.scaling.type": "spiral"})
    with pytest.raises(ConfigError, match="spiral"):
        DecoderForCausalLM.from_pretrained(path, auto_shard_model=False)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all" * 9])
def test_a_file_that_is_no_gguf_is_refused(content, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ConversionError, match=r"bad\.gguf"):
        opened(path)


def test_a_truncated_file_is_refused(tmp_path):
    path = write_llama(tmp_path / "tiny.gguf", tiny_llama())
    data = path.read_bytes()
    for end in (100, len(data) // 2):
        path.write_bytes(data[:end])
        with pytest.raises(ConversionError, match="cut short"):
            opened(path)


def test_a_missing_file_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        DecoderForCausalLM.from_pretrained(tmp_path / "none.gguf", auto_shard_model=False)
