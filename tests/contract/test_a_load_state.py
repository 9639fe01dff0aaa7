"""EasyDeLState.load_state, load_optimizer: which checkpoint, which dtype, which optimizer."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cairn import (
    ArgumentError,
    Checkpointer,
    EasyDeLState,
    OptimizerError,
    OptimizerNotFoundError,
    TaskType,
    make_mesh,
)
from cairn.state.sharding.mesh import mesh_of
from tests.contract.subjects import (
    SAME_MESH,
    SGD,
    TX,
    TX_INIT,
    assert_same_bits,
    host,
    make_decoder,
)
from tests.state.forward import logits_of
from tests.state.my_model import MyModel, batch, my_model


def load(reference, **arguments):
    return EasyDeLState.load_state(reference, **{"verbose": False, **arguments})


@pytest.mark.parametrize("form", [Path, str, "file://{}".format, "{}/steps/1".format])
def test_load_directory_is_a_path_a_uri_or_a_step(saved, form):
    run, state = saved
    loaded = EasyDeLState.load_state(load_directory=form(run), verbose=False)
    assert_same_bits(loaded, state)
    assert (int(loaded.step), loaded.extras) == (1, {"position": 3})


def test_load_directory_that_is_not_there_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a folder with run\.json"):
        EasyDeLState.load_state(load_directory=tmp_path / "gone")


def test_device_holds_everything_that_is_not_sharded(saved):
    run, _ = saved
    device = jax.devices()[5]
    assert {leaf.device for leaf in jax.tree.leaves(load(run, device=device))} == {device}
    first = jax.devices("cpu")[0]
    assert {leaf.device for leaf in jax.tree.leaves(load(run, device="cpu"))} == {first}
    with pytest.raises(ArgumentError, match=r"device: expected a jax\.Device"):
        load(run, device="abacus")


def test_device_is_by_default_the_one_where_jax_puts_what_it_makes(saved):
    """Our departure: "cpu", as the document has it, would put a job's state beside its GPU."""
    run, _ = saved
    assert inspect.signature(EasyDeLState.load_state).parameters["device"].default is None
    assert {leaf.device for leaf in jax.tree.leaves(load(run))} == {jnp.zeros(1).device}
    with jax.default_device(jax.devices()[3]):
        assert {leaf.device for leaf in jax.tree.leaves(load(run))} == {jax.devices()[3]}
        assert {leaf.device for leaf in jax.tree.leaves(load(run, device="cpu"))} == {
            jax.devices("cpu")[0]
        }


def test_dtype_is_the_computations(saved):
    run, _ = saved
    loaded = load(run, dtype=jnp.bfloat16)
    assert loaded.model.dtype == jnp.bfloat16
    assert loaded.model(batch()).dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.graphstate)} == {"float32"}


def test_param_dtype_casts_floating_leaves(saved):
    run, state = saved
    loaded = load(run, param_dtype=jnp.bfloat16)
    exact = host(state.graphstate)
    for path, leaf in host(loaded.graphstate).items():
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, exact[path].astype(jnp.bfloat16))
    assert_same_bits(loaded.graphother, state.graphother)


def test_param_dtype_none_keeps_what_is_stored(saved, tmp_path):
    run, state = saved
    assert_same_bits(load(run, param_dtype=None).graphstate, state.graphstate)
    mixed = my_model()
    mixed.layers[0].kernel.set_value(mixed.layers[0].kernel.get_value().astype(jnp.bfloat16))
    mixed.to_state().save_state(tmp_path / "mixed", verbose=False, wait=True)
    Checkpointer.for_run(tmp_path / "mixed").close()
    assert_same_bits(load(tmp_path / "mixed").graphstate, mixed.graphstate)


def test_param_dtype_of_hugging_face_weights_is_float32_as_documented(tmp_path):
    make_decoder(param_dtype=jnp.float16).save_pretrained(tmp_path / "hf")
    leaves = jax.tree.leaves(load(tmp_path / "hf").graphstate)
    assert {leaf.dtype.name for leaf in leaves} == {"float32"}


def test_precision_is_the_matrix_products(saved):
    run, _ = saved
    assert load(run).model.precision is None
    loaded = load(run, precision=jax.lax.Precision.HIGHEST)
    assert loaded.model.precision in ("highest", jax.lax.Precision.HIGHEST)


def test_config_kwargs_change_fields_of_the_config(saved):
    run, _ = saved
    loaded = load(run, config_kwargs={"sharding_axis_names": ("a", "b", "c", "d")})
    assert loaded.module_config.sharding_axis_names == ("a", "b", "c", "d")
    assert loaded.module_config.vocab_size == 256
    with pytest.raises(ValueError, match=r"config_kwargs: .*no_such_field"):
        load(run, config_kwargs={"no_such_field": 1})
    with pytest.raises(ValueError, match=r"config_kwargs: .*another architecture"):
        load(run, config_kwargs={"model_type": "llama"})


@pytest.mark.parametrize("model_task", [TaskType.AUTO_BIND, TaskType.CAUSAL_LM, "base-module"])
def test_model_task_must_be_the_models_own(saved, model_task):
    run, _ = saved
    if model_task == "base-module":
        with pytest.raises(ArgumentError, match="model_task: expected 'causal-lm'"):
            load(run, model_task=model_task)
    else:
        assert load(run, model_task=model_task).model.model_task is TaskType.CAUSAL_LM


