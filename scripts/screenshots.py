"""Makes the pictures of the dashboard that the documentation shows: `make screenshots`.

Two small runs are trained for them, here and now, on the documentation's own text: what the
pictures show of losses, sizes and jobs was measured, not drawn. They need the program `chromium`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

from cairn import (  # noqa: E402
    Client,
    DecoderConfig,
    DecoderForCausalLM,
    EasyDeLState,
    make_optimizer,
)
from examples.demo.servers import control_plane  # noqa: E402

IMAGES: Final = ROOT / "docs" / "images"
MESH: Final = (2, 4, 1, 1)
STEPS, EVERY = 60, 5
LENGTH, BATCH = 64, 16
RUNS: Final = {"llama-docs": 3e-3, "llama-docs-slow": 3e-4}


def main(given: Sequence[str] | None = None) -> int:
    """Trains, serves and takes the pictures; prints their names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=IMAGES)
    output: Path = parser.parse_args(given).output
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "runs")
        for run, rate in RUNS.items():
            train(f"{store}/{run}", rate)
        with (
            control_plane(str(store), Path(folder), {}, port=0) as (url, _, _),
            Client(url) as client,
        ):
            prepare(client)
            for name in take(url, client, output):
                print(output / name)
    return 0


def text() -> np.ndarray:
    """The documentation as bytes."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return np.frombuffer(b"\n".join(page.read_bytes() for page in pages), np.uint8)


def train(run: str, rate: float) -> None:
    """Trains a byte-level Llama of 0.9 million parameters, and saves it with its losses."""
    config = DecoderConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        sharding_axis_dims=MESH,
    )
    model = DecoderForCausalLM(config, rngs=nnx.Rngs(0)).shard_model()
    tx, tx_init = make_optimizer("adamw", learning_rate=rate)
    state = EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)
    known = text()
    held = len(known) * 9 // 10
    numbers = np.random.default_rng(0)

    def batch(first: int, last: int) -> jax.Array:
        starts = numbers.integers(first, last - LENGTH, BATCH)
        return jnp.asarray(np.stack([known[at : at + LENGTH] for at in starts]), jnp.int32)

    def loss_of(parameters: nnx.State, state: EasyDeLState, ids: jax.Array) -> jax.Array:
        loss: jax.Array = state.merge(parameters)(input_ids=ids, labels=ids).loss
        return loss

    @jax.jit
    def train_step(state: EasyDeLState, ids: jax.Array) -> tuple[EasyDeLState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state.graphstate, state, ids)
        return state.apply_gradients(grads=grads), loss

    evaluate = jax.jit(lambda state, ids: loss_of(state.graphstate, state, ids))
    unseen = batch(held, len(known))
    for step in range(1, STEPS + 1):
        state, loss = train_step(state, batch(0, held))
        if step % EVERY == 0:
            metrics = {"loss": float(loss), "eval/loss": float(evaluate(state, unseen))}
            state.save_state(run, step=step, metrics=metrics, verbose=False).wait()


def prepare(client: Client) -> None:
    """Marks what people would: owners, what is good, what is in production."""
    first, second = RUNS
    for run, owner in ((first, "ana"), (second, "ben")):
        client.annotate_run(run, labels={"owner": owner, "data": "docs"})
    half, best = "half way, for the evaluation", "best on the text it has not seen"
    client.promote(first, STEPS // 2, "staging", reason=half, expect=None)
    client.promote(first, STEPS, "production", reason=best, expect=None)
    client.wait(client.convert(first, STEPS).id)


def take(url: str, client: Client, output: Path) -> Iterator[str]:
    """Takes the pictures; their names."""
    executable = shutil.which("chromium")
    if executable is None:
        raise SystemExit("the program 'chromium' is not on PATH: `make test` installs it")
    first, second = RUNS
    ui = f"{url}/ui/default"
    kernel = "layers/0/self_attn/q_proj/kernel"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-gpu"]
        )
        shown = {
            "runs": f"{url}/",
            "run": f"{ui}/{first}",
            "step": f"{ui}/{first}/steps/{STEPS}",
            "tensor": f"{ui}/{first}/steps/{STEPS}/tensor?item=model&path=model/{kernel}",
            "compare": f"{ui}/{first}/steps/{STEPS}/compare?other_run={second}&other={STEPS}",
        }
        for scheme in ("light", "dark"):
            page = browser.new_page(
                locale="en-US",
                viewport={"width": 1280, "height": 860},
                color_scheme="dark" if scheme == "dark" else "light",
            )
            for name, address in shown.items():
                page.goto(address)
                settle(page)
                page.screenshot(path=output / f"dashboard-{name}-{scheme}.png")
                yield f"dashboard-{name}-{scheme}.png"
            page.close()
        browser.close()


def settle(page: Page) -> None:
    """Waits until everything is drawn."""
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(300)


if __name__ == "__main__":
    sys.exit(main())
