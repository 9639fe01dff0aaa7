"""What every family is held to, against random tiny models of transformers.

A family's test is a file with `MODEL_TYPE`, `CONFIGS` (and `WITHOUT`: sizes that its config does
not have), and a subclass of `FamilyTests`. `make test`
runs the first config through import, logits and export; `make families` all through everything.
"""

import json
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from cairn import CheckpointReader, DecoderForCausalLM, EasyDeLState, Run, parse_uri
from cairn.interop.config.decoder_layers import leaf_shapes
from cairn.interop.weights.export import export_sources
from cairn.interop.weights.peft_names import modules_of
from cairn.state.paths import named_leaves
from tests.state.forward import logits_of
from tests.state.hf_models import tokens, torch_logits

WHOLE = os.environ.get("CAIRN_FAMILIES") == "all"
VOCABULARY, LENGTH = 99, 40
LIMIT = 1e-4
"""Of the largest logit."""

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Those that tempt: heads times their size is not the width, the vocabulary is odd."""


def tiny(model_type, **options):
    """A model of transformers with weights so large that a wrong one shows in the logits."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, attn_implementation="eager", **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for values in (*model.parameters(), *model.buffers()):
            if values.is_floating_point() and values.ndim >= 2:
                values.copy_(torch.randn_like(values) * 0.3)
        for values in model.parameters():
            if values.ndim < 2:
                values.add_(torch.randn_like(values) * 0.3)
        for name, values in model.named_buffers():
            if name.endswith("correction_bias"):
                values.copy_(torch.randn_like(values) * 0.3)
    return model


def options_of(family, name=None):
    """Options of a family's test: of its first config, or of the one with that name."""
    without = getattr(family, "WITHOUT", ())
    sizes = {size: number for size, number in SIZES.items() if size not in without}
    return {**sizes, **family.CONFIGS[name or next(iter(family.CONFIGS))]}


def model_of(family, name=None):
    """The tiny model of a family's test."""
    return tiny(family.MODEL_TYPE, **options_of(family, name))


