"""Adapters of every family in PEFT itself, of its first config.

`make proofs` runs this, `make families` the same of all configs. `make test` has the families whose
layers are fused, turned or latent.
"""

import importlib

import pytest

from cairn import DecoderForCausalLM
from cairn.interop import registry
from tests.interop.families.matrix import assert_adapters_are_those_of_peft, model_of


@pytest.mark.parametrize("model_type", registry.known_families())
def test_adapters_compute_in_peft_what_they_do_here(model_type, tmp_path):
    family = importlib.import_module(f"tests.interop.families.known.test_{model_type}")
    model_of(family).save_pretrained(tmp_path / "theirs")
    ours = DecoderForCausalLM.from_pretrained(tmp_path / "theirs", auto_shard_model=False)
    assert_adapters_are_those_of_peft(tmp_path / "theirs", ours, tmp_path / "adapter")
