"""Adapters go to `peft` and come back; held against peft itself."""

import json
import shutil
import warnings

import jax
import ml_dtypes
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file

from cairn import ArgumentError, ConversionError, DecoderForCausalLM, NotFoundError
from cairn.interop.conversion.ops import (
    RENAME,
    TRANSPOSE,
    Chain,
    Split,
    Stack,
)
from cairn.interop.conversion.rules import Rule
from cairn.interop.weights.peft_config import PeftConfig
from cairn.state.paths import named_leaves
from tests.interop.seams import modules_of_rules, target_modules
from tests.state.forward import logits_of
from tests.state.hf_models import save, tiny_llama, tokens, torch_logits
from tests.state.my_model import my_model

PATTERNS = {
    "q_proj|down_proj": ["down_proj", "q_proj"],
    r"layers/1/self_attn/[qv]_proj": [
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
    ],
    "mlp|lm_head": ["down_proj", "gate_proj", "lm_head", "up_proj"],
}


@pytest.fixture(scope="module")
def torch_model():
    return tiny_llama()


@pytest.fixture(scope="module")
def folder(torch_model, tmp_path_factory):
    return save(torch_model, tmp_path_factory.mktemp("base"))


def loaded(folder, **options):
    return DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False, **options)


def adapted(
    folder, rank=4, alpha=6.0, pattern="q_proj|down_proj", seed=0, lora_dtype="float32", **options
):
    """A model whose adapters do something: B is random too."""
    model = loaded(folder, **options)
    model.apply_lora_to_layers(rank, alpha, pattern, rngs=nnx.Rngs(seed), lora_dtype=lora_dtype)
    fill_random(model, seed)
    return model


def fill_random(model, seed=0):
    random = np.random.default_rng(seed)
    tree = nnx.state(model, nnx.LoRAParam)
    drawn = jax.tree.map(
        lambda leaf: jax.device_put(
            (0.2 * random.standard_normal(leaf.shape)).astype(leaf.dtype), leaf.sharding
        ),
        tree,
    )
    nnx.update(model, drawn)


def adapters(model):
    leaves = named_leaves(nnx.state(model, nnx.LoRAParam))
    return {named.path: np.asarray(named.leaf) for named in leaves}


def assert_same_adapters(one, two):
    ones, twos = adapters(one), adapters(two)
    assert ones.keys() == twos.keys()
    for path, array in ones.items():
        assert array.dtype == twos[path].dtype
        np.testing.assert_array_equal(array, twos[path], err_msg=path)