def tensors_of(folder):
    """Of all its files."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_close(found, expected, mask=None):
    difference = np.abs(np.asarray(found, np.float32) - expected)
    if mask is not None:
        difference = difference[mask.astype(bool)]
    assert difference.max() <= LIMIT * np.abs(expected).max()


def padded():
    """Token ids that are longer than any window, the second row padded at its begin."""
    ids = tokens(2, LENGTH, VOCABULARY)
    mask = np.ones_like(ids)
    mask[1, :7] = 0
    return ids, mask


def with_adapters(folder, pattern=".*", rank=2, alpha=3.0):
    """Ours of a folder, with random adapters on all layers that the pattern matches."""
    model = DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    model.apply_lora_to_layers(rank, alpha, pattern, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    for variable in jax.tree.leaves(
        nnx.state(model, nnx.LoRAParam), is_leaf=lambda node: isinstance(node, nnx.Variable)
    ):
        drawn = 0.2 * random.standard_normal(variable.get_value().shape)
        variable.set_value(jnp.asarray(drawn, jnp.float32))
    return model


def what_peft_takes(config):
    """A pattern of the layers of ours whose adapters have a module in PEFT."""
    kernels = {
        path: shape
        for path, shape in leaf_shapes(config).items()
        if path.endswith("/kernel") and len(shape) == 2
    }
    modules = modules_of(config, kernels, path="x")
    paths = (path for one in modules if one.refusal is None for path in one.kernels)
    return f"^({'|'.join(path.removesuffix('/kernel') for path in paths)})$"


def by_peft(base, adapter):
    """The torch model of a folder with adapters of another, as peft loads them; not a word said."""
    theirs = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        warnings.filterwarnings("ignore", message=".*pattern keys did not match")
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to True but")
        return peft.PeftModel.from_pretrained(theirs, str(adapter)).eval()


def assert_adapters_are_those_of_peft(folder, ours, adapter):
    """Adapters on all layers that PEFT takes, saved and loaded by it, compute what they do here."""
    model = with_adapters(folder, what_peft_takes(ours.config))
    model.save_adapter(adapter)
    ids, mask = padded()
    found, plain = (logits_of(one, ids, attention_mask=mask) for one in (model, ours))
    expected = torch_logits(by_peft(folder, adapter), ids, mask)
    assert_close(found, expected, mask)
    assert np.abs(found - plain).max() > 0.01 * np.abs(plain).max()


class FirstTests:
    """Of the first config always."""

    def test_logits_are_those_of_transformers(self, known):
        theirs, _, ours = known
        ids, mask = padded()
        found = logits_of(ours, ids, attention_mask=mask)
        assert_close(found, torch_logits(theirs, ids, mask), mask)

    def test_the_config_tells_every_leaf(self, known):
        leaves = {named.path: tuple(named.leaf.shape) for named in named_leaves(known[2])}
        assert leaf_shapes(known[2].config) == leaves
        assert all(named.axes is not None for named in named_leaves(known[2]))

    def test_an_export_has_their_tensors_and_loads_without_a_word(self, known, tmp_path):
        theirs, folder, ours = known
        ours.save_pretrained(tmp_path, max_shard_size="20KB")
        expected, found = tensors_of(folder), tensors_of(tmp_path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        again, report = AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True, attn_implementation="eager"
        )
        assert not any(report.values()), report
        ids, mask = padded()
        assert_close(torch_logits(again.eval(), ids, mask), torch_logits(theirs, ids, mask), mask)
        written = json.loads((tmp_path / "config.json").read_text())
        assert (
            DecoderForCausalLM.from_pretrained(tmp_path, auto_shard_model=False).config
            == ours.config
        )
        assert written["model_type"] == theirs.config.model_type


class OtherTests:
    """Of the whole matrix alone."""

    def test_generation_is_greedy_as_theirs(self, known):
        theirs, _, ours = known
        ids, mask = padded()
        given = torch.tensor(ids).long(), torch.tensor(mask).long()
        options = {"max_new_tokens": 12, "do_sample": False}
        with torch.no_grad():
            expected = theirs.generate(given[0], attention_mask=given[1], **options).numpy()
        found = np.asarray(ours.generate(ids, mask, **options).sequences)
        np.testing.assert_array_equal(found[:, : expected.shape[1]], expected)

    def test_adapters_compute_in_peft_what_they_do_here(self, known, tmp_path):
        _, folder, ours = known
        assert_adapters_are_those_of_peft(folder, ours, tmp_path)

    @pytest.mark.parametrize("scan", [False, True])
    def test_eight_devices_and_scanned_layers_compute_the_same(self, known, scan):
        theirs, folder, _ = known
        options = {"scan_layers": scan, "remat": scan}
        ours = DecoderForCausalLM.from_pretrained(
            folder, sharding_axis_dims=(2, 4, 1, 1), config_kwargs=options
        )
        assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(ours.params))
        ids, mask = padded()
        found = logits_of(ours, ids, attention_mask=mask)
        assert_close(found, torch_logits(theirs, ids, mask), mask)

    def test_a_saved_state_loads_and_exports_their_tensors(self, known, tmp_path):
        _, folder, ours = known
        state = EasyDeLState.create(model=ours)
        run = str(tmp_path / "run")
        state.save_state(run).wait()
        run_of = Run.open(parse_uri(run))
        (step,) = run_of.steps()
        again = EasyDeLState.load_state(run)
        for one, two in zip(named_leaves(ours), named_leaves(again.model), strict=True):
            np.testing.assert_array_equal(np.asarray(one.leaf), np.asarray(two.leaf), one.path)
        manifest = run_of.manifest(step)
        reader = CheckpointReader.open(run_of.step_uri(step), manifest)
        sources, _ = export_sources(manifest, reader)
        expected = tensors_of(folder)
        assert {source.name for source in sources} == expected.keys()
        for source in sources:
            flat = np.concatenate([block.reshape(-1) for block in source.blocks(1 << 12)])
            np.testing.assert_array_equal(flat, expected[source.name].numpy().reshape(-1))


class FamilyTests(FirstTests, *([OtherTests] if WHOLE else [])):
    """What a family's test is: its file has `MODEL_TYPE` and `CONFIGS`."""
