"""What users get wrong with a state: one clear error each, and nothing changed."""

import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import (
    ArgumentError,
    EasyDeLState,
    OptimizerError,
    ShardingError,
    TrainState,
    TreeMismatchError,
    TreeStructureError,
    make_mesh,
)
from tests.bad_input.refusals import refused
from tests.contract.subjects import SGD, TX, ones_like
from tests.state.my_model import my_model

# -- the documented errors ---------------------------------------------------------------------


def parts(*names):
    found = dict(
        zip(
            ("graphdef", "graphstate", "graphother"),
            nnx.split(my_model(), nnx.Param, ...),
            strict=True,
        )
    )
    return {name: found[name] for name in names}


CREATE = {
    "model and parts": (
        lambda: {"model": my_model(), **parts("graphdef", "graphstate", "graphother")},
        "either model or graphdef, graphstate and graphother",
        "found model and graphdef, graphstate, graphother",
    ),
    "some parts": (
        lambda: parts("graphdef", "graphstate"),
        "expected a model, or all of graphdef, graphstate and graphother",
        "found only graphdef, graphstate",
    ),
    "init_opt_state and opt_state": (
        lambda: {"model": my_model(), "tx": TX, "opt_state": (), "init_opt_state": True},
        "expected opt_state or init_opt_state=True",
        "found both",
    ),
    "init_opt_state without tx": (
        lambda: {"model": my_model(), "init_opt_state": True},
        "expected tx with init_opt_state=True",
        "found None",
    ),
}


@pytest.mark.parametrize("case", CREATE)
def test_create_raises_value_error(case):
    make, *texts = CREATE[case]
    arguments = make()
    subject = arguments.get("model", arguments.get("graphstate"))
    refused(subject, lambda: EasyDeLState.create(**arguments), ValueError, *texts)


def test_apply_gradients_without_tx_or_opt_state_raises_assertion_error(state):
    for bare in (state.replace(tx=None), state.free_opt_state()):
        grads = ones_like(bare.graphstate)
        refused(
            bare,
            lambda bare=bare, grads=grads: bare.apply_gradients(grads=grads),
            AssertionError,
            "expected an optimizer and its state",
            "=None",
            "or call init_tx",
        )


def test_gather_optimizer_state_without_one_raises_assertion_error(state):
    bare = state.free_opt_state()
    refused(
        bare, bare.gather_optimizer_state, AssertionError, "expected an optimizer state", "None"
    )


def test_shard_optimizer_state_without_one_raises_value_error(state):
    bare = state.free_opt_state()
    refused(bare, bare.shard_optimizer_state, ValueError, "expected an optimizer state", "None")


def test_load_state_of_nothing_raises_file_not_found(state, tmp_path):
    refused(
        state,
        lambda: EasyDeLState.load_state(tmp_path / "gone", verbose=False),
        FileNotFoundError,
        "expected a folder with run.json",
        "found nothing",
    )


def test_load_state_of_a_misspelt_path_names_the_nearest_and_asks_nobody_else(
    state, tmp_path, monkeypatch
):
    """It looks like the name of a repository: the hub would be asked for it."""
    monkeypatch.chdir(tmp_path)
    state.save_state("runs/first", wait=True, verbose=False)
    for reference in ("runs/frist", "runs/first-run"):
        refused(
            state,
            lambda reference=reference: EasyDeLState.load_state(reference, verbose=False),
            FileNotFoundError,
            f"{tmp_path}/{reference}: expected a folder with run.json, found nothing",
            f"The nearest name that exists is file://{tmp_path}/runs/first.",
            f"The hub's repository of this name is hf://{reference}.",
        )


def test_load_optimizer_of_nothing_raises_file_not_found(state, tmp_path):
    state.save_state(tmp_path / "run", save_optimizer=False, wait=True, verbose=False)
    refused(
        state,
        lambda: state.load_optimizer(tmp_path / "run"),
        FileNotFoundError,
        "expected an item 'optimizer'",
        "found items meta, model",
    )
    refused(state, lambda: state.load_optimizer(tmp_path / "gone"), FileNotFoundError, "run.json")


# -- gradients and optimizers ------------------------------------------------------------------


def test_gradients_of_another_structure_are_all_listed(state):
    grads = nnx.to_pure_dict(ones_like(state.graphstate))
    del grads["layers"][0]["bias"]
    grads["layers"][1]["kernel"] = jnp.ones((64, 32))
    grads["extra"] = jnp.ones((3,))
    error = refused(
        state,
        lambda: state.apply_gradients(grads=grads),
        TreeStructureError,
        "grads",
        "extra: unexpected, has shape (3,)",
        "layers/0/bias: missing, expected shape (64,)",
        "layers/1/kernel: expected shape (64, 64), found (64, 32)",
    )
    assert len(error.problems) == 3


def test_a_train_state_lists_gradients_of_another_structure_too():
    made = TrainState.create(params={"a": jnp.ones((2,)), "b": jnp.ones((3,))}, tx=SGD)
    refused(
        made,
        lambda: made.apply_gradients(grads={"a": jnp.ones((4,))}),
        TreeStructureError,
        "a: expected shape (2,), found (4,)",
        "b: missing",
    )


@pytest.mark.parametrize("step", [float("nan"), 1.5, -1, "three", jnp.float32(jnp.nan)], ids=str)
def test_a_step_that_is_no_step_is_refused(step):
    model = my_model()
    refused(
        model,
        lambda: EasyDeLState.create(model=model, step=step),
        ArgumentError,
        "step: expected",
        "integer",
        "found",
    )
    params = {"a": jnp.ones((2,))}
    refused(
        params, lambda: TrainState.create(params=params, tx=SGD, step=step), ArgumentError, "step"
    )


