import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import (
    AliasNotFoundError,
    ArgumentError,
    Checkpointer,
    CorruptionError,
    Damage,
    DecoderConfig,
    DecoderForCausalLM,
    EasyDeLState,
    NotFoundError,
    OptimizerError,
    Run,
    RunNotFoundError,
    RunSaver,
    SavePolicy,
    SaveState,
    StepDamagedError,
    StepNotFoundError,
    TrainState,
    TreeMismatchError,
    UnknownModelError,
    UnsupportedFormatError,
    best_step,
    create_run,
    make_mesh,
    make_optimizer,
)
from cairn.state.checkpointing.restore import read_meta
from cairn.state.paths import named_leaves
from cairn.state.sharding.mesh import mesh_of
from cairn.storage.runs.annotate import note_verified
from tests.state.forward import outputs_of
from tests.state.my_model import MyModel, MyModelConfig, batch, my_model, train_step
from tests.state.seams import checkpoint as stored_checkpoint

TX, TX_INIT = make_optimizer("adamw", learning_rate=1e-2)
SAME_MESH = {"sharding_axis_dims": (2, 4, 1, 1), "auto_shard_model": True, "verbose": False}


def host(tree):
    """Bytes of every leaf, by path."""
    found = {}
    for named in named_leaves(tree):
        leaf = named.leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[named.path] = np.array(leaf)
    return found


def assert_bit_equal(one, other):
    one, other = host(one), host(other)
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        assert leaf.dtype == other[path].dtype, path
        assert leaf.tobytes() == other[path].tobytes(), path


class Trained:
    """A state trained for three steps, saved right after a donated one, then three steps more."""

    def __init__(self, run, state):
        self.run = str(run)
        self.step = jax.jit(train_step, donate_argnums=0, out_shardings=(state.shardings, None))
        for _ in range(3):
            state, _ = self.step(state, batch())
        self.at_save = host((state.graphstate, state.graphother, state.opt_state))
        self.handle = state.save_state(
            self.run, extras={"position": 3}, metrics={"loss": 1.5}, verbose=False
        )
        self.later = []
        for _ in range(3):
            # The state being saved is donated while the save is under way.
            state, loss = self.step(state, batch())
            self.later.append(float(loss))
        self.handle.wait()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    state = my_model().shard_model().to_state(TX, tx_init=TX_INIT, hyperparameters={"lr": 0.01})
    return Trained(tmp_path_factory.mktemp("store") / "mine", state)


def test_a_save_right_after_a_donated_step_stores_that_step(trained):
    loaded = EasyDeLState.load_state(trained.run, **SAME_MESH)
    found = host((loaded.graphstate, loaded.graphother, loaded.opt_state))
    assert found.keys() == trained.at_save.keys()
    for path, leaf in trained.at_save.items():
        assert found[path].tobytes() == leaf.tobytes(), path


def test_training_goes_on_as_if_it_had_not_stopped(trained):
    loaded = EasyDeLState.load_state(trained.run, **SAME_MESH)
    assert int(loaded.step) == 3
    assert loaded.extras == {"position": 3}
    assert loaded.hyperparameters == {"lr": 0.01}
    assert isinstance(loaded.model, MyModel)
    assert loaded.tx is TX
    losses = []
    for _ in range(3):
        loaded, loss = trained.step(loaded, batch())
        losses.append(float(loss))
    assert losses == trained.later


def test_a_checkpoint_loads_onto_another_mesh_bit_for_bit(trained):
    whole = EasyDeLState.load_state(trained.run, **SAME_MESH)
    half = EasyDeLState.load_state(
        trained.run, sharding_axis_dims=(1, 2, 1, 1), auto_shard_model=True, verbose=False
    )
    assert mesh_of(half.opt_state) == mesh_of(half.graphstate) == make_mesh((1, 2, 1, 1))
    assert half.module_config.sharding_axis_dims == (1, 2, 1, 1)
    assert_bit_equal(half, whole)
    losses = []
    step = jax.jit(train_step)
    for _ in range(3):
        half, loss = step(half, batch())
        losses.append(float(loss))
    np.testing.assert_allclose(losses, trained.later, rtol=1e-4)


