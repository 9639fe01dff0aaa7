"""A step that is merged and resumable: adapters to go on with, merged weights to serve."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

from cairn import (
    ArgumentError,
    CheckpointReader,
    DecoderForCausalLM,
    EasyDeLBaseModule,
    EasyDeLState,
    Run,
    RunSaver,
    SavePolicy,
    TrainState,
)
from cairn.interop.conversion.tensor_streams import whole
from cairn.interop.weights.export import export_sources
from cairn.state.paths import named_leaves
from tests.faults.report import is_long
from tests.state.forward import logits_of
from tests.state.my_model import MyModel, my_model
from tests.state.seams import model_streams
from tests.state.states.test_adapted_checkpoints import MESHES, bits, model_bits, state_of, tiny
from tests.tiny import batch, compile_step

KINDS = ("lora", "qlora")


def trained(kind, steps=2, model=None):
    """A state of adapters that are no longer zero, and its step."""
    state = state_of(tiny(kind, model), learning_rate=0.1)
    step = compile_step(state)
    for number in range(steps):
        state, _ = step(state, jnp.asarray(batch(number)))
    return state, step


def merged_model(state):
    return state.merge(state.graphstate).unwrap_lora_to_layers()


def opened(uri, number=None):
    run = Run.open(str(uri))
    info = run.steps()[-1] if number is None else run.step(number)
    return run, info, CheckpointReader.open(run.step_uri(info), run.manifest(info))


def exported(uri):
    run, info, reader = opened(uri)
    sources, config = export_sources(run.manifest(info), reader)
    return {source.name: whole(source) for source in sources}, config


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By kind: the run, what was saved as its step, and the losses and the state two steps on."""
    made = {}
    for kind in KINDS:
        state, step = trained(kind)
        uri = tmp_path_factory.mktemp("merged") / kind
        kept = jax.tree.map(jnp.copy, state)  # the state's own memory is given to the next step
        expected = merged_model(kept)
        state.save_state(uri, merge_lora=True, wait=True, verbose=False)
        losses = []
        for number in (2, 3):
            state, loss = step(state, jnp.asarray(batch(number)))
            losses.append(float(loss))
        made[kind] = (uri, kept, expected, losses, state, step)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_as_if_it_had_never_stopped(saved, kind):
    uri, kept, _, losses, later, step = saved[kind]
    loaded = EasyDeLState.load_state(uri, verbose=False, **MESHES["same"])
    assert loaded.model.lora == kept.model.lora
    for part in ("graphstate", "graphother", "opt_state"):
        assert bits(getattr(loaded, part)) == bits(getattr(kept, part))
    loaded, repeated = loaded.replace(tx=later.tx), []
    for number in (2, 3):
        loaded, loss = step(loaded, jnp.asarray(batch(number)))
        repeated.append(float(loss))
    assert repeated == losses
    assert bits((loaded.graphstate, loaded.opt_state)) == bits((later.graphstate, later.opt_state))
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("kind", "placed"),
    [*itertools.product(KINDS, MESHES)]
    if is_long()
    else [("lora", "same"), ("qlora", "other"), ("lora", "one")],
)
def test_it_is_served_as_the_merged_model(saved, kind, placed):
    uri, kept, expected, *_ = saved[kind]
    options = MESHES[placed] or {"auto_shard_model": False}
    for model in (
        EasyDeLBaseModule.from_pretrained(str(uri), param_dtype=None, **options),
        EasyDeLState.from_pretrained(uri, verbose=False, **MESHES[placed]).model,
    ):
        assert type(model) is DecoderForCausalLM
        assert not model.lora_is_enabled
        assert not model.is_quantized
        assert model_bits(model) == model_bits(expected)
    assert model_bits(expected) != model_bits(tiny())
    ids = jnp.asarray(batch(7))
    served = EasyDeLBaseModule.from_pretrained(str(uri), param_dtype=None)
    np.testing.assert_allclose(logits_of(served, ids), logits_of(kept.model, ids), atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_exported_as_the_merged_model(saved, kind, tmp_path):
    uri, _, expected, *_ = saved[kind]
    tensors, config = exported(uri)
    _, sources = model_streams(expected)
    assert tensors.keys() == {source.name for source in sources}
    for source in sources:
        np.testing.assert_array_equal(tensors[source.name], whole(source))
    expected.save_pretrained(tmp_path)
    again = DecoderForCausalLM.from_pretrained(tmp_path, auto_shard_model=False)
    assert config["model_type"] == again.config.model_type == "llama"


def test_plain_orbax_reads_each_of_the_two(saved):
    uri, _, expected, *_ = saved["lora"]
    run, info, _ = opened(uri)
    with pytest.warns(UserWarning, match="Sharding info not provided"):
        found = ocp.load(run.step_uri(info).local_path, checkpointable_name="merged")
    for path, (_, _, data) in model_bits(expected).items():
        leaf = found
        for key in path.split("/"):
            leaf = leaf[key]
        assert np.asarray(leaf).tobytes() == data
    adapters = set(ocp.metadata(run.step_uri(info).local_path, "model").metadata)
    assert adapters == {"model"}
    assert sorted(run.manifest(info).items) == ["merged", "meta", "model", "optimizer"]


def test_what_stays_the_same_is_written_once_and_linked_into_later_steps(tmp_path):
    state, step = trained("lora")
    untouched = {
        path
        for path in model_bits(merged_model(state))
        if "q_proj" not in path and "down" not in path
    }
    for number in (2, 3):
        state.save_state(tmp_path / "run", merge_lora=True, wait=True, verbose=False)
        state, _ = step(state, jnp.asarray(batch(number)))
    run, info, _ = opened(tmp_path / "run")
    shared = run.contents(info).shared_files
    names = [name for files in shared for name in files.files]
    assert {name.split("/")[0] for name in names} >= {"model", "merged"}
    first, second = (CheckpointReader.open(run.step_uri(i), run.manifest(i)) for i in run.steps())
    for path in untouched:
        np.testing.assert_array_equal(first.read("merged", path), second.read("merged", path))
    path = "model/layers/0/self_attn/q_proj/kernel"
    assert (first.read("merged", path) != second.read("merged", path)).any()


def test_floating_weights_are_cast_in_both_forms(tmp_path):
    state, _ = trained("lora")
    state.save_state(
        tmp_path / "run", float_dtype="bfloat16", merge_lora=True, wait=True, verbose=False
    )
    merged = EasyDeLBaseModule.from_pretrained(
        str(tmp_path / "run"), auto_shard_model=False, param_dtype=None
    )
    expected = merged_model(state).to_dtype("bfloat16")
    assert bits(nnx.state(merged)) == bits(nnx.state(expected))
    resumed = EasyDeLState.load_state(tmp_path / "run", verbose=False)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(resumed.graphstate)} == {"bfloat16"}


