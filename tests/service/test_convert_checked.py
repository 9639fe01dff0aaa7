"""Exports whose logits are held against the checkpoint's, over HTTP."""

import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from cairn import DecoderConfig, DecoderForCausalLM, EasyDeLState, parse_uri
from cairn.service.jobs.kinds import convert
from tests.programs.program import Program
from tests.service.jobs import PATIENCE, artifact_of, done, serving, tries, watch
from tests.service.seams import logits_check

CONVERT = "/v1/roots/default/runs/{}/checkpoints/{}:convert"
SIZES = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
}


def save(root, name, model):
    EasyDeLState.create(model=model).save_state(str(root / name), wait=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    config = DecoderConfig(model_type="mistral", sliding_window=9, **SIZES)
    save(root, "plain", DecoderForCausalLM(config, rngs=nnx.Rngs(0)))
    adapted = DecoderForCausalLM(config, rngs=nnx.Rngs(1))
    adapted.quantize("8bit")
    adapted.apply_lora_to_layers(lora_rank=2, lora_pattern="q_proj")
    for layer in adapted.model.layers:
        lora_b = layer.self_attn.q_proj.kernel_lora_b
        lora_b.set_value(jax.random.normal(jax.random.key(0), lora_b[...].shape))
    save(root, "adapted", adapted)
    return root


@pytest.fixture(scope="module")
def http(root, tmp_path_factory):
    with serving(root, tmp_path_factory.mktemp("data")) as client:
        yield client


@pytest.fixture
def forked(monkeypatch):
    """Checks whose processes are forked: to start them afresh, as `make proofs` has one do, takes
    most of their time."""

    def popen(command, **options):
        return Program(command[1:], **options)

    starting = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE)
    monkeypatch.setattr(logits_check, "subprocess", starting)


def report_of(http, made):
    uri = parse_uri(artifact_of(http, made)["uri"])
    with open(f"{uri.local_path}/logits_check.json") as file:
        return json.load(file)


@pytest.mark.usefixtures("forked")
def test_the_report_beside_an_export_says_how_far_its_logits_are(http):
    """Of layers that are quantized and adapted; of a plain model `make proofs` has them checked."""
    body = {"check_logits": True, "dtype": "bfloat16"}
    report = report_of(http, done(http, CONVERT.format("adapted", 0), body))
    assert 0 < report["relative_difference"] <= report["tolerance"] <= 0.04
    assert report["largest_logit"] > 0.01
    assert "transformers" in report["export"]["logits"]
    assert len(report["tokens"][0]) == 64


@pytest.mark.usefixtures("forked")
def test_an_export_that_computes_something_else_is_never_published(http, root, monkeypatch):
    real = convert.export_sources

    def wrong(*args, **options):
        tensors, config = real(*args, **options)
        return tensors, {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}

    monkeypatch.setattr(convert, "export_sources", wrong)
    body = {"check_logits": True, "dtype": "float16"}
    started = http.post(CONVERT.format("plain", 0), json=body).json()
    ended = watch(http, started["id"])
    assert "does not compute what the checkpoint does" in ended["error"]["detail"]
    assert not [path for path in tries(root, "plain") if started["id"] in path.name]


@pytest.mark.usefixtures("forked")
def test_a_tensor_that_transformers_would_make_up_fails_the_check(http, monkeypatch):
    real = convert.export_sources

    def less(*args, **options):
        tensors, config = real(*args, **options)
        return [tensor for tensor in tensors if "layers.0.mlp.up" not in tensor.name], config

    monkeypatch.setattr(convert, "export_sources", less)
    body = {"check_logits": True, "max_shard_size": "1MB"}
    started = http.post(CONVERT.format("plain", 0), json=body).json()
    ended = watch(http, started["id"])
    assert "model.layers.0.mlp.up_proj.weight: missing" in ended["error"]["detail"]


def test_a_cancelled_check_ends_its_process(http, monkeypatch):
    begun = []
    real = subprocess.Popen

    def popen(*args, **options):
        begun.append(real(*args, **options))
        return begun[-1]

    monkeypatch.setattr(logits_check.subprocess, "Popen", popen)
    body = {"check_logits": True, "max_shard_size": "2MB"}
    operation = http.post(CONVERT.format("plain", 0), json=body).json()["id"]
    deadline = time.monotonic() + PATIENCE
    while not begun and time.monotonic() < deadline:
        time.sleep(0.01)
    http.post(f"/v1/operations/{operation}:cancel")
    assert watch(http, operation)["state"] == "cancelled"
    assert [process.returncode for process in begun] == [-signal.SIGKILL]


def test_a_process_of_a_check_ends_with_the_one_that_began_it():
    program = "from cairn.state.models.parent_process import end_with_parent as e; e()\n"
    program += "import time; print('up', flush=True); time.sleep(600)"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"up\n"
    child.stdin.close()
    assert child.wait(PATIENCE) == 1


@pytest.mark.parametrize(
    "body", [{"format": "gguf"}, {"lora": "keep"}], ids=lambda body: next(iter(body))
)
def test_what_transformers_does_not_load_as_a_model_is_refused_at_once(http, body):
    answer = http.post(CONVERT.format("adapted", 0), json={"check_logits": True, **body})
    assert answer.status_code == 422
    assert "check_logits: expected format 'huggingface'" in answer.json()["detail"]


def test_a_worker_without_the_frameworks_says_so(http, monkeypatch):
    monkeypatch.setattr(logits_check.importlib.util, "find_spec", lambda name: None)
    body = {"check_logits": True, "max_shard_size": "3MB"}
    started = http.post(CONVERT.format("plain", 0), json=body).json()
    detail = watch(http, started["id"])["error"]["detail"]
    assert "found no jax, flax, torch, transformers" in detail


def test_the_tokens_reach_beyond_the_window_and_stay_within_the_positions():
    config = DecoderConfig(model_type="mistral", sliding_window=80, **SIZES)
    tokens = logits_check.fixed_tokens(config)
    assert tokens.shape == (2, 96)
    assert tokens.max() < 131
    np.testing.assert_array_equal(tokens, logits_check.fixed_tokens(config))


def test_logits_that_are_no_numbers_differ():
    nothing = np.full((1, 2, 3), np.nan, np.float32)
    compared = logits_check.compare(nothing, np.ones((1, 2, 3), np.float32))
    assert not compared["relative_difference"] <= 1.0
