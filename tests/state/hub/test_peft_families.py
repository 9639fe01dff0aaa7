"""Adapters of families whose layers are fused, turned or latent, beside peft itself."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from transformers import AutoModelForCausalLM

from cairn import (
    CheckpointReader,
    ConversionError,
    DecoderForCausalLM,
    open_files,
    plan_shards,
    resolve_checkpoint,
    write_shard,
)
from cairn.interop.conversion.tensor_streams import whole
from cairn.interop.weights.export import adapter_sources, export_sources
from cairn.state.paths import named_leaves
from tests.interop.families.known import (
    test_deepseek_v3,
    test_falcon,
    test_glm4,
    test_gpt_neox,
    test_gpt_oss,
    test_qwen2_moe,
)
from tests.interop.families.matrix import (
    WHOLE,
    assert_close,
    by_peft,
    model_of,
    padded,
    tensors_of,
    what_peft_takes,
    with_adapters,
)
from tests.state.forward import logits_of
from tests.state.hf_models import torch_logits

FAMILIES = [test_falcon, test_deepseek_v3, *([test_glm4, test_gpt_neox] if WHOLE else [])]
"""Fused layers and latent ones; in `make families` those that are turned too."""


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.MODEL_TYPE)
def adapted(request, tmp_path_factory):
    """Their folder; ours with adapters on all that peft takes; its logits; and the stored step."""
    root = tmp_path_factory.mktemp("adapted")
    model_of(request.param).save_pretrained(root / "base")
    config = DecoderForCausalLM.from_pretrained(root / "base", auto_shard_model=False).config
    model = with_adapters(root / "base", what_peft_takes(config))
    model.to_state().save_state(root / "run", step=0).wait()
    run, step = resolve_checkpoint(str(root / "run"))
    stored = run.manifest(step), CheckpointReader.open(run.step_uri(step), run.manifest(step))
    ids, mask = padded()
    return root / "base", model, logits_of(model, ids, attention_mask=mask), stored


def write(folder, sources, config, name):
    files = open_files(folder)
    for shard in plan_shards(sources, "1GB"):
        write_shard(files, shard.file_name, shard)
    (folder / name).write_text(json.dumps(config))


def adapters(model):
    leaves = named_leaves(nnx.state(model, nnx.LoRAParam))
    return {named.path: np.asarray(named.leaf) for named in leaves}


def test_a_kept_adapter_computes_in_peft_what_it_does_here_and_comes_back(adapted, tmp_path):
    base, model, logits, stored = adapted
    sources, config = adapter_sources(*stored)
    write(tmp_path, sources, config, "adapter_config.json")
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    ids, mask = padded()
    assert_close(logits, torch_logits(by_peft(base, tmp_path), ids, mask), mask)
    model.save_adapter(tmp_path / "saved")
    found, expected = tensors_of(tmp_path / "saved"), {one.name: whole(one) for one in sources}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), array, err_msg=name)
    again = DecoderForCausalLM.from_pretrained(base, auto_shard_model=False).load_adapter(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, adapters(again), adapters(model))


def test_a_merged_export_computes_the_same(adapted, tmp_path):
    _, _, logits, stored = adapted
    write(tmp_path, *export_sources(*stored), "config.json")
    ids, mask = padded()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert_close(logits, torch_logits(theirs, ids, mask), mask)


@pytest.mark.parametrize(
    ("family", "layers", "problem"),
    [
        (
            test_deepseek_v3,
            "layers/1/mlp/shared/up_proj",
            "model.layers.1.mlp.shared_experts.up_proj: peft takes this name for the experts'",
        ),
        (test_qwen2_moe, "layers/1/mlp/router", "model.layers.1.mlp.gate: a router"),
        (test_gpt_oss, "layers/1/mlp/router", "model.layers.1.mlp.router: a router"),
    ],
    ids=lambda value: getattr(value, "MODEL_TYPE", ""),
)
def test_what_peft_would_leave_out_without_a_word_is_refused(family, layers, problem, tmp_path):
    model_of(family).save_pretrained(tmp_path / "base")
    model = with_adapters(tmp_path / "base", f"q_.*proj|{layers}")
    with pytest.raises(ConversionError, match="leave these layers out by lora_pattern") as caught:
        model.save_adapter(tmp_path / "adapter")
    (told,) = caught.value.problems
    assert told.startswith(problem)
    assert not (tmp_path / "adapter").exists()