@pytest.mark.parametrize("verbose", [True, False])
def test_verbose_tells_what_is_loaded(saved, capsys, verbose):
    run, _ = saved
    EasyDeLState.load_state(run, verbose=verbose)
    assert ("loading step 1" in capsys.readouterr().err) == verbose


def test_kwargs_take_our_own_arguments_and_refuse_unknown_ones(saved):
    run, _ = saved
    mesh = make_mesh((1, 2, 1, 1))
    assert mesh_of(load(run, mesh=mesh).graphstate) == mesh

    class Mine(MyModel):
        pass

    assert isinstance(load(run, model_class=Mine).model, Mine)
    kwargs = {"colour": "red"}
    with pytest.raises(ValueError, match="found unknown: colour"):
        load(run, **kwargs)


def test_step_chooses_the_checkpoint(saved):
    run, state = saved
    assert_same_bits(load(run, step=1), state)
    with pytest.raises(FileNotFoundError, match="expected step 7"):
        load(run, step=7)


def test_tx_replaces_the_stored_description(saved):
    run, state = saved
    tx = optax.adamw(5e-3)
    loaded = load(run, tx=tx)
    assert loaded.tx is tx
    assert loaded.tx_init is None
    assert_same_bits(loaded.opt_state, state.opt_state)


def test_tx_comes_from_the_stored_tx_init_or_an_error_says_so(saved, tmp_path):
    run, state = saved
    assert (load(run).tx, load(run).tx_init) == (TX, TX_INIT)
    state.replace(tx_init=None).save_state(tmp_path / "r", verbose=False, wait=True)
    Checkpointer.for_run(tmp_path / "r").close()
    with pytest.raises(OptimizerError, match="neither tx= nor a stored description"):
        load(tmp_path / "r")
    assert_same_bits(load(tmp_path / "r", tx=TX).opt_state, state.opt_state)


@pytest.mark.parametrize("optimizer", ["require", "skip"])
def test_optimizer_is_required_or_skipped(saved, optimizer):
    run, state = saved
    loaded = load(run, optimizer=optimizer)
    if optimizer == "skip":
        assert loaded.opt_state is None
    else:
        assert_same_bits(loaded.opt_state, state.opt_state)


def test_optimizer_is_required_by_default_if_one_is_stored(saved, tmp_path):
    run, state = saved
    assert load(run).opt_state is not None
    with pytest.raises(ValueError, match="optimizer/"):
        load(run, tx=SGD)
    state.save_state(tmp_path / "r", save_optimizer=False, verbose=False, wait=True)
    Checkpointer.for_run(tmp_path / "r").close()
    assert load(tmp_path / "r").opt_state is None


@pytest.mark.parametrize("mesh", ["saved", "one device"])
def test_load_optimizer_puts_it_where_the_parameters_are(saved, mesh):
    run, state = saved
    arguments = SAME_MESH if mesh == "saved" else {}
    bare = load(run, optimizer="skip", **arguments)
    loaded = bare.load_optimizer(load_directory=run)
    assert_same_bits(loaded.opt_state, state.opt_state)
    assert mesh_of(loaded.opt_state) == mesh_of(bare.graphstate)
    assert bare.opt_state is None


def test_load_optimizer_is_file_not_found_when_there_is_none(saved, tmp_path):
    _, state = saved
    with pytest.raises(FileNotFoundError):
        state.load_optimizer(tmp_path / "gone")
    state.save_state(tmp_path / "r", save_optimizer=False, verbose=False, wait=True)
    Checkpointer.for_run(tmp_path / "r").close()
    with pytest.raises(OptimizerNotFoundError, match="expected an item 'optimizer'"):
        state.load_optimizer(tmp_path / "r")


def test_load_optimizer_never_reads_pickle(saved, tmp_path):
    _, state = saved
    (tmp_path / "easydel-optstate.pickle").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ArgumentError, match="pickle can run code and is never read"):
        state.load_optimizer(tmp_path)


def test_load_is_load_state(saved):
    run, state = saved
    assert_same_bits(EasyDeLState.load(run, verbose=False), state)
    with pytest.raises(FileNotFoundError):
        EasyDeLState.load(f"{run}-gone", verbose=False)


def test_from_pretrained_is_the_modules_then_to_state(tmp_path):
    model = make_decoder()
    model.save_pretrained(tmp_path / "hf")
    state = EasyDeLState.from_pretrained(tmp_path / "hf", tx=TX, tx_init=TX_INIT)
    assert_same_bits(state.graphstate, model.graphstate)
    assert int(state.step) == 0
    by_hand = type(model).from_pretrained(tmp_path / "hf").to_state(TX, tx_init=TX_INIT)
    assert_same_bits(state, by_hand)


def test_to_pytorch_is_the_transformers_model_and_to_torch_its_dict():
    import torch
    import transformers

    state = make_decoder().to_state()
    theirs = state.to_pytorch()
    assert isinstance(theirs, transformers.LlamaForCausalLM)
    assert theirs.config.model_type == "llama"
    tensors = state.to_torch()
    theirs.load_state_dict(tensors, strict=True)
    ids = np.asarray(batch(2, 5))
    with torch.no_grad():
        logits = theirs(torch.tensor(ids).long()).logits.numpy()
    ours = logits_of(state.model, ids)
    assert np.abs(logits - ours).max() <= 1e-4 * np.abs(logits).max()
