"""What users get wrong with a model: one clear error each, and nothing changed."""

import jax.numpy as jnp
import numpy as np
import pytest

from cairn import ArgumentError, EasyDeLState
from tests.bad_input.refusals import refused
from tests.contract.subjects import DECODER, make_decoder
from tests.state.my_model import batch, my_model

SMALL = DECODER.replace(num_hidden_layers=1)


@pytest.fixture(scope="module")
def decoder():
    return make_decoder(SMALL)


# -- dtypes, quantization, adapters ------------------------------------------------------------


@pytest.mark.parametrize("argument", ["dtype", "param_dtype"])
@pytest.mark.parametrize("found", ["float33", "int32"])
def test_a_dtype_that_does_not_exist_or_is_no_float_is_refused(state, run, argument, found):
    refused(
        state,
        lambda: EasyDeLState.load_state(run, verbose=False, **{argument: found}),
        ArgumentError,
        f"{argument}: expected a floating dtype",
        found,
    )


@pytest.mark.parametrize("found", ["float33", "int32"])
def test_a_dtype_that_does_not_exist_changes_no_module_and_saves_nothing(state, tmp_path, found):
    model = my_model()
    refused(model, lambda: model.to_dtype(found), ArgumentError, "expected a floating dtype", found)
    assert model.param_dtype == jnp.float32
    refused(
        state,
        lambda: state.save_state(tmp_path / "run", float_dtype=found, verbose=False),
        ArgumentError,
        "float_dtype: expected a floating dtype",
        found,
    )
    assert not (tmp_path / "run").exists()
    for argument in ("dtype", "param_dtype"):
        refused(
            state,
            lambda argument=argument: my_model(**{argument: found}),
            ArgumentError,
            f"{argument}: expected a floating dtype",
            found,
        )


def test_a_precision_that_does_not_exist_is_refused(state, run):
    refused(
        state,
        lambda: EasyDeLState.load_state(run, verbose=False, precision="zzz"),
        ArgumentError,
        "precision: expected None, 'default', 'high', 'highest'",
        "'zzz'",
    )
    assert EasyDeLState.load_state(run, precision="highest", verbose=False).model.precision


def test_quantizing_twice_is_refused():
    model = make_decoder(SMALL).quantize("nf4")
    for method in ("nf4", "8bit"):
        refused(
            model,
            lambda method=method: model.quantize(method),
            ArgumentError,
            "expected",
            "found",
            "nf4",
        )


def test_a_quantization_that_does_not_exist_is_refused(decoder):
    refused(decoder, lambda: decoder.quantize("gptq"), ArgumentError, "'nf4'", "found 'gptq'")
    assert not decoder.is_quantized


@pytest.mark.parametrize(
    "adapt",
    [
        lambda model: model.apply_lora_to_layers(4, 8, "no_such_layer"),
        lambda model: model.quantize("nf4", quantization_pattern="no_such_layer"),
    ],
    ids=["lora", "quantize"],
)
def test_a_pattern_that_matches_nothing_is_refused(decoder, adapt):
    refused(decoder, lambda: adapt(decoder), ArgumentError, "pattern", "no_such_layer", "q_proj")
    assert not decoder.is_quantized
    assert not decoder.lora_is_enabled


def test_adapters_of_no_rank_or_scale_are_refused(decoder):
    for rank, alpha in ((0, 8), (4, 0), (4, float("nan"))):
        refused(
            decoder,
            lambda rank=rank, alpha=alpha: decoder.apply_lora_to_layers(rank, alpha, "q_proj"),
            ArgumentError,
            "lora_",
            "expected",
            "found",
        )


# -- generation --------------------------------------------------------------------------------


def test_generating_past_the_maximum_length_is_refused(decoder):
    refused(
        decoder,
        lambda: decoder.generate(batch(1, 60), max_new_tokens=5),
        ArgumentError,
        "max_new_tokens: expected",
        "64",
        "found 60 + 5 = 65",
    )
    out = decoder.generate(np.asarray(batch(1, 60)), max_new_tokens=4, eos_token_id=())
    assert out.sequences.shape == (1, 64)
