"""`cairn adopt`, and what the control plane does with the run that it makes."""

import json
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cairn import Checkpointer, Run, roll_back
from tests.plain_orbax import manager
from tests.service.commands import cairn_here
from tests.service.planes import running_plane
from tests.storage.orbax_import.folders import everything
from tests.trainers.kept import kept, store

PATHS = {
    r"state/params/transformer/wte": "model/embed_tokens/embedding",
    r"state/params/transformer/h_(\d+)/attn/(q|k|v|o)": r"model/layers/\1/self_attn/\2_proj/kernel",
    r"state/params/transformer/h_(\d+)/mlp/(gate|up|down)": r"model/layers/\1/mlp/\2_proj/kernel",
    r"state/params/transformer/h_(\d+)/ln_1": r"model/layers/\1/input_layernorm/scale",
    r"state/params/transformer/h_(\d+)/ln_2": r"model/layers/\1/post_attention_layernorm/scale",
    r"state/params/transformer/ln_f": "model/norm/scale",
    r"state/params/head": "lm_head/kernel",
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def tree_of(model: LlamaForCausalLM) -> dict:
    """Its weights as a trainer of its own kind names them."""
    found = {name: value.detach().numpy() for name, value in model.state_dict().items()}

    def kernel(name):
        return found[f"{name}.weight"].T.copy()

    layers = {}
    for number in range(model.config.num_hidden_layers):
        inner = f"model.layers.{number}"
        layers[f"h_{number}"] = {
            "attn": {one: kernel(f"{inner}.self_attn.{one}_proj") for one in "qkvo"},
            "mlp": {one: kernel(f"{inner}.mlp.{one}_proj") for one in ("gate", "up", "down")},
            "ln_1": found[f"{inner}.input_layernorm.weight"],
            "ln_2": found[f"{inner}.post_attention_layernorm.weight"],
        }
    transformer = {
        "wte": found["model.embed_tokens.weight"],
        "ln_f": found["model.norm.weight"],
        **layers,
    }
    return {
        "params": {"transformer": transformer, "head": kernel("lm_head")},
        "opt_state": {"mu": {"head": np.zeros((16, 64), np.float32)}},
        "step": 3,
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory, model) -> Path:
    root = tmp_path_factory.mktemp("store")
    manager(root.parent / "theirs", tree_of(model), steps=(3, 6))
    model.config.save_pretrained(root.parent)
    (root.parent / "map.json").write_text(json.dumps(PATHS))
    done = cairn_here(
        "adopt",
        str(root.parent / "theirs"),
        "--run",
        str(root / "adopted"),
        "--config",
        str(root.parent / "config.json"),
        "--map",
        str(root.parent / "map.json"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["step\tfound", "3\tadopted", "6\tadopted"]
    assert str(root / "adopted") in done.stderr
    assert f"cairn serve --adopt-from {root.parent / 'theirs'}" in done.stderr
    manager(root.parent / "many", steps=tuple(range(1, 8)))
    assert cairn_here("adopt", f"{root.parent}/many", "--run", f"{root}/verbs").returncode == 0
    return root


@pytest.fixture(scope="module")
def url(root, tmp_path_factory):
    allowed = {
        "CAIRN_ADOPT_FROM": json.dumps(
            {"default": [str(root.parent / name) for name in ("theirs", "many")]}
        )
    }
    with running_plane(root, tmp_path_factory.mktemp("plane"), allowed) as (url, _):
        yield url


def test_an_adopted_model_is_exported_for_torch(url, root, model):
    done = cairn_here("convert", "adopted/steps/3", "--watch", url=url)
    assert done.returncode == 0, done.stderr
    (folder,) = {path.parent for path in (root / "adopted" / "exports").rglob("config.json")}
    exported = AutoModelForCausalLM.from_pretrained(folder)
    expected = model.state_dict()
    for name, value in exported.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_adopted_steps_are_listed_located_promoted_verified_and_forked(url, root):
    listed = cairn_here("checkpoints", "adopted", url=url).stdout
    assert [line.split("\t")[0] for line in listed.splitlines()] == ["step", "6", "3"]
    assert cairn_here("promote", "adopted", "3", "good", url=url).returncode == 0
    theirs = str(root.parent / "theirs" / "3")
    for address in ("adopted@good", f"{root}/adopted@good"):
        assert cairn_here("path", address, url=url).stdout.strip() == theirs
    assert ocp.PyTreeCheckpointer().restore(f"{theirs}/default")["step"] == 3
    done = cairn_here("verify", "adopted", "--all", url=url)
    assert done.returncode == 0, done.stderr
    done = cairn_here("fork", "adopted@good", "again", "--watch", url=url)
    assert done.returncode == 0, done.stderr
    done = cairn_here("convert", "again", "--watch", url=url)
    assert done.returncode == 0, done.stderr


def test_no_verb_changes_what_is_its_owners(url, root):
    theirs = root.parent / "many"
    before = everything(theirs)

    def done(*arguments):
        found = cairn_here(*arguments, url=url)
        assert found.returncode == 0, found.stderr
        assert everything(theirs) == before, arguments
        return found

    def listed():
        lines = done("checkpoints", "verbs").stdout.splitlines()[1:]
        return [line.split("\t")[0] for line in lines]

    said = done("delete", "verbs/steps/2", "--grace", "1h").stderr
    assert f"{theirs}/2 stays: it was adopted, and is its owner's." in said.replace("file://", "")
    assert listed() == ["7", "6", "5", "4", "3", "1"]
    done("undelete", "verbs/steps/2")
    done("prune", "verbs", "--keep-last", "3", "--grace", "0s", "--apply", "--watch")
    assert listed() == ["7", "6", "5"]
    assert "4 found" in done("gc", f"{root}/verbs", "--delete").stderr
    assert not (root / "verbs" / "attempts" / "1" / "4").exists()
    run = Run.open(root / "verbs")
    roll_back(run, run.step(6), by="me")
    assert listed() == ["6", "5"]
    done("gc", f"{root}/verbs", "--delete")
    (root / "verbs" / "manifests" / "6.1.json").write_text("{")
    done("repair", "verbs", "--apply", "--forget", "manifests/6.1.json")
    assert listed() == ["5"]
    done("verify", "verbs/steps/5")
    done("fork", "verbs/steps/5", "alone", "--watch")
    with Checkpointer(root / "verbs") as checkpointer:
        checkpointer.save(100, {"state": {"w": np.zeros((4, 4), np.float32)}}).wait()
        checkpointer.save(101, {"state": {"w": np.zeros((4, 4), np.float32)}}).wait()
    done("prune", "verbs", "--keep-last", "1", "--grace", "0s", "--apply", "--watch")
    done("gc", f"{root}/verbs", "--delete")
    assert listed() == ["101"]
    shutil.rmtree(root / "verbs")
    assert everything(theirs) == before
    assert cairn_here("adopt", str(theirs), "--run", f"{root}/afresh").returncode == 0
    assert everything(theirs) == before


@pytest.mark.parametrize("beside", [True, False])
def test_an_import_ends_with_what_to_do_next(tmp_path, beside):
    name = "maxtext-llama3.1-scanned"
    store(name, tmp_path / "out" / "checkpoints")
    if beside:
        lines = (f"{key}: {json.dumps(value)}" for key, value in kept(name)[1].items())
        (tmp_path / "out" / "config.yml").write_text("\n".join(lines))
    run = tmp_path / "runs" / "tiny"
    done = cairn_here("adopt", f"{tmp_path}/out/checkpoints", "--run", str(run))
    assert done.returncode == 0, done.stderr
    opened = f"{tmp_path}/out" if beside else f"{tmp_path}/out/checkpoints"
    assert done.stderr.splitlines() == [
        f"The run is file://{run}",
        f"Its steps: cairn checkpoints {run}",
        f"A server of file://{run.parent} opens its files with: cairn serve --adopt-from {opened}",
        "MaxText stored them. A server exports them: cairn convert tiny/steps/1"
        + ("" if beside else " --config FILE"),
    ]
    assert cairn_here("checkpoints", str(run), url="http://127.0.0.1:1").returncode == 0


def test_a_map_that_does_not_make_the_model_names_every_leaf(root, tmp_path):
    rules = {name: path for name, path in PATHS.items() if "ln_f" not in name}
    rules[r"state/params/transformer/h_(\d+)/attn/q"] = r"model/layers/\1/self_attn/k_proj/kernel"
    rules = dict(reversed(rules.items()))
    (tmp_path / "map.json").write_text(json.dumps(rules))
    done = cairn_here(
        "adopt",
        str(root.parent / "theirs" / "3"),
        "--run",
        str(tmp_path / "run"),
        "--config",
        str(root.parent / "config.json"),
        "--map",
        str(tmp_path / "map.json"),
    )
    assert done.returncode == 1
    for part in (
        "model/norm/scale: no leaf is mapped to it",
        "h_0/attn/q: mapped to model/layers/0/self_attn/k_proj/kernel, as",
        "model/layers/1/self_attn/q_proj/kernel: no leaf is mapped to it",
        "No step is listed",
    ):
        assert part in done.stderr
    assert not (tmp_path / "run").exists()


def test_wrong_calls_are_one_line(tmp_path):
    done = cairn_here("adopt", str(tmp_path / "nothing"))
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "nothing to adopt" in done.stderr
    done = cairn_here("adopt", str(tmp_path), "--config", "config.json")
    assert done.returncode == 2
    assert "--config and --map go together" in done.stderr
    for text in ("[]", "{", None):
        file = tmp_path / f"{text}.json"
        if text is not None:
            file.write_text(text)
        done = cairn_here("adopt", str(tmp_path), "--config", str(file), "--map", str(file))
        assert done.returncode == 2
        assert file.name in done.stderr.replace("\n", "").replace("│", "")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mistyped"}))
    done = cairn_here("adopt", str(tmp_path), "--config", str(file), "--map", str(file))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "found 'mistyped'" in done.stderr