def test_a_module_class_loads_its_own_checkpoint(trained):
    from cairn.state.states.load_options import LoadOptions
    from cairn.state.states.state_load import load_module

    model = load_module(trained.run, LoadOptions(**SAME_MESH))
    whole = EasyDeLState.load_state(trained.run, **SAME_MESH)
    np.testing.assert_array_equal(model(batch()), whole.model(batch()))


def test_what_does_not_exist_is_not_found(trained, tmp_path):
    for reference, error in [
        (f"{trained.run}-gone", RunNotFoundError),
        (f"{trained.run}@production", AliasNotFoundError),
        (f"{trained.run}/steps/7", StepNotFoundError),
        (str(tmp_path), RunNotFoundError),
    ]:
        with pytest.raises(error) as caught:
            EasyDeLState.load_state(reference, verbose=False)
        assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(StepNotFoundError, match="step 7"):
        EasyDeLState.load_state(trained.run, step=7, verbose=False)
    with pytest.raises(ArgumentError, match="which names one"):
        EasyDeLState.load_state(f"{trained.run}/steps/3", step=4, verbose=False)
    with pytest.raises(FileNotFoundError):
        my_model().to_state(TX).load_optimizer(str(tmp_path))


def test_a_run_that_was_made_for_a_job_says_that_it_has_no_step_yet(tmp_path):
    made = create_run(tmp_path / "planned", labels={"team": "nlp"})
    with pytest.raises(StepNotFoundError, match=r"no complete step.*Wait for the first save"):
        EasyDeLState.load_state(str(made.uri), verbose=False)


def test_pickle_files_are_refused(tmp_path):
    (tmp_path / "easydel-optstate.pickle").write_bytes(b"cos\nsystem\n(S'exit'\ntR.")
    for load in (EasyDeLState.load_state, my_model().to_state(TX).load_optimizer):
        with pytest.raises(ArgumentError, match="pickle can run code and is never read"):
            load(str(tmp_path))


def test_every_leaf_that_does_not_fit_is_listed_in_one_error(trained):
    class Wider(MyModel):
        def __init__(self, config, **settings):
            super().__init__(config, **settings)
            self.layers[0] = nnx.Linear(64, 32, rngs=settings["rngs"])
            self.head = nnx.Linear(64, 8, use_bias=False, rngs=settings["rngs"])
            del self.layers[1].bias
            self.layers[1].bias = None

    with pytest.raises(TreeMismatchError) as caught:
        EasyDeLState.load_state(trained.run, model_class=Wider, **SAME_MESH)
    assert isinstance(caught.value, ValueError)
    problems = [problem for problem in caught.value.problems if problem.startswith("model/")]
    assert problems == [
        "model/head/kernel: missing from the checkpoint, expected float32[64, 8]",
        "model/layers/0/bias: expected float32[32], stored as float32[64]",
        "model/layers/0/kernel: expected float32[64, 32], stored as float32[64, 64]",
        "model/layers/1/bias: unexpected in the checkpoint, stored as float32[64]",
    ]
    assert any("optimizer/0/mu/head/kernel: missing" in text for text in caught.value.problems)
    for problem in caught.value.problems:
        assert problem in str(caught.value)


