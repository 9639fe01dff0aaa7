"""Quantized models and models with adapters are saved, loaded and trained on like any other."""

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
    TreeMismatchError,
    TreeStructureError,
    make_optimizer,
)
from cairn.interop.conversion.tensor_streams import whole
from cairn.interop.weights.export import export_sources
from cairn.state.adapters.models import abstract_model, module_settings
from cairn.state.checkpointing.trees import flatten
from cairn.state.paths import named_leaves
from tests.faults.report import is_long
from tests.interop.seams import served_leaves
from tests.state.my_model import MyModel, my_model
from tests.state.seams import model_streams, quantized_load
from tests.tiny import TINY, batch, compile_step

MESHES = {
    "same": {"auto_shard_model": True, "sharding_axis_dims": (2, 4, 1, 1)},
    "other": {"auto_shard_model": True, "sharding_axis_dims": (1, 2, 2, 2)},
    "one": {},
}
KINDS = ("8bit", "a4q", "aqt", "lora", "qlora")
SOME = (("8bit", "other"), ("a4q", "one"), ("aqt", "same"), ("lora", "other"), ("qlora", "same"))


def tiny(kind=None, model=None):
    """The tiny model, quantized or with adapters as `kind` says."""
    model = DecoderForCausalLM(TINY, rngs=nnx.Rngs(0)).shard_model() if model is None else model
    if kind not in (None, "lora"):
        model.quantize("nf4" if kind == "qlora" else kind, 16, "self_attn|mlp|layers")
    if kind in ("lora", "qlora"):
        model.apply_lora_to_layers(4, 8.0, "q_proj|down_proj|layers/1$")
    return model


def state_of(model, learning_rate=1e-2):
    tx, tx_init = make_optimizer("adamw", learning_rate=learning_rate)
    return model.to_state(tx, tx_init=tx_init)


def bits(tree):
    """Dtype, shape and bytes of every leaf by path."""
    leaves = ((named.path, _numbers(named.leaf)) for named in named_leaves(tree))
    return {
        path: (str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()) for path, leaf in leaves
    }


def _numbers(leaf):
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def exported(uri):
    run = Run.open(str(uri))
    (info,) = run.steps()
    manifest = run.manifest(info)
    sources, config = export_sources(manifest, CheckpointReader.open(run.step_uri(info), manifest))
    return {source.name: whole(source) for source in sources}, config