def test_a_served_model_is_quantized_while_it_is_loaded(saved):
    uri = saved["lora"][0]
    options = {"auto_shard_model": False, "param_dtype": None}
    found = EasyDeLBaseModule.from_pretrained(
        str(uri), quantization_method="nf4", quantization_block_size=16, **options
    )
    whole = EasyDeLBaseModule.from_pretrained(str(uri), **options).quantize("nf4", 16)
    assert model_bits(found) == model_bits(whole)


def test_a_users_own_model_is_merged_and_resumable_too(tmp_path):
    state = state_of(my_model().apply_lora_to_layers(4, 8.0, "layers"))
    state = state.replace(graphstate=jax.tree.map(lambda leaf: leaf + 0.1, state.graphstate))
    state.save_state(tmp_path / "run", merge_lora=True, wait=True, verbose=False)
    served = MyModel.from_pretrained(str(tmp_path / "run"), param_dtype=None)
    assert model_bits(served) == model_bits(merged_model(state))
    tensors, _ = exported(tmp_path / "run")
    assert "layers.0.kernel" in tensors
    assert not any("lora" in name for name in tensors)


def test_steps_with_and_without_it_may_follow_each_other(tmp_path):
    state, step = trained("lora")
    state.save_state(tmp_path / "run", wait=True, verbose=False)
    before, _ = exported(tmp_path / "run")
    state, _ = step(state, jnp.asarray(batch(2)))
    with RunSaver(
        tmp_path / "run", SavePolicy(every_steps=1), save_options={"merge_lora": True}
    ) as saver:
        saver.step(state)
    assert exported(tmp_path / "run")[0].keys() == before.keys()
    state, _ = step(state, jnp.asarray(batch(3)))
    state.save_state(tmp_path / "run", wait=True, verbose=False)
    assert EasyDeLBaseModule.from_pretrained(str(tmp_path / "run")).lora_is_enabled
    second = f"{tmp_path / 'run'}/steps/3"
    assert not EasyDeLBaseModule.from_pretrained(second).lora_is_enabled


def test_what_can_not_be_merged_is_refused_before_anything_is_written(tmp_path):
    plain = state_of(tiny())
    with pytest.raises(
        ArgumentError, match="merge_lora: expected a model with adapters; found a D"
    ):
        plain.save_state(tmp_path / "run", merge_lora=True, verbose=False)
    tied = my_model().apply_lora_to_layers(4, 8.0, "layers")
    tied.layers[0].kernel = tied.layers[1].kernel
    with pytest.raises(ArgumentError, match="beside a kernel that other layers have"):
        state_of(tied).save_state(tmp_path / "run", merge_lora=True, verbose=False)
    with pytest.raises(ArgumentError, match="merge_lora: expected True or False; found 'yes'"):
        state_of(tiny("lora")).save_state(tmp_path / "run", merge_lora="yes", verbose=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("make", "options", "found"),
    [
        (lambda: state_of(tiny()), {"merge_lora": True}, "merge_lora: .*; found a DecoderFor"),
        (lambda: state_of(tiny()), {"merge_lroa": True}, "'merge_lroa'"),
        (
            lambda: TrainState.create(params={"w": jnp.ones(2)}),
            {"merge_lora": True},
            "save_options: expected arguments of TrainState.save_state; found an .*'merge_lora'",
        ),
    ],
)
def test_an_option_that_no_save_will_take_is_told_at_the_first_step(tmp_path, make, options, found):
    policy, state = SavePolicy(every_steps=100), make()
    with (
        RunSaver(tmp_path / "run", policy, save_options=options) as saver,
        pytest.raises(ArgumentError, match=found),
    ):
        saver.step(state, step=1)


def test_a_save_leaves_the_state_and_its_model_as_they_were(tmp_path):
    state, _ = trained("qlora")
    before = bits((state.graphstate, state.graphother, state.opt_state))
    model = state.model
    state.save_state(tmp_path / "run", merge_lora=True, wait=True, verbose=False)
    assert bits((state.graphstate, state.graphother, state.opt_state)) == before
    assert state.model is model
    assert model.lora_is_enabled
    assert model.is_quantized
    skipped = state.save_state(
        tmp_path / "run", merge_lora=True, enable=False, overwrite=True, verbose=False
    )
    assert skipped.done
    assert named_leaves(nnx.state(model))