def test_a_checkpoint_of_a_step_that_is_no_step_is_refused(state, tmp_path):
    for step in (float("nan"), -1):
        refused(
            state,
            lambda step=step: state.save_state(tmp_path / "run", step=step, verbose=False),
            ValueError,
            "expected",
            str(step),
        )
    assert not (tmp_path / "run").exists()


def test_another_optimizer_than_the_stored_states_is_refused(state, run):
    for tx in (optax.sgd(0.1), optax.lion(0.1)):
        refused(
            state,
            lambda tx=tx: EasyDeLState.load_state(run, tx=tx, verbose=False),
            TreeMismatchError,
            "optimizer/0/nu/layers/0/kernel: unexpected in the checkpoint",
            "float32[64, 64]",
        )
    other = state.init_tx(optax.lion(0.1))
    refused(other, lambda: other.load_optimizer(run), TreeMismatchError, "optimizer/0/nu/")


def test_an_optimizer_that_was_not_described_must_be_given(state, tmp_path):
    state.replace(tx_init=None).save_state(tmp_path / "run", wait=True, verbose=False)
    refused(
        state,
        lambda: EasyDeLState.load_state(tmp_path / "run", verbose=False),
        OptimizerError,
        "expected the optimizer that the stored optimizer state belongs to",
        "found neither tx= nor a stored description",
    )


# -- placement ---------------------------------------------------------------------------------

UNKNOWN_AXIS = (("embedding", PartitionSpec("rows")), (".*", PartitionSpec()))


@pytest.mark.parametrize("method", ["shard_model", "shard_state", "shard_optimizer_state"])
def test_rules_with_an_unknown_axis_are_refused(state, method):
    refused(
        state,
        lambda: getattr(state, method)(partition_rules=UNKNOWN_AXIS),
        ShardingError,
        "embed_tokens/embedding",
        "'rows'",
        "fsdp",
    )


def test_rules_with_an_unknown_axis_leave_a_module_where_it_is(state, run):
    model = my_model().shard_model()
    refused(model, lambda: model.shard_model(UNKNOWN_AXIS), ShardingError, "'rows'")
    refused(state, lambda: state.init_tx(TX, partition_rules=UNKNOWN_AXIS), ShardingError, "'rows'")
    refused(
        state,
        lambda: EasyDeLState.load_state(
            run, auto_shard_model=True, partition_rules=UNKNOWN_AXIS, verbose=False
        ),
        ShardingError,
        "'rows'",
    )


def test_a_mesh_larger_than_the_devices_is_refused(state, run):
    texts = ("expected 32 devices", "found 8 devices")
    refused(state, lambda: make_mesh((4, 8, 1, 1)), ShardingError, *texts)
    refused(
        state,
        lambda: EasyDeLState.load_state(
            run, auto_shard_model=True, sharding_axis_dims=(4, 8, 1, 1), verbose=False
        ),
        ShardingError,
        *texts,
    )
    model = my_model((4, 8, 1, 1))
    refused(model, model.shard_model, ShardingError, *texts)


# -- arguments of load_state that contradict ---------------------------------------------------

CONTRADICTIONS = {
    "rules without a mesh": (
        {"partition_rules": ((".*", PartitionSpec()),)},
        ("partition_rules: expected auto_shard_model=True or mesh=", "found neither"),
    ),
    "functions without a mesh": (
        {"shard_fns": {"layers/0/kernel": lambda leaf: leaf}},
        ("shard_fns: expected auto_shard_model=True or mesh=", "found neither"),
    ),
    "a mesh and other dims": (
        {"mesh": (1, 2, 1, 1), "sharding_axis_dims": (1, 4, 1, 1)},
        ("mesh: expected sharding_axis_dims (1, 4, 1, 1)", "found dp=1, fsdp=2"),
    ),
    "a mesh and slices": (
        {"mesh": (1, 2, 1, 1), "sharding_dcn_axis_dims": (1, 1, 1, 1)},
        ("sharding_dcn_axis_dims: expected either these or mesh=", "found (1, 1, 1, 1)"),
    ),
    "dims and names": (
        {"auto_shard_model": True, "sharding_axis_dims": (2, 4), "sharding_axis_names": ("a",)},
        ("(2, 4)", "('a',)", "expected"),
    ),
    "backend and platform": (
        {"backend": "cpu", "platform": "gpu"},
        ("platform: expected 'cpu', as backend says", "found 'gpu'"),
    ),
    "a method and no tensors": (
        {"quantization_method": "nf4", "quantize_tensors": False, "optimizer": "skip"},
        ("quantize_tensors: expected True", "found quantize_tensors=False"),
    ),
    "a pattern without a method": (
        {"quantization_pattern": "q_proj"},
        ("quantization_pattern: expected quantization_method", "found quantization_pattern"),
    ),
    "a method and the optimizer of floats": (
        {"quantization_method": "nf4"},
        ("quantiz", "optimizer", "expected", "found"),
    ),
    "a task of another model": (
        {"model_task": "base-module"},
        ("model_task: expected 'causal-lm'", "found 'base-module'"),
    ),
    "a step of a step": (
        {"step": 4},
        ("step: expected no step= with", "which names one", "found 4"),
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_arguments_of_load_state_that_contradict_are_refused(state, run, case):
    arguments, texts = CONTRADICTIONS[case]
    arguments = {"verbose": False, **arguments}
    if "mesh" in arguments:
        arguments["mesh"] = make_mesh(arguments["mesh"])
    reference = f"{run}/steps/0" if "step" in arguments else run
    refused(state, lambda: EasyDeLState.load_state(reference, **arguments), ValueError, *texts)