def model_bits(model):
    return bits(nnx.state(model))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each kind with one step: uri and what was saved."""
    made = {}
    for kind in KINDS:
        model = tiny(kind)
        state = state_of(model) if kind.endswith("lora") else model.to_state()
        uri = str(tmp_path_factory.mktemp("runs") / kind)
        state.save_state(uri, step=1, wait=True, verbose=False, mismatch_allowed=False)
        made[kind] = (uri, state)
    return made


@pytest.mark.parametrize(
    ("kind", "placed"), [*itertools.product(KINDS, MESHES)] if is_long() else SOME
)
def test_a_saved_state_comes_back_bit_for_bit_onto_any_mesh(runs, kind, placed):
    uri, state = runs[kind]
    loaded = EasyDeLState.load_state(uri, verbose=False, **MESHES[placed])
    assert bits(loaded.graphstate) == bits(state.graphstate)
    assert bits(loaded.graphother) == bits(state.graphother)
    assert flatten(loaded.opt_state or {}).keys() == flatten(state.opt_state or {}).keys()
    assert loaded.model.quantization == state.model.quantization
    assert loaded.model.lora == state.model.lora
    assert type(loaded.model) is DecoderForCausalLM
    if placed == "same":
        assert loaded.graphdef == state.graphdef
        assert jax.tree.structure(loaded) == jax.tree.structure(state.replace(tx=loaded.tx))
        found, expected = (jax.tree.leaves(one.shardings) for one in (loaded, state))
        assert found == expected


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_a_model_rebuilt_without_arrays_has_the_graphdef_of_the_saved_one(kind):
    model = tiny(kind)
    rebuilt = abstract_model(DecoderForCausalLM, TINY, module_settings(model))
    assert nnx.graphdef(rebuilt) == nnx.graphdef(model)
    assert [n.path for n in named_leaves(nnx.state(rebuilt))] == list(model_bits(model))


def test_a_users_own_model_is_quantized_adapted_saved_and_loaded_without_more_code(tmp_path):
    model = tiny("qlora", my_model())
    state = state_of(model)
    state.save_state(tmp_path / "run", step=1, wait=True, verbose=False, mismatch_allowed=False)
    loaded = EasyDeLState.load_state(tmp_path / "run", verbose=False, **MESHES["same"])
    assert type(loaded.model) is MyModel
    assert loaded.graphdef == state.graphdef
    assert model_bits(loaded.model) == model_bits(model)


def test_a_checkpoint_of_adapters_has_their_optimizer_state_alone(runs):
    uri, _ = runs["qlora"]
    run = Run.open(uri)
    (info,) = run.steps()
    leaves = run.contents(info).leaves
    adapters = {leaf.path for leaf in leaves if "_lora_" in leaf.path}
    model = {leaf.path for leaf in leaves if leaf.item == "model"}
    optimizer = {leaf.path for leaf in leaves if leaf.item == "optimizer"}
    own = {path for path in adapters if path in model}
    assert len(own) == 8
    assert "model/embed_tokens/embedding" in model
    assert optimizer == {"0/count"} | {f"0/{moment}/{p}" for moment in ("mu", "nu") for p in own}


def test_packed_weights_are_listed_by_elements_and_take_half_a_byte_each(runs):
    uri, state = runs["qlora"]
    run = Run.open(uri)
    (info,) = run.steps()
    path = "model/layers/0/mlp/gate_proj/kernel/array/qvalue"
    (record,) = [leaf for leaf in run.contents(info).leaves if leaf.path == path]
    assert (record.dtype, record.shape, record.nbytes) == ("uint4", (32, 64), 1024)
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
    expected = np.asarray({n.path: n.leaf for n in named_leaves(state.graphother)}[path])
    found = reader.read("model", path, (slice(3, 7), slice(1, 6)))
    np.testing.assert_array_equal(found.astype(int), expected[3:7, 1:6].astype(int))
    stored = ocp.metadata(run.step_uri(info).local_path, "model").metadata
    for key in path.split("/"):
        stored = stored[key]
    assert (stored.dtype, tuple(stored.shape)) == (np.uint8, (32, 32))


def test_float_dtype_casts_what_is_floating_and_leaves_quantized_weights_alone(tmp_path):
    state = state_of(tiny("qlora"))
    state.save_state(tmp_path / "run", step=1, wait=True, verbose=False, float_dtype="bfloat16")
    expected, found = (
        model_bits(model)
        for model in (
            state.model,
            EasyDeLState.load_state(tmp_path / "run", verbose=False).model,
        )
    )
    for path, leaf in found.items():
        if "/array/" in path:
            assert leaf == expected[path]
        else:
            assert leaf[0] == "bfloat16"
    cast = EasyDeLState.load_state(tmp_path / "run", verbose=False, param_dtype="float32")
    for path, leaf in model_bits(cast.model).items():
        assert leaf == expected[path] if "/array/" in path else leaf[0] == "float32"


def test_a_model_that_is_not_as_its_settings_say_is_refused(tmp_path):
    model = tiny("qlora")
    layer = model.model.layers[0].self_attn.q_proj
    layer.kernel_lora_a.set_value(jnp.zeros((32, 3)))
    with pytest.raises(TreeStructureError, match=r"q_proj/kernel_lora_a: expected shape \(32, 4\)"):
        model.to_state().save_state(tmp_path / "run", mismatch_allowed=False, verbose=False)


# -- quantizing while loading -------------------------------------------------------------------


@pytest.fixture(scope="module")
def float_run(tmp_path_factory):
    """A run of the floating tiny model with its optimizer state."""
    uri = str(tmp_path_factory.mktemp("float") / "run")
    state = state_of(tiny())
    state.save_state(uri, step=1, wait=True, verbose=False)
    return uri


@pytest.mark.parametrize(
    ("method", "placed"),
    [*itertools.product(("nf4", "a8bit"), MESHES)]
    if is_long()
    else [("nf4", "same"), ("a8bit", "one"), ("nf4", "other")],
)
def test_quantizing_while_loading_is_loading_and_then_quantizing(float_run, method, placed):
    options = {"verbose": False, "optimizer": "skip", **MESHES[placed]}
    expected = EasyDeLState.load_state(float_run, **options).model.quantize(method, 16, "mlp")
    state = EasyDeLState.load_state(
        float_run,
        quantization_method=method,
        quantization_block_size=16,
        quantization_pattern="mlp",
        quantization_platform="jax",
        **options,
    )
    assert state.model.quantization == expected.quantization
    assert model_bits(state.model) == model_bits(expected)
    assert nnx.graphdef(state.model) == nnx.graphdef(expected)
    found, wanted = (
        [leaf.sharding for leaf in jax.tree.leaves(nnx.state(one))]
        for one in (state.model, expected)
    )
    assert found == wanted


def test_only_a_few_floating_weights_are_held_at_a_time(float_run, monkeypatch):
    """Groups of 2 KB: on eight devices a kernel of 8 KB is held as 2 KB on each."""
    monkeypatch.setattr(quantized_load, "GROUP_BYTES", 2048)
    read = []
    original = quantized_load.StoredCheckpoint.restore_some

    def counted(self, item, target, paths, **options):
        found = original(self, item, target, paths, **options)
        read.append(sum(a.addressable_shards[0].data.nbytes for a in found.values()))
        return found

    monkeypatch.setattr(quantized_load.StoredCheckpoint, "restore_some", counted)
    model = EasyDeLBaseModule.from_pretrained(
        float_run,
        sharding_axis_dims=(1, 8, 1, 1),
        quantization_method="8bit",
        quantization_block_size=16,
    )
    *kernels, _others = read
    assert len(kernels) > 3
    assert max(kernels) <= 2048
    whole = EasyDeLBaseModule.from_pretrained(float_run, sharding_axis_dims=(1, 8, 1, 1))
    assert model_bits(model) == model_bits(whole.quantize("8bit", 16))


def test_the_optimizer_state_of_floating_weights_must_be_left_out(float_run):
    with pytest.raises(ArgumentError, match=r"quantization_method: expected optimizer='skip'"):
        EasyDeLState.load_state(float_run, quantization_method="nf4", quantization_block_size=16)


def test_the_optimizer_state_of_adapters_stays_when_their_base_is_quantized(runs):
    uri, state = runs["lora"]
    loaded = EasyDeLState.load_state(
        uri, quantization_method="nf4", quantization_block_size=16, verbose=False, **MESHES["same"]
    )
    assert bits(loaded.graphstate) == bits(state.graphstate)
    assert bits(loaded.opt_state) == bits(state.opt_state)
    assert loaded.model.is_quantized
    expected = tiny("lora").quantize("nf4", 16)
    assert nnx.graphdef(loaded.model) == nnx.graphdef(expected)
    rebuilt = abstract_model(DecoderForCausalLM, TINY, module_settings(expected))
    assert nnx.graphdef(rebuilt) == nnx.graphdef(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"quantization_block_size": 64},
            "quantization_block_size=64 and quantization_method=None",
        ),
        (
            {"quantization_pattern": "mlp"},
            "quantization_pattern='mlp' and quantization_method=None",
        ),
        ({"quantization_platform": "jax"}, "quantization_platform='jax' and quantization_method="),
        (
            {"quantization_method": "nf4", "quantize_tensors": False},
            "quantize_tensors=False and quantization_method='nf4'",
        ),
        ({"quantization_method": "nf5"}, "quantization_method: expected one of 'nf4'"),
        ({"quantization_method": "nf4", "quantization_platform": "triton"}, "expected 'jax' or"),
        ({"quantization_method": "nf4", "quantization_platform": "cuda"}, "expected one of 'jax'"),
        ({"quantization_method": "nf4", "quantization_block_size": 24}, "group_size: expected"),
        ({"quantization_method": "nf4", "quantization_block_size": 0}, "group_size: expected 1"),
        ({"quantization_method": "nf4", "quantization_pattern": "("}, "a regular expression"),
        ({"quantization_method": "nf4", "quantization_pattern": "conv"}, "matches none of"),
    ],
)
def test_arguments_that_contradict_each_other_or_the_model_are_refused(float_run, options, message):
    for load in (
        lambda: EasyDeLState.load_state(float_run, optimizer="skip", verbose=False, **options),
        lambda: EasyDeLBaseModule.from_pretrained(float_run, **options),
    ):
        with pytest.raises(ArgumentError, match=message.replace("(", r"\(")):
            load()


def test_no_method_and_quantize_tensors_false_agree(float_run):
    state = EasyDeLState.load_state(float_run, quantize_tensors=False, verbose=False)
    assert not state.model.is_quantized


def test_a_quantized_checkpoint_takes_its_own_method_and_no_other(runs):
    uri, state = runs["8bit"]
    same = EasyDeLState.load_state(uri, quantization_method="8bit", verbose=False)
    assert model_bits(same.model) == model_bits(state.model)
    for other in (
        {"quantization_method": "nf4"},
        {"quantization_method": "8bit", "quantization_block_size": 32},
        {"quantization_method": "8bit", "quantization_pattern": "mlp"},
    ):
        with pytest.raises(ArgumentError, match=r"as it is quantized: \{'method': '8bit'"):
            EasyDeLState.load_state(uri, verbose=False, **other)


# -- training -----------------------------------------------------------------------------------


def test_qlora_trains_saves_and_goes_on_as_if_never_stopped(tmp_path):
    state = state_of(tiny("qlora"), learning_rate=0.1)
    frozen = bits(state.graphother)
    assert {
        type(variable)
        for variable in jax.tree.leaves(
            state.graphstate, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
    } == {nnx.LoRAParam}
    moments = {path for path in bits(state.opt_state) if path.startswith("0/mu/")}
    assert moments == {f"0/mu/{path}" for path in bits(state.graphstate)}
    step = compile_step(state)
    losses = []
    for number in range(6):
        if number == 3:
            handle = state.save_state(tmp_path / "run", verbose=False)
        state, loss = step(state, jnp.asarray(batch(0)))
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.05
    assert bits(state.graphother) == frozen
    handle.wait()
    again = EasyDeLState.load_state(tmp_path / "run", verbose=False, **MESHES["same"])
    repeated = []
    for _ in range(3):
        again, loss = step(again.replace(tx=state.tx), jnp.asarray(batch(0)))
        repeated.append(float(loss))
    assert repeated == losses[3:]
    assert bits(again.graphstate) == bits(state.graphstate)
    assert step._cache_size() == 1  # the loaded state is as the saved one: nothing compiled again


def test_qlora_goes_on_on_another_mesh(runs):
    uri, _ = runs["qlora"]
    losses = {}
    for placed in ("same", "other"):
        state = EasyDeLState.load_state(uri, verbose=False, **MESHES[placed])
        step = compile_step(state)
        _, loss = step(state, jnp.asarray(batch(0)))
        losses[placed] = float(loss)
    assert losses["other"] == pytest.approx(losses["same"], abs=1e-5)


# -- what is not meant to be ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_exported_as_the_floating_model_that_it_computes_with(runs, kind):
    uri = runs[kind][0]
    model = EasyDeLBaseModule.from_pretrained(uri, auto_shard_model=False, param_dtype=None)
    if model.is_quantized:
        model.dequantize()
    if model.lora_is_enabled:
        model = model.unwrap_lora_to_layers()
    tensors, config = exported(uri)
    _, sources = model_streams(model)
    assert tensors.keys() == {source.name for source in sources}
    for source in sources:
        merged = kind in ("lora", "qlora")
        found, expected = tensors[source.name], whole(source)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 if merged else 0)
    assert config["dtype"] == "float32"


@pytest.mark.parametrize("max_bytes", [100, 5_000, 1 << 20])
@pytest.mark.parametrize("transpose", [False, True])
def test_a_leaf_is_the_same_in_blocks_of_any_size(runs, max_bytes, transpose):
    for kind in ("a4q", "qlora", "lora"):
        run = Run.open(runs[kind][0])
        (info,) = run.steps()
        reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
        leaves = served_leaves(reader, "model", reader.leaves("model"))
        for path in (
            "model/layers/1/mlp/down_proj/kernel",
            "model/layers/0/self_attn/q_proj/kernel",
        ):
            blocks = [*leaves[path].blocks(max_bytes, transpose=transpose)]
            shape = leaves[path].shape[::-1] if transpose else leaves[path].shape
            found = np.concatenate([block.reshape(-1) for block in blocks]).reshape(shape)
            (expected,) = leaves[path].blocks(1 << 30, transpose=False)
            np.testing.assert_allclose(found, expected.T if transpose else expected, atol=1e-6)


def test_an_adapted_checkpoint_does_not_load_as_another_models(runs, tmp_path):
    uri, _ = runs["lora"]
    with pytest.raises(ArgumentError, match=r"checkpoint of a MyModel; found one of a Decoder"):
        MyModel.from_pretrained(uri)
    model = EasyDeLBaseModule.from_pretrained(uri, auto_shard_model=False)
    assert model.lora_is_enabled
    with pytest.raises(
        TreeMismatchError,
        match=r"gate_proj/kernel: expected float32\[32, 96\], stored as float32\[32, 64\]",
    ):
        EasyDeLBaseModule.from_pretrained(uri, config_kwargs={"intermediate_size": 96})
