"""generation_config.json of an export, against what transformers derives of config.json."""

import json

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3Config,
)

from cairn import ConversionError, DecoderConfig, DecoderForCausalLM
from cairn.interop.weights.generation_file import MAX_BYTES, SETTINGS, generation_file
from tests.state.hf_models import save, tiny_llama

SEVERAL = {"eos_token_id": [1, 107], "bos_token_id": 2}
SAMPLING = {"eos_token_id": 5, "pad_token_id": 0, "temperature": 0.3, "top_p": 0.9, "top_k": 7}
FAMILIES = [
    LlamaConfig(),
    LlamaConfig(eos_token_id=7, use_cache=False, output_hidden_states=True),
    Gemma2Config(**SEVERAL),
    GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    MistralConfig(),
    Phi3Config(),
    Qwen3Config(**SAMPLING, do_sample=True),
]


def exported(config):
    return DecoderConfig.from_hf(config.to_dict()).to_hf()


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_derived_file_says_what_transformers_derives_of_config_json(config, tmp_path):
    content = exported(config)
    (tmp_path / "config.json").write_text(json.dumps(content))
    expected = GenerationConfig.from_model_config(AutoConfig.from_pretrained(tmp_path))
    derived = generation_file(content, None)
    if config.eos_token_id is None:
        assert derived is None
        return
    (tmp_path / "generation_config.json").write_bytes(derived)
    assert GenerationConfig.from_pretrained(tmp_path).to_diff_dict() == expected.to_diff_dict()
    # Nothing is there but what config.json has.
    stated = json.loads(derived)
    assert stated.pop("_from_model_config") is True
    assert {*stated} - {*content} <= {"return_dict_in_generate"}


def test_every_setting_of_transformers_is_known():
    metadata = {"transformers_version", "_from_model_config"}
    assert GenerationConfig().to_dict().keys() - metadata <= SETTINGS


def test_stored_file_is_exported_unchanged_and_a_broken_one_refused():
    stored = b'{"eos_token_id": [7, 9],\n  "temperature": 0.6}'
    assert generation_file({"eos_token_id": 1}, stored) == stored
    with pytest.raises(ConversionError, match=r"generation_config\.json: expected JSON"):
        generation_file({}, b"{")
    with pytest.raises(ConversionError, match=f"expected at most {MAX_BYTES} bytes"):
        generation_file({}, b" " * MAX_BYTES + b"{}")
    assert generation_file({"bos_token_id": 1}, None) is None


def test_folder_that_is_imported_and_written_again_generates_by_the_same_settings(tmp_path):
    source = save(tiny_llama(eos_token_id=[2, 5], pad_token_id=0), tmp_path / "source")
    file = source / "generation_config.json"
    for stored in (b'{"eos_token_id": 7, "temperature": 0.6, "do_sample": true}', None):
        file.unlink() if stored is None else file.write_bytes(stored)
        expected = AutoModelForCausalLM.from_pretrained(source).generation_config
        model = DecoderForCausalLM.from_pretrained(source, auto_shard_model=False)
        target = tmp_path / f"target-{stored is None}"
        model.save_pretrained(target)
        again = AutoModelForCausalLM.from_pretrained(target).generation_config
        assert again.to_diff_dict() == expected.to_diff_dict()
        written = (target / file.name).read_bytes()
        assert written == stored or (stored is None and json.loads(written)["pad_token_id"] == 0)