def assert_close(found, expected):
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def by_peft(folder, adapter):
    """The transformers model with an adapter, as peft loads them."""
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        return peft.PeftModel.from_pretrained(base, str(adapter)).eval()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_peft_loads_what_we_save_and_computes_our_logits(folder, torch_model, tmp_path, pattern):
    model = adapted(folder, pattern=pattern)
    ids = tokens(2, 12)
    ours = logits_of(model, ids)
    assert np.abs(ours - torch_logits(torch_model, ids)).max() > 0.05 * np.abs(ours).max()
    written = model.save_adapter(tmp_path, base_model_name_or_path=str(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == PATTERNS[pattern]
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    assert config["base_model_name_or_path"] == str(folder)
    assert None not in config.values()
    theirs = by_peft(folder, tmp_path)
    assert_close(ours, torch_logits(theirs, ids))
    layers = {name for name, _ in theirs.named_modules() if name.endswith(".lora_A.default")}
    assert len(layers) == len(adapters(model)) // 2


def test_auto_peft_model_finds_the_base_by_the_config(folder, tmp_path):
    model = adapted(folder)
    model.save_adapter(tmp_path, base_model_name_or_path=str(folder))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        theirs = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path)).eval()
    ids = tokens(1, 7)
    assert_close(logits_of(model, ids), torch_logits(theirs, ids))


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["plain", "rslora"])
def test_adapters_that_peft_wrote_are_read_bit_for_bit(folder, tmp_path, options):
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        theirs = peft.get_peft_model(
            base,
            peft.LoraConfig(
                r=3,
                lora_alpha=5,
                target_modules=["v_proj", "gate_proj"],
                task_type="CAUSAL_LM",
                init_lora_weights=False,
                **options,
            ),
        ).eval()
    theirs.save_pretrained(tmp_path)
    model = loaded(folder).load_adapter(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    for path, array in adapters(model).items():
        layer, _, letter = path.partition("/kernel_lora_")
        name = f"base_model.model.{layer.replace('/', '.')}.lora_{letter.upper()}.weight"
        np.testing.assert_array_equal(array, stored.pop(name).T, err_msg=path)
    assert not stored
    assert model.lora.rank == 3
    assert model.lora.pattern == (
        r"^(?:model/layers/\d+/mlp/gate_proj|model/layers/\d+/self_attn/v_proj)$"
    )
    ids = tokens(2, 9)
    assert_close(logits_of(model, ids), torch_logits(theirs, ids))


def test_an_adapter_of_some_layers_only_comes_back_to_these(folder, tmp_path):
    model = adapted(folder, pattern="layers/1/mlp/up_proj")
    model.save_adapter(tmp_path)
    again = loaded(folder).load_adapter(tmp_path)
    assert_same_adapters(again, model)
    assert again.lora.pattern == "^(?:model/layers/1/mlp/up_proj)$"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_come_back_onto_a_sharded_and_a_quantized_base(folder, tmp_path, dtype):
    model = adapted(folder, param_dtype="bfloat16", lora_dtype=dtype)
    model.save_adapter(tmp_path)
    assert {a.dtype.name for a in load_file(tmp_path / "adapter_model.safetensors").values()} == {
        dtype
    }
    sharded = DecoderForCausalLM.from_pretrained(folder, sharding_axis_dims=(1, 4, 2, 1))
    sharded.load_adapter(tmp_path)
    assert_same_adapters(sharded, model)
    assert len({leaf.sharding.mesh for leaf in jax.tree.leaves(sharded.params)}) == 1
    quantized = loaded(folder, quantization_method="nf4", quantization_block_size=16)
    quantized.load_adapter(tmp_path)
    assert quantized.is_quantized
    assert quantized.lora.dtype == dtype
    assert_same_adapters(quantized, model)
    quantized.save_adapter(tmp_path / "again")
    assert_same_adapters(loaded(folder).load_adapter(tmp_path / "again"), model)


def test_adapters_that_fit_replace_those_that_the_model_has(folder, tmp_path):
    model = adapted(folder, seed=1)
    model.save_adapter(tmp_path)
    other = adapted(folder, seed=2)
    assert_same_adapters(other.load_adapter(tmp_path), model)
    smaller = adapted(folder, rank=2)
    before = adapters(smaller)
    with pytest.raises(ArgumentError, match=r"rank=2.*found rank 4.*unwrap_lora_to_layers"):
        smaller.load_adapter(tmp_path)
    np.testing.assert_equal(adapters(smaller), before)


def test_adapters_in_a_store_serve_both_ways(folder, gcs):
    model = adapted(folder)
    uri = f"{gcs.bucket_uri}/adapters/tiny"
    model.save_adapter(uri)
    assert_same_adapters(loaded(folder).load_adapter(uri), model)


def test_a_model_without_adapters_or_of_no_family_is_refused(folder, tmp_path):
    with pytest.raises(ArgumentError, match="that has none; call apply_lora_to_layers"):
        loaded(folder).save_adapter(tmp_path)
    own = my_model().apply_lora_to_layers(2)
    with pytest.raises(ConversionError, match=r"known family.*save_state"):
        own.save_adapter(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def saved_adapter(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter")
    adapted(folder).save_adapter(path)
    return path


def changed_config(tmp_path, **changes):
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"use_never_seen": True}, "use_never_seen=True, which is unknown"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"r": 0}, "rank 0"),
        ({"lora_alpha": None}, "alpha None"),
        ({"rank_pattern": 3}, "no objects"),
        ({"rank_pattern": {"q_proj": 2}}, r"shape of .*q_proj.lora_A.weight: expected \(2, 32\)"),
        ({"alpha_pattern": {"q_proj": 9}}, r"rank 4, scale 2.25: model.layers.0.self_attn.q_proj"),
    ],
)
def test_an_adapter_that_is_more_than_plain_lora_is_refused(
    folder, saved_adapter, tmp_path, changes, message
):
    shutil.copytree(saved_adapter, tmp_path, dirs_exist_ok=True)
    changed_config(tmp_path, **changes)
    model = loaded(folder)
    with pytest.raises(ConversionError, match=message):
        model.load_adapter(tmp_path)
    assert not model.lora_is_enabled


