"""The families that are known: each a short file, a row of the table and a test."""

import re
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cairn import ConfigError, DecoderConfig
from cairn.interop import registry
from cairn.interop.families.family import get_family

ROOT = Path(__file__).parents[3]
TABLE = (ROOT / "docs/reference/state/families.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \|", TABLE.partition("\n\n## ")[0], re.MULTILINE)[1:]
MOST_LINES = 160


def checked_rows():
    """The table of what llama.cpp was asked: family -> three counts, and the cells refused."""
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|(.*)\|$", TABLE, re.MULTILINE)
    return {
        name: (*map(int, counts), sorted(re.findall(r"`([^`]+)`", refused)))
        for name, *counts, refused in rows
    }


def test_the_table_has_every_family_and_its_file_is_short():
    files = (ROOT / "interop/families/known").glob("[a-z]*.py")
    lines = {file.stem: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert sorted(ROWS) == sorted(lines) == registry.known_families()
    assert max(lines.values()) <= MOST_LINES


def test_the_table_of_what_llama_cpp_was_asked_has_every_family_that_has_gguf_files():
    rows = checked_rows()
    assert rows.keys() == {name for name in ROWS if get_family(name).gguf is not None}
    assert all(cells >= written >= compared for cells, written, compared, _ in rows.values())
    assert all(written for _, written, *_ in rows.values())


@pytest.mark.parametrize("name", [name for name in ROWS if name != "llama"])
def test_every_family_has_a_test_of_its_own(name):
    test = ROOT / f"tests/interop/families/known/test_{name}.py"
    assert f'MODEL_TYPE = "{name}"' in test.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ROWS)
def test_a_family_says_what_it_is(name):
    family = get_family(name)
    assert family.model_type == name
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] == family.architecture


def test_an_unknown_family_lists_those_that_are_known_and_how_to_add_one():
    with pytest.raises(ConfigError, match=r"deepseek_v2, .*qwen3.*'mamba'.*add-a-family"):
        DecoderConfig.from_hf({"model_type": "mamba"})
