"""Tokenizers that go into GGUF files and come out of them: the same text has to be the same ids."""

import json
import sys

import gguf
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from examples.demo.weights import carried_tokenizer
from tests.interop.seams import PRE_TOKENIZERS, GGUFFile, chat_templates, tokenizer_metadata

TEXTS = (
    "hello world 1234567 it's 12 a1b22",
    "  two  spaces\n\nnew\r\n tab\t.",
    " <s>hi</s> <tool>x I'VE don't",
    "naïve ☃   ",
)
BYTES = {"add_prefix_space": False, "use_regex": False}
CUTS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    **{
        name: pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(rule), "isolated"), pre_tokenizers.ByteLevel(**BYTES)]
        )
        for rule, name in PRE_TOKENIZERS.items()
    },
}
CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}


def trained(name, *, begins=False):
    """A byte-level BPE that cuts text by the rules of this name; numbers are merged, if it may."""
    made = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    made.pre_tokenizer, made.decoder = CUTS["gpt-2"], decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator([*TEXTS] * 5, trainer)
    made.pre_tokenizer = CUTS[name]
    made.add_tokens(["<tool>"])
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    return made


def assets(tokenizer, **config):
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({**CONFIG, **config}).encode(),
    }


def written(path, metadata):
    """A file with nothing but a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"tokenizer.ggml.bos_token_id": 0, **metadata}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add.get(type(value), writer.add_string)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def ids(tokenizer, text):
    found = tokenizer(text)["input_ids"] if callable(tokenizer) else tokenizer.encode(text).ids
    return list(found)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("name", CUTS)
def test_the_same_text_is_the_same_ids_after_the_way_through_a_file(name, begins, tmp_path):
    original = trained(name, begins=begins)
    metadata, problem = tokenizer_metadata(assets(original), original.get_vocab_size() + 3)
    assert problem is None
    assert metadata["tokenizer.ggml.pre"] == name
    # llama.cpp goes by the name of the rules where a file does not say.
    assert metadata["tokenizer.ggml.add_bos_token"] is begins
    read = carried_tokenizer(written(tmp_path / "x.gguf", metadata).tokenizer_files())
    for text in TEXTS:
        assert ids(read, text) == ids(original, text)


def test_by_llama_3s_rules_a_text_begins_as_llama_cpp_has_it_begin(tmp_path):
    original = trained("llama-bpe", begins=True)
    metadata, _ = tokenizer_metadata(assets(original), original.get_vocab_size())
    del metadata["tokenizer.ggml.add_bos_token"]  # older files do not say
    read = carried_tokenizer(written(tmp_path / "x.gguf", metadata).tokenizer_files())
    for text in TEXTS:
        assert ids(read, text) == ids(original, text)


def test_a_tokenizer_that_cuts_text_by_unknown_rules_is_left_out_and_told(tmp_path):
    original = trained("gpt-2")
    metadata, _ = tokenizer_metadata(assets(original), original.get_vocab_size())
    file = written(tmp_path / "x.gguf", {**metadata, "tokenizer.ggml.pre": "deepseek-v3"})
    with pytest.warns(UserWarning, match=r"tokenizer is left out: .* found 'deepseek-v3'"):
        assert file.tokenizer_files() == {}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"pre_tokenizer": {**BYTES, "type": "ByteLevel", "add_prefix_space": True}}, "no byte-"),
        ({"model": {"ignore_merges": True}}, "no byte-level BPE"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "no byte-level BPE"),
        ({"post_processor": {"type": "BertProcessing"}}, "adds tokens to a text"),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "</s>"}}],
                    "special_tokens": {"</s>": {"id": "</s>", "ids": [1]}},
                }
            },
            "more to a text than one token",
        ),
    ],
)
def test_what_no_file_can_say_of_a_tokenizer_leaves_it_out(change, why):
    files = assets(trained("qwen2"))
    data = json.loads(files["tokenizer.json"])
    model = {**data["model"], **change.pop("model", {})}
    files["tokenizer.json"] = json.dumps({**data, **change, "model": model}).encode()
    found, problem = tokenizer_metadata(files, 1000)
    assert found == {}
    assert why in problem


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_an_added_token_that_no_file_can_say_leaves_the_tokenizer_out(flag):
    original = trained("gpt-2")
    original.add_tokens([AddedToken("<x>", **{flag: True})])
    found, note = tokenizer_metadata(assets(original), 1000)
    assert found == {}
    assert "its added token '<x>' takes white space with it" in note


def test_added_tokens_that_may_overlap_leave_the_tokenizer_out():
    original = trained("gpt-2")
    original.add_tokens(["  ", "    "])  # of which the longest is the first, too
    assert tokenizer_metadata(assets(original), 1000)[1] is None
    original.add_tokens(["ab", "bcd"])
    found, note = tokenizer_metadata(assets(original), 1000)
    assert found == {}
    assert "its added tokens 'ab' and 'bcd' may overlap" in note
    runs = trained("gpt-2")
    runs.add_tokens(["  ", " b", "    "])
    assert "its added tokens '  ' and ' b' may overlap" in tokenizer_metadata(assets(runs), 1000)[1]


def test_a_tokenizer_that_composes_characters_is_written_and_told():
    original = trained("qwen2")
    original.normalizer = normalizers.NFC()
    found, note = tokenizer_metadata(assets(original), 1000)
    assert found["tokenizer.ggml.pre"] == "qwen2"
    assert "composes characters first (NFC), which llama.cpp does not" in note


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.model": "unheard-of", "tokenizer.ggml.tokens": ["a", "b"]},
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b"]},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]},
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": ["a", "b"],
            "tokenizer.ggml.merges": ["a x"],
        },
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": ["a", "b"],
            "tokenizer.ggml.merges": ["alone"],
        },
    ],
)
def test_a_broken_tokenizer_is_left_out_and_told(metadata, tmp_path):
    file = written(tmp_path / "x.gguf", metadata)
    with pytest.warns(
        UserWarning, match=r"(?s)the tokenizer is left out: .*tokenizer's files from"
    ):
        assert file.tokenizer_files() == {}


def test_a_tokenizer_that_nothing_here_converts_is_left_out_and_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    file = written(tmp_path / "x.gguf", {"tokenizer.ggml.model": "gpt2"})
    with pytest.warns(UserWarning, match=r"expected transformers .* to convert it, found none"):
        assert file.tokenizer_files() == {}


def test_a_file_without_a_tokenizer_has_none(tmp_path):
    assert written(tmp_path / "x.gguf", {}).tokenizer_files() == {}
    silent = written(tmp_path / "y.gguf", {"tokenizer.ggml.model": "none"})
    assert silent.tokenizer_files() == {}


def test_chat_templates_of_every_name_go_into_a_file():
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    metadata, _ = tokenizer_metadata(assets(trained("gpt-2"), chat_template=templates), 1000)
    assert metadata["tokenizer.chat_template"] == "D"
    assert metadata["tokenizer.chat_templates"] == ["tool_use"]
    assert metadata["tokenizer.chat_template.tool_use"] == "T"


@pytest.mark.parametrize("usual", [True, False])
def test_chat_templates_of_every_name_come_back_out_of_a_file(usual, tmp_path):
    templates = [{"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]
    templates += [{"name": "default", "template": "D"}] if usual else []
    files = assets(trained("gpt-2"), chat_template=templates)
    metadata, _ = tokenizer_metadata(files, 1000)
    again = written(tmp_path / "x.gguf", metadata).tokenizer_files()
    assert not any("/" in name for name in again)
    expected = {one["name"]: one["template"] for one in templates}
    assert carried_tokenizer(again).chat_template == expected
    assert chat_templates(again) == {
        key: one for key, one in metadata.items() if "chat_template" in key
    }