def test_tensors_that_do_not_fit_are_all_listed(folder, tmp_path):
    adapted(folder).save_adapter(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    first = "base_model.model.model.layers.0.self_attn.q_proj"
    del tensors[f"{first}.lora_B.weight"]
    tensors[f"{first}.lora_magnitude_vector"] = np.zeros(3, np.float32)
    tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"] = np.zeros(
        (4, 5), np.float32
    )
    save_file(tensors, file)
    with pytest.raises(ConversionError) as caught:
        loaded(folder).load_adapter(tmp_path)
    assert len(caught.value.problems) == 3
    for text in ("missing tensor: ", "unexpected tensor: ", "expected (4, 48), found (4, 5)"):
        assert text in str(caught.value)


def test_weights_that_peft_saved_beside_adapters_are_read_over_if_they_are_the_models(
    folder, tmp_path
):
    from transformers import LlamaForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(
            LlamaForCausalLM.from_pretrained(folder),
            peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False),
        ).eval()
        theirs.save_pretrained(tmp_path / "with")
        theirs.save_pretrained(tmp_path / "without", save_embedding_layers=False)
    ids = tokens(2, 9)
    for name in ("with", "without"):
        model = loaded(folder).load_adapter(tmp_path / name)
        assert_close(logits_of(model, ids), torch_logits(theirs, ids))
    file = tmp_path / "with" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.base_layer.weight"][0, 0] += 1
    save_file(tensors, file)
    with pytest.raises(ConversionError, match="save_embedding_layers=False") as caught:
        loaded(folder).load_adapter(tmp_path / "with")
    assert caught.value.problems == ("lm_head: other numbers, or another shape",)
    quantized = loaded(folder, quantization_method="8bit", quantization_block_size=-1)
    with pytest.raises(ConversionError, match="lm_head: quantized here"):
        quantized.load_adapter(tmp_path / "with")


def test_pickled_adapters_are_never_read(folder, tmp_path):
    adapted(folder).save_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(NotFoundError, match="pickled adapters are never read"):
        loaded(folder).load_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConversionError, match="JSON"):
        loaded(folder).load_adapter(tmp_path)


