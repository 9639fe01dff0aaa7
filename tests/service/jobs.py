"""Real llama-shaped checkpoints, and a control plane that runs jobs, for tests of jobs."""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import httpx
import numpy as np
from fastapi.testclient import TestClient

from cairn import Checkpointer, DecoderConfig, ModelInfo, Settings, create_app
from cairn.state.checkpointing.trees import nest
from tests.programs.program import Program
from tests.service.conftest import BASE_URL, PEER
from tests.service.seams import export_job

PATIENCE = 60.0

CONFIG = DecoderConfig(
    model_type="llama",
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
ASSETS = {
    "tokenizer.json": b'{"version": "1.0"}',
    "generation_config.json": b'{"max_length": 64}',
    "config.json": b"never exported: ours is",
}


def shapes_of(config: DecoderConfig = CONFIG) -> dict[str, tuple[int, ...]]:
    """Every leaf of a llama of this config."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    layer = {
        "self_attn/q_proj/kernel": (hidden, query),
        "self_attn/k_proj/kernel": (hidden, key),
        "self_attn/v_proj/kernel": (hidden, key),
        "self_attn/o_proj/kernel": (query, hidden),
        "mlp/gate_proj/kernel": (hidden, mlp),
        "mlp/up_proj/kernel": (hidden, mlp),
        "mlp/down_proj/kernel": (mlp, hidden),
        "input_layernorm/scale": (hidden,),
        "post_attention_layernorm/scale": (hidden,),
    }
    shapes = {"model/embed_tokens/embedding": (config.vocab_size, hidden)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model/layers/{number}/{name}": shape for name, shape in layer.items()}
    return shapes | {"model/norm/scale": (hidden,)}


def leaves_of(config: DecoderConfig = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights."""
    numbers = np.random.default_rng(seed)
    return {
        path: numbers.standard_normal(shape, dtype=np.float32)
        for path, shape in shapes_of(config).items()
    }


def save_llama(
    run_uri: object,
    steps: tuple[int, ...] = (1,),
    *,
    config: DecoderConfig = CONFIG,
    model_type: str = "llama",
) -> dict[int, dict[str, np.ndarray]]:
    """Save a model and something like its optimizer's state; the model's leaves by step."""
    saved = {}
    info = ModelInfo(
        model_type=model_type,
        model_class="DecoderForCausalLM",
        config={**config.to_dict(), "model_type": model_type},
    )
    with Checkpointer(run_uri) as checkpointer:
        for step in steps:
            saved[step] = leaves_of(config, seed=step)
            items = {
                "model": nest(saved[step]),
                "optimizer": {
                    "mu": {"embedding": np.ones((4, 4), np.float32)},
                    "count": np.int32(step),
                },
            }
            checkpointer.save(
                step, items, meta={"step": step}, model=info, assets=ASSETS, labels={"by": "test"}
            ).wait()
    return saved


@contextmanager
def serving(root: Path, data: Path, **settings: object) -> Iterator[TestClient]:
    """A control plane with its job engine, in this process; it looks at its jobs more often."""
    app = create_app(Settings(root=str(root), data_dir=data, **settings))
    with (
        patch("cairn.service.jobs.dbos_engine.waker.POLL_SECONDS", 0.05),
        patch("cairn.service.jobs.watches.POLL_SECONDS", 0.05),
        TestClient(app, base_url=BASE_URL, client=PEER) as client,
    ):
        yield client


def watch(http: httpx.Client | TestClient, operation: str) -> dict[str, object]:
    """The operation once it has ended, from its event stream."""
    last = None
    with http.stream("GET", f"/v1/operations/{operation}/events") as stream:
        assert stream.status_code == 200, stream.read()
        for line in stream.iter_lines():
            if line.startswith("data: "):
                last = json.loads(line.removeprefix("data: "))
    assert last is not None
    return last


def done(
    http: TestClient, path: str, body: dict[str, object], headers: dict[str, str] | None = None
) -> dict[str, object]:
    """Start a job and see it succeed; the operation."""
    answer = http.post(path, json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    ended = watch(http, answer.json()["id"])
    assert ended["state"] == "succeeded", ended
    return ended


def artifact_of(http: httpx.Client | TestClient, operation):
    """The artifact that an operation made."""
    answer = http.get(f"/v1/artifacts/{operation['result']['artifact_id']}")
    assert answer.status_code == 200, answer.text
    return answer.json()


class Hold:
    """Makes writing a shard stop after each block until it is opened; a cancel gets through."""

    def __init__(self, monkeypatch):
        self.reached, self.opened = threading.Event(), threading.Event()
        real = export_job.write_shard

        def held(files, rel, shard, *, on_data, **options):
            def wait(data):
                on_data(data)
                self.reached.set()
                while not self.opened.wait(0.01):
                    on_data(memoryview(b""))

            return real(files, rel, shard, on_data=wait, **options)

        monkeypatch.setattr(export_job, "write_shard", held)


def tries(root: Path, run: str) -> list[Path]:
    """Folders of export tries, published or not."""
    return sorted(path for path in (root / run / "exports").glob("*/*/*") if path.is_dir())


@contextmanager
def control_plane(
    root: Path, data: Path, *, stall_at: str = "", reached: Path | None = None
) -> Iterator[tuple[httpx.Client, Program]]:
    """A control plane in a process of its own, and a client of it; see `stalling_server`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = Program(
        ["-m", "tests.service.stalling_server", str(port), stall_at, str(reached)],
        env={**os.environ, "CAIRN_ROOT": str(root), "CAIRN_DATA_DIR": str(data)},
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            until(lambda: _answers(http))
            yield http, process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(reached: Callable[[], bool]) -> None:
    """Wait for something in another process, which can set no event here."""
    for _ in range(int(PATIENCE / 0.05)):
        if reached():
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing happened within {PATIENCE} s")


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False