UNSUPPORTED = {
    "partition_axis": object(),
    "shard_fns": {},
    "backend": "abacus",
    "platform": "tpu",
    "quantization_platform": "tpu",
    "quantization_method": "nf4",
    "quantization_pattern": ".*",
    "quantization_block_size": 64,
    "shard_attention_computation": False,
    "model_task": "seq2seq",
    "partition_rules": ((".*", PartitionSpec()),),
    "optimizer": "maybe",
    "config_kwargs": {"no_such_field": 1},
    "colour": "red",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_argument_that_cannot_act_is_named(trained, name):
    with pytest.raises(ArgumentError, match=name if name != "config_kwargs" else "no_such_field"):
        EasyDeLState.load_state(trained.run, verbose=False, **{name: UNSUPPORTED[name]})


def test_manifest_and_annotations_tell_about_the_step(trained):
    run = Run.open(trained.run)
    manifest = run.manifest(run.latest())
    assert manifest.model.model_type == "my-model-of-the-tests"
    assert manifest.model.model_class == "MyModel"
    assert manifest.model.config["vocab_size"] == 256
    assert set(manifest.items) == {"meta", "model", "optimizer"}


@pytest.fixture(scope="module")
def sgd_state():
    """A small state whose optimizer keeps nothing but a counter; saves of it are quick."""
    tx, tx_init = make_optimizer("sgd", learning_rate=1e-2)
    return my_model((1, 8, 1, 1)).shard_model().to_state(tx, tx_init=tx_init)


def test_compression_is_asked_for_and_every_state_has_it(sgd_state, tmp_path):
    plain = TrainState.create(params={"w": jnp.zeros((256, 256))}, tx=optax.sgd(1e-2))
    for name, state in (("easydel", sgd_state), ("plain", plain)):
        state.save_state(
            tmp_path / name, step=1, compression="zstd", extras={"n": 1}, verbose=False, wait=True
        )
        run = Run.open(tmp_path / name)
        stored = {leaf.compression for leaf in run.contents(run.step(1)).leaves if leaf.chunks}
        assert stored == {"zstd"}
        with pytest.raises(UnsupportedFormatError, match="unknown compression"):
            state.save_state(tmp_path / name, step=2, compression="lz4", verbose=False)
    loaded = EasyDeLState.load_state(tmp_path / "easydel", verbose=False)
    assert_bit_equal(loaded.graphstate, sgd_state.graphstate)
    assert_bit_equal(TrainState.load_state(tmp_path / "plain", plain).params, plain.params)


def test_a_save_says_which_values_of_a_metric_are_better(sgd_state, tmp_path):
    plain = TrainState.create(params={"w": jnp.zeros(2)}, tx=optax.sgd(1e-2))
    for name, state in (("easydel", sgd_state), ("plain", plain)):
        for step, score in enumerate((0.5, 0.9, 0.7), start=1):
            options = {"metrics": {"score": score}, "better": {"score": "max"}}
            state.save_state(tmp_path / name, step=step, verbose=False, wait=True, **options)
        assert best_step(Run.open(tmp_path / name), "score", None).step == 2


@pytest.mark.parametrize("flag", ["enable", "overwrite", "wait", "save_optimizer"])
@pytest.mark.parametrize("value", ["false", 0, jnp.array(False)])
def test_a_flag_that_is_no_bool_is_refused(sgd_state, tmp_path, flag, value):
    with pytest.raises(ArgumentError, match=flag):
        sgd_state.save_state(tmp_path / "r", **{flag: value})
    assert not (tmp_path / "r").exists()


def test_a_comparison_of_numpy_numbers_tells_whether_to_save(sgd_state, tmp_path):
    turned_off = sgd_state.save_state(tmp_path / "r", enable=np.int64(7) % 2 == 0, verbose=False)
    assert turned_off.state is SaveState.SKIPPED
    saved = sgd_state.save_state(tmp_path / "r", enable=np.int64(8) % 2 == 0, verbose=False)
    saved.wait()
    assert saved.state is SaveState.DURABLE


def test_enable_false_saves_nothing_and_says_so(sgd_state, tmp_path, capsys):
    handle = sgd_state.save_state(tmp_path / "r", enable=False)
    handle.wait()
    assert handle.state is SaveState.SKIPPED
    assert handle.done
    assert not (tmp_path / "r").exists()
    assert "skipped (enable=False)" in capsys.readouterr().err


def test_verbose_tells_on_stderr(sgd_state, tmp_path, capsys):
    sgd_state.save_state(tmp_path / "r", step=4, wait=True)
    EasyDeLState.load_state(tmp_path / "r")
    said = capsys.readouterr()
    assert "saving step 4 (98.8 kB)" in said.err
    assert "step 4 is durable" in said.err
    assert "loading step 4" in said.err
    assert said.out == ""


def test_an_optimizer_that_no_json_describes_must_be_given_again(tmp_path):
    tx = optax.sgd(1e-2, momentum=0.9)
    state = my_model().to_state(tx)
    state.save_state(tmp_path / "r", verbose=False, wait=True)
    with pytest.raises(OptimizerError, match="pass tx=, or tx_init=, or optimizer='skip'"):
        EasyDeLState.load_state(tmp_path / "r", verbose=False)
    loaded = EasyDeLState.load_state(tmp_path / "r", tx=tx, verbose=False)
    assert_bit_equal(loaded.opt_state, state.opt_state)
    assert EasyDeLState.load_state(tmp_path / "r", optimizer="skip", verbose=False).tx is None
    described = {"name": "sgd", "learning_rate": 1e-2, "momentum": 0.9}
    built = EasyDeLState.load_state(tmp_path / "r", tx_init=described, verbose=False)
    assert_bit_equal(built.opt_state, state.opt_state)
    assert built.tx_init == described


def test_an_optimizer_described_at_a_load_takes_the_place_of_the_stored_one(trained):
    slower = {**TX_INIT, "learning_rate": 1e-9}
    loaded = EasyDeLState.load_state(trained.run, tx_init=slower, **SAME_MESH)
    assert loaded.tx_init == slower
    assert loaded.tx is make_optimizer(**slower)[0]
    assert_bit_equal(loaded.opt_state, EasyDeLState.load_state(trained.run, **SAME_MESH).opt_state)
    fresh = EasyDeLState.from_pretrained(trained.run, tx_init=slower, **SAME_MESH)
    assert fresh.tx is loaded.tx
    assert int(host(fresh.opt_state)["0/count"]) == 0
    with pytest.raises(OptimizerError, match="optimizer: expected one of"):
        EasyDeLState.load_state(trained.run, tx_init={"name": "adamx"}, **SAME_MESH)


def test_a_restart_on_a_damaged_step_is_refused_or_goes_on_from_the_newest_sound_one(
    sgd_state, tmp_path
):
    uri = str(tmp_path / "r")
    for step in (1, 2):
        sgd_state.save_state(uri, step=step, verbose=False, wait=True)
    Checkpointer.for_run(uri).close()  # the job ends
    run = Run.open(uri)
    note_verified(run, run.step(2), damage=Damage(at="2026-01-02T03:04:05Z", by="verify"))
    target = TrainState.create(params={"w": jnp.zeros(4)})
    for load in (
        lambda: EasyDeLState.load_or_create(uri, create=pytest.fail, verbose=False),
        lambda: type(sgd_state.model).from_pretrained(uri, verbose=False),
        lambda: sgd_state.load_optimizer(uri),
        lambda: TrainState.load_state(uri, target),
    ):
        with pytest.raises(StepDamagedError, match=f"newest sound step is {run.uri}/steps/1: load"):
            load()
    state = EasyDeLState.load_or_create(uri, create=pytest.fail, damaged="skip", verbose=False)
    assert int(state.step) == 1
    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        saver.step(state.replace(step=state.step + 1))
    assert [(one.step, one.attempt) for one in run.steps()] == [(1, 1), (2, 2)]
    with pytest.raises(ArgumentError, match="damaged: expected one of"):
        EasyDeLState.load_state(uri, damaged="take", verbose=False)


def test_extras_must_be_json_and_a_checkpoint_is_no_run_to_save_to(sgd_state, tmp_path):
    with pytest.raises(ArgumentError, match="extras: expected a mapping of JSON"):
        sgd_state.save_state(tmp_path / "r", extras={"rng": jax.random.key(0)}, verbose=False)
    for checkpoint in ("r/steps/3", "r@production", "r@best:loss"):
        with pytest.raises(ArgumentError, match="found a checkpoint of one"):
            sgd_state.save_state(f"{tmp_path}/{checkpoint}", verbose=False)
    assert os.listdir(tmp_path) == []


def test_a_class_that_is_not_defined_here_must_be_given(sgd_state, tmp_path):
    class Passing(MyModel):
        pass

    Passing(MyModelConfig(), rngs=nnx.Rngs(0)).to_state().save_state(
        tmp_path / "r", verbose=False, wait=True
    )
    from cairn.state import model_classes

    del model_classes._CLASSES[Passing.__module__, "Passing"]
    with pytest.raises(UnknownModelError, match="one model class named 'Passing'"):
        EasyDeLState.load_state(tmp_path / "r", verbose=False)
    loaded = EasyDeLState.load_state(tmp_path / "r", model_class=Passing, verbose=False)
    assert isinstance(loaded.model, Passing)


def test_the_decoder_keeps_its_tokenizer_files_and_its_loss(tmp_path):
    config = DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tokenizer_files={"tokenizer.json": b"{}", "tokenizer_config.json": b'{"a": 1}'},
        sharding_axis_dims=(2, 4, 1, 1),
    )
    model = DecoderForCausalLM(config, rngs=nnx.Rngs(0)).shard_model()
    state = model.to_state()
    state.save_state(tmp_path / "r", verbose=False, wait=True)
    loaded = EasyDeLState.load_state(tmp_path / "r", **SAME_MESH)
    assert loaded.module_config == config
    assert loaded.module_config.tokenizer_files == config.tokenizer_files
    assert jax.tree.leaves(loaded.shardings) == jax.tree.leaves(state.shardings)
    ids = batch(2, 5) % 64
    losses = [float(outputs_of(one, ids, labels=ids).loss) for one in (loaded.model, model)]
    assert losses[0] == losses[1]
    (tokenizer,) = (tmp_path / "r/assets").glob("44136fa3*")  # the SHA-256 of {}
    tokenizer.write_bytes(b"[]")
    with pytest.raises(CorruptionError, match=r"tokenizer\.json"):
        EasyDeLState.load_state(tmp_path / "r", **SAME_MESH)


