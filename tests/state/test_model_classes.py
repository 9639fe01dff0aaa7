"""Model classes and families are found by name, whatever lies where."""

import subprocess
import sys

import pytest
from flax import nnx

from cairn import (
    CheckpointReader,
    ConfigError,
    DecoderForCausalLM,
    EasyDeLState,
    resolve_checkpoint,
)
from cairn.interop import registry
from cairn.state import model_classes
from tests.tiny import TINY

OF_FILE = "cairn.state.models.decoder.decoder"
NAMED = ["cairn", "cairn.state.models.decoder", "cairn.somewhere.later", OF_FILE]


@pytest.fixture
def namesake():
    """A user's own class that is called like ours."""

    class DecoderForCausalLM(model_classes.shipped_decoder()):
        __module__ = "my_models"

    yield DecoderForCausalLM
    del model_classes._CLASSES["my_models", "DecoderForCausalLM"]


def test_every_class_that_ships_is_in_the_table_under_its_own_module():
    for name, module in model_classes.MODELS.items():
        shipped = model_classes.find(name, model_classes.PACKAGE, path="run")
        assert (shipped.__name__, shipped.__module__) == (name, module)
    own = {name for module, name in model_classes._CLASSES if module.startswith("cairn.")}
    assert own == set(model_classes.MODELS)


def test_what_is_stored_of_a_shipped_class_does_not_depend_on_where_its_file_lies():
    stored = {"model_class": "DecoderForCausalLM", "model_module": "cairn"}
    assert model_classes.class_identity(DecoderForCausalLM) == stored


@pytest.mark.parametrize("module", NAMED)
def test_a_shipped_class_is_found_whatever_module_is_stored(module):
    assert model_classes.find("DecoderForCausalLM", module, path="run") is DecoderForCausalLM


@pytest.mark.parametrize("module", NAMED)
def test_a_users_class_of_the_same_name_changes_nothing(module, namesake):
    assert model_classes.find("DecoderForCausalLM", module, path="run") is DecoderForCausalLM
    assert model_classes.find("DecoderForCausalLM", "my_models", path="run") is namesake
    assert model_classes.class_identity(namesake)["model_module"] == "my_models"


FRESH = """
import os, flax.nnx, optax, orbax.checkpoint
from cairn.state.model_classes import find
for module in {modules!r}:
    child = os.fork()
    if not child:
        print(module, find("DecoderForCausalLM", module, path="run").__name__, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_fresh_process_finds_the_classes_that_ship_with_the_package():
    modules = [None, "cairn", OF_FILE]
    code = FRESH.format(modules=modules)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == [f"{module} DecoderForCausalLM" for module in modules]


def stored_meta(uri):
    run, info = resolve_checkpoint(str(uri))
    return CheckpointReader.open(run.step_uri(info), run.manifest(info)).meta()


def test_checkpoint_that_names_the_file_of_our_class_loads(tmp_path, monkeypatch, namesake):
    model = DecoderForCausalLM(TINY, rngs=nnx.Rngs(0))
    stored = {"model_class": "DecoderForCausalLM", "model_module": OF_FILE}
    with monkeypatch.context() as earlier:
        earlier.setattr("cairn.state.states.description.class_identity", lambda _: stored)
        model.to_state().save_state(tmp_path / "run", verbose=False, wait=True)
    assert stored_meta(tmp_path / "run")["model_module"] == OF_FILE
    loaded = EasyDeLState.load_state(tmp_path / "run", verbose=False)
    assert type(loaded.model) is DecoderForCausalLM


def test_a_new_checkpoint_names_the_package(tmp_path):
    model = DecoderForCausalLM(TINY, rngs=nnx.Rngs(0))
    model.to_state().save_state(tmp_path / "run", verbose=False, wait=True)
    meta = stored_meta(tmp_path / "run")
    assert (meta["model_module"], meta["model_class"]) == ("cairn", "DecoderForCausalLM")


def test_every_family_of_the_table_is_there_and_others_are_refused():
    for model_type in registry.known_families():
        assert registry.family(model_type).model_type == model_type
    with pytest.raises(ConfigError, match=r"one of .*llama.*found 'unheard-of'"):
        registry.family("unheard-of")