def test_exports_of_adapted_models_say_what_to_do(folder, tmp_path):
    model = adapted(folder)
    for export in (model.to_torch, model.to_pytorch, lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(ConversionError, match=r"save_adapter\(\).*unwrap_lora_to_layers\(\)"):
            export()
    expected = logits_of(model, tokens(1, 8))
    theirs = model.unwrap_lora_to_layers().to_pytorch()
    assert_close(torch_logits(theirs, tokens(1, 8)), expected)


def test_a_quantized_model_is_exported_as_what_it_stands_for_in_a_stated_dtype(folder, tmp_path):
    model = loaded(folder, quantization_method="nf4", quantization_block_size=16)
    for export in (model.to_torch, model.to_pytorch, lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(ConversionError, match="float_dtype"):
            export()
    assert not list(tmp_path.iterdir())
    theirs = model.to_pytorch(float_dtype="float32")
    ids = tokens(1, 8)
    assert_close(logits_of(model, ids), torch_logits(theirs, ids))
    model.save_pretrained(tmp_path, float_dtype="bfloat16")
    stored = load_file(tmp_path / "model.safetensors")
    assert {array.dtype.name for array in stored.values()} == {"bfloat16"}
    tensors = model.to_torch(float_dtype="bfloat16")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert model.is_quantized


def test_a_state_exports_its_own_weights_whatever_became_of_its_model(folder):
    state = loaded(folder, quantization_method="nf4", quantization_block_size=16).to_state()
    expected = logits_of(state.model, tokens(1, 8))
    state.model.dequantize().half()
    with pytest.raises(ConversionError, match="float_dtype"):
        state.to_torch()
    assert {tensor.dtype for tensor in state.to_torch(float_dtype="bfloat16").values()} == {
        torch.bfloat16
    }
    assert_close(torch_logits(state.to_pytorch(float_dtype="float32"), tokens(1, 8)), expected)


# -- modules that join kernels, by rules alone --------------------------------------------------

FUSED = Rule(("l/q/kernel", "l/k/kernel"), ("l.qk.weight",), Chain((Split((6, 4)), TRANSPOSE)))


def pair(rank, inputs, outputs, seed):
    random = np.random.default_rng(seed)
    return (
        random.standard_normal((inputs, rank), dtype=np.float32),
        random.standard_normal((rank, outputs), dtype=np.float32),
    )


@pytest.fixture
def fused():
    (module,) = modules_of_rules([FUSED], {"l/q/kernel": (5, 6), "l/k/kernel": (5, 4)})
    assert (module.name, module.inputs, module.outputs) == ("l.qk", 5, 10)
    assert not module.inputs_first
    return module


def test_adapters_of_joined_kernels_become_one_of_larger_rank_and_come_apart(fused):
    pairs = [pair(2, 5, 6, 0), pair(2, 5, 4, 1)]
    down, up = fused.to_peft(pairs)
    assert (down.shape, up.shape) == ((4, 5), (10, 4))
    expected = np.concatenate([(a @ b).T for a, b in pairs])
    np.testing.assert_allclose(up @ down, expected, rtol=1e-6)
    again = fused.from_peft(down, up, 2)
    for (a, b), (found_a, found_b) in zip(pairs, again, strict=True):
        np.testing.assert_array_equal(found_a, a)
        np.testing.assert_array_equal(found_b, b)


def test_one_adapter_of_joined_kernels_is_shared_and_stays_one(fused):
    down, up = np.float32(pair(3, 5, 10, 0)[0].T), np.float32(pair(3, 5, 10, 0)[1].T)
    pairs = fused.from_peft(down, up, 3)
    for (a, b), rows in zip(pairs, (slice(0, 6), slice(6, 10)), strict=True):
        np.testing.assert_array_equal(a, down.T)
        np.testing.assert_array_equal(b, up[rows].T)
    again = fused.to_peft(pairs)
    np.testing.assert_array_equal(again[0], down)
    np.testing.assert_array_equal(again[1], up)


def test_a_joined_kernel_without_adapters_gets_nothing(fused):
    down, up = fused.to_peft([None, pair(2, 5, 4, 1)])
    np.testing.assert_array_equal((up @ down)[:6], 0)
    a, b = pair(2, 5, 4, 1)
    np.testing.assert_allclose((up @ down)[6:], (a @ b).T, rtol=1e-6)


def test_adapters_of_several_dtypes_lose_nothing_where_they_are_joined(fused):
    a, b = pair(2, 5, 6, 0)
    halves = a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)
    whole = pair(2, 5, 4, 1)
    down, up = fused.to_peft([halves, whole])
    assert (down.dtype, up.dtype) == (np.float32, np.float32)
    np.testing.assert_array_equal(down[2:].T, whole[0])
    np.testing.assert_array_equal(up[6:, 2:].T, whole[1])


def test_weights_that_lie_as_ours_do_are_adapted_too():
    rule = Rule.one("l/c/kernel", "l.c.weight", RENAME)
    (module,) = modules_of_rules([rule], {"l/c/kernel": (5, 7)})
    assert module.inputs_first
    a, b = pair(2, 5, 7, 0)
    down, up = module.to_peft([(a, b)])
    assert (down.shape, up.shape) == ((2, 5), (7, 2))
    ((found_a, found_b),) = module.from_peft(down, up, 2)
    np.testing.assert_array_equal(found_a, a)
    np.testing.assert_array_equal(found_b, b)


def test_stacked_experts_are_no_modules():
    stacked = Rule(("l/e/kernel",), ("l.0.weight", "l.1.weight"), Stack(2))
    assert modules_of_rules([stacked], {"l/e/kernel": (2, 5, 7)}) == []


def test_target_modules_are_short_only_where_that_is_exact():
    assert target_modules(["a.0.q", "a.1.q", "a.0.k"], ["a.1.k"]) == ["a.0.k", "q"]


def test_the_scale_of_a_module_is_looked_up_as_peft_does():
    config = PeftConfig(4, 8.0, alpha_pattern={r"0\.q": 2.0})
    assert config.scale("a.0.q", 4) == 0.5
    assert config.scale("a.10.q", 4) == 2.0
    assert PeftConfig(4, 8.0, True).scale("a", 4) == 4.0