def test_a_state_is_saved_and_loaded_on_gcs(sgd_state, gcs):
    run = f"{gcs.bucket_uri}/experiments/one"
    with pytest.raises(NotFoundError):
        EasyDeLState.load_state(run, verbose=False)
    sgd_state.save_state(run, step=1, verbose=False, extras={"a": 1}).wait()
    Checkpointer.for_run(run).close()  # before the store goes away with the test
    loaded = EasyDeLState.load_state(f"{run}/steps/1", verbose=False)
    assert_bit_equal(loaded.graphstate, sgd_state.graphstate)
    assert loaded.extras == {"a": 1}


@pytest.fixture
def hugging_face_folder(tmp_path):
    config = DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = DecoderForCausalLM(config, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf", model


def test_a_hugging_face_folder_is_the_first_state_of_a_training(hugging_face_folder):
    folder, model = hugging_face_folder
    state = EasyDeLState.load_state(folder, tx=TX, tx_init=TX_INIT, **SAME_MESH)
    assert int(state.step) == 0
    assert_bit_equal(state.graphstate, model.graphstate)
    assert dict(mesh_of(state.opt_state).shape) == {"dp": 2, "fsdp": 4, "tp": 1, "sp": 1}
    described = EasyDeLState.load_state(folder, tx_init=TX_INIT, **SAME_MESH)
    assert described.tx is TX
    assert_bit_equal(described.opt_state, state.opt_state)
    device = jax.devices()[2]
    alone = EasyDeLState.load_state(folder, device=device, verbose=False)
    assert {leaf.device for leaf in jax.tree.leaves(alone.graphstate)} == {device}
    with pytest.raises(ArgumentError, match="step: expected a checkpoint of a run"):
        EasyDeLState.load_state(folder, step=3, verbose=False)


def test_from_pretrained_starts_afresh_from_weights_or_from_a_checkpoint(
    hugging_face_folder, trained
):
    folder, model = hugging_face_folder
    state = EasyDeLState.from_pretrained(folder, tx=TX, sharding_axis_dims=(1, 8, 1, 1))
    assert_bit_equal(state.graphstate, model.graphstate)
    assert state.opt_state is not None
    state = EasyDeLState.from_pretrained(trained.run, tx=TX, **SAME_MESH)
    assert int(state.step) == 0
    assert int(host(state.opt_state)["0/count"]) == 0
    assert host(state.graphstate)["layers/0/bias"].any()


def test_meta_holds_nothing_but_json(trained):
    run = Run.open(trained.run)
    path = run.step_uri(run.latest()).local_path
    meta = json.loads(Path(path, "meta", "data.json").read_text())
    assert meta["format"] == "cairn.meta"
    assert meta["tx_init"] == TX_INIT
    assert meta["config"]["model_type"] == "my-model-of-the-tests"
    assert meta["module"] == {
        "dtype": "float32",
        "param_dtype": "float32",
        "precision": None,
        "quantization": None,
        "lora": None,
    }


def test_a_state_that_trains_a_part_comes_back_training_that_part(tmp_path):
    """A model split by hand: what was frozen stays so, and has no optimizer state."""
    model = my_model().shard_model()
    graphdef, trained, frozen = nnx.split(model, nnx.PathContains("layers"), ...)
    parts = {"graphdef": graphdef, "graphstate": trained, "graphother": frozen}
    tx, tx_init = make_optimizer("adamw", learning_rate=1e-2)
    state = EasyDeLState.create(**parts, tx=tx, tx_init=tx_init, init_opt_state=True)
    step = jax.jit(train_step)
    state, _ = step(state, batch())
    state.save_state(tmp_path / "run", wait=True, verbose=False)
    again = EasyDeLState.load_state(tmp_path / "run", mesh=model.mesh, verbose=False)
    Checkpointer.for_run(tmp_path / "run").close()
    assert set(again.params) == set(state.params) == {"layers"}
    assert jax.tree.structure(again.graphother) == jax.tree.structure(state.graphother)
    (one, _), (other, _) = step(state, batch()), step(again, batch())
    pairs = zip(jax.tree.leaves(one.opt_state), jax.tree.leaves(other.opt_state), strict=True)
    assert all(np.array_equal(left, right) for left, right in pairs)
    embedding = "embed_tokens", "embedding"
    before, after = model.params[embedding[0]], other.model.params[embedding[0]]
    assert np.array_equal(before[embedding[1]], after[embedding[1]])


def test_each_save_says_what_the_state_is_then(tmp_path):
    """What follows from its structure is kept from save to save, as long as that is the same."""
    model = my_model()
    graphdef, trained, frozen = nnx.split(model, nnx.PathContains("layers"), ...)
    _, usual, others = nnx.split(model, nnx.Param, ...)
    part = EasyDeLState.create(graphdef=graphdef, graphstate=trained, graphother=frozen)
    whole = part.replace(graphstate=usual, graphother=others)

    def meta_of(state, step):
        state.save_state(tmp_path / "run", step=step, wait=True, verbose=False)
        run = Run.open(tmp_path / "run")
        return read_meta(run.step_uri(run.step(step)))

    for step in (1, 3):
        assert [path.split("/")[0] for path in meta_of(part, step)["trainable"]] == ["layers"] * 4
        assert meta_of(whole, step + 1)["trainable"] is None
    object.__setattr__(part.model.config, "hidden_size", 65)  # frozen, and yet
    assert meta_of(part, 5)["config"] == part.model.config.to_dict()


def test_the_time_that_a_save_blocks_is_that_of_the_whole_call(sgd_state, tmp_path):
    class Slow:
        def __index__(self):
            time.sleep(0.2)  # at least so long is to be told
            return 1

    began = time.monotonic()
    handle = sgd_state.save_state(tmp_path / "run", step=Slow(), verbose=False)
    assert 0.2 <= handle.blocked_seconds <= time.monotonic() - began
    handle.wait()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (field, value)
            for field in ("weak", "memory_kinds", "python_numbers")
            for value in ([], "model", {"model": 3})
        ],
        *[
            (field, ["model"])
            for field in ("config", "module", "tx_init", "hyperparameters", "extras", "fields")
        ],
        ("model_class", 3),
        ("trainable", {"model": 1}),
        ("trainable", [1]),
        ("step", "2"),
    ],
)
def test_forged_meta_is_told_as_damage(saved_for_meta, monkeypatch, field, value):
    monkeypatch.setattr(
        stored_checkpoint, "read_meta", lambda reader: {**read_meta(reader), field: value}
    )
    with pytest.raises(CorruptionError, match=f"meta of the step is damaged.*{field}"):
        EasyDeLState.load_state(saved_for_meta, verbose=False)


@pytest.fixture(scope="module")
def saved_for_meta(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meta") / "run"
    EasyDeLState.create(model=my_model()).save_state(folder, step=1, verbose=False, wait=True)
    return folder
