"""EasyDeLBaseModule: low-rank adapters, from putting them on to merging them in."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cairn import ArgumentError, EasyDeLState
from tests.contract.subjects import SGD, assert_same_bits, host, make_decoder
from tests.state.forward import logits_of
from tests.state.my_model import batch, my_model

PATTERN = "q_proj|v_proj"


def adapted(lora_rank=4, lora_alpha=8, lora_pattern=PATTERN):
    """A decoder whose adapters are not zero, so that they change the outputs."""
    model = make_decoder().apply_lora_to_layers(
        lora_rank=lora_rank, lora_alpha=lora_alpha, lora_pattern=lora_pattern
    )
    filled(model)
    return model


def filled(model):
    state = nnx.state(model, nnx.LoRAParam)
    key = jax.random.key(1)
    nnx.update(model, jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape) * 0.1, state))


def logits(model):
    return logits_of(model, batch(2, 8))


def layers(state):
    return {path.rsplit("/", 1)[0] for path in host(state)}


@pytest.fixture(scope="module")
def model():
    return adapted()


def test_apply_lora_to_layers_changes_no_output_at_first():
    model = make_decoder()
    before = logits(model)
    assert model.apply_lora_to_layers(4, 8, PATTERN) is model
    np.testing.assert_array_equal(logits(model), before)
    assert model.lora_is_enabled


@pytest.mark.parametrize("lora_rank", [2, 4])
def test_lora_rank_is_the_inner_size(lora_rank):
    state = nnx.state(adapted(lora_rank=lora_rank), nnx.LoRAParam)
    for path, leaf in host(state).items():
        assert leaf.shape[1 if path.endswith("_a") else 0] == lora_rank, path


def test_lora_alpha_scales_by_alpha_over_rank():
    base = first_projection(make_decoder())
    changes = {}
    for alpha in (4, 8):
        changes[alpha] = first_projection(adapted(lora_rank=4, lora_alpha=alpha)) - base
    assert np.abs(changes[4]).max() > 1e-3
    np.testing.assert_allclose(changes[8], 2 * changes[4], rtol=1e-3, atol=1e-5)


def first_projection(model):
    """What the first q_proj gives for fixed inputs."""
    modules = dict(nnx.iter_modules(model))
    path = min((path for path in modules if path and path[-1] == "q_proj"), key=str)
    return np.asarray(modules[path](jnp.ones((1, 2, 64))))


def test_lora_pattern_chooses_the_layers(model):
    found = {path.rsplit("/", 1)[-1] for path in layers(nnx.state(model, nnx.LoRAParam))}
    assert found == {"q_proj", "v_proj"}
    with pytest.raises(ArgumentError, match="no_such_layer"):
        make_decoder().apply_lora_to_layers(4, 8, lora_pattern="no_such_layer")


def test_split_lora_params_gives_base_and_lora(model):
    base, lora = model.split_lora_params()
    assert set(host(lora)) == set(host(nnx.state(model, nnx.LoRAParam)))
    assert not any("lora" in path for path in host(base))
    assert_same_bits(base, nnx.state(make_decoder(), nnx.Param))


def test_merge_lora_params_puts_adapters_back():
    model = adapted()
    wanted = logits(model)
    _, lora = model.split_lora_params()
    lora = jax.tree.map(jnp.copy, lora)
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.LoRAParam)))
    assert (logits(model) != wanted).any()
    assert model.merge_lora_params(lora) is model
    np.testing.assert_array_equal(logits(model), wanted)


def test_unwrap_lora_to_layers_equals_the_adapted_output_without_adapters():
    model = adapted()
    wanted = logits(model)
    assert model.unwrap_lora_to_layers() is model
    assert not model.lora_is_enabled
    assert not host(nnx.state(model, nnx.LoRAParam))
    np.testing.assert_allclose(logits(model), wanted, rtol=1e-4, atol=1e-5)
    assert set(host(nnx.state(model))) == set(host(nnx.state(make_decoder())))


def test_only_adapters_are_trained():
    model = adapted()
    state = EasyDeLState.create(model=model, tx=SGD, init_opt_state=True)
    grads = jax.tree.map(jnp.ones_like, state.graphstate)
    after = state.apply_gradients(grads=grads)
    assert_same_bits(after.graphother, state.graphother)
    before = host(state.graphstate)
    for path, leaf in host(after.graphstate).items():
        assert (leaf != before[path]).all(), path


def test_a_users_own_model_takes_adapters_too():
    model = my_model().apply_lora_to_layers(4, 8, "layers/0")
    assert layers(nnx.state(model, nnx.LoRAParam)) == {"layers/0"}


def test_peft_loads_the_adapters_that_we_export(tmp_path):
    import peft
    import torch
    import transformers

    model = make_decoder()
    model.save_pretrained(tmp_path / "base")
    model.apply_lora_to_layers(4, 8, PATTERN)
    filled(model)
    model.save_adapter(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        found = theirs(torch.tensor(np.asarray(batch(2, 8))).long()).logits.numpy()
    ours = logits(model)
    assert np.abs(found - ours).max() <= 1e-4 * np.abs(ours).max()
