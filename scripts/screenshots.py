"""Makes the pictures of the dashboard that the documentation shows: `make screenshots`.

Three small runs are trained for them, here and now, on the documentation's own text: what the
pictures show of losses, sizes and jobs was measured, not drawn. They need the program `chromium`.
No wait is without an end: each page has half a minute, and all of it five.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Literal

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["CAIRN_WRITER_ID"] = "trainer"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from playwright.sync_api import Browser, sync_playwright  # noqa: E402

from cairn import (  # noqa: E402
    Client,
    DecoderConfig,
    DecoderForCausalLM,
    EasyDeLState,
    Run,
    fork_run,
    make_optimizer,
)
from cairn.storage.store.uri import parse_uri  # noqa: E402
from examples.demo.servers import control_plane  # noqa: E402

IMAGES: Final = ROOT / "docs" / "images"
MOST_BYTES: Final = 150_000
PAGE_SECONDS: Final = 30
ALL_SECONDS: Final = 300
LENGTH, BATCH = 64, 8
STEPS, EVERY, BRANCH, MORE = 160, 16, 80, 48
FIRST, FORKED, OTHER = "llama-docs", "llama-docs-code", "llama-docs-seed-1"
CONFIG: Final = DecoderConfig(
    model_type="llama",
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
)


@dataclass(frozen=True)
class Picture:
    """A page, and how it is taken.

    Attributes:
        name: of the file, after `dashboard-`.
        path: of the page.
        drawn: CSS selectors of what has to be seen before it is taken.
        height: at most so many pixels from the top.
        width: of the window, in pixels.
        scheme: the colours.
    """

    name: str
    path: str
    drawn: tuple[str, ...]
    height: int = 820
    width: int = 1280
    scheme: Literal["light", "dark"] = "light"


def main(given: Sequence[str] | None = None) -> int:
    """Trains, serves and takes the pictures; prints their names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=IMAGES)
    output: Path = parser.parse_args(given).output
    executable = shutil.which("chromium")
    if executable is None:
        raise SystemExit("the program 'chromium' is not on PATH: `make test` installs it")
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(ALL_SECONDS)
    # Should even the end of the parts below not come, the process ends and says where it stood.
    faulthandler.dump_traceback_later(ALL_SECONDS + 60, exit=True)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cairn-") as folder:
        store = Path(folder, "runs")
        train(store)
        with (
            control_plane(str(store), Path(folder), {}, port=0) as (url, _, _),
            Client(url) as client,
            sync_playwright() as playwright,
        ):
            export = prepare(client)
            browser = playwright.chromium.launch(
                executable_path=executable,
                args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
                timeout=PAGE_SECONDS * 1000,
            )
            for picture in pictures(export):
                print(take(browser, url, picture, output))
            browser.close()
    signal.alarm(0)
    faulthandler.cancel_dump_traceback_later()
    return 0


def _too_late(_signal: int, _frame: FrameType | None) -> None:
    raise TimeoutError(f"the pictures were not made within {ALL_SECONDS} s")


def train(store: Path) -> None:
    """Trains byte-level Llamas of 0.9 million parameters on one device, and saves their steps.

    One learns the documentation; from the middle of it a fork goes on with code, and another
    begins from other numbers. All share one compilation.
    """
    docs, code = _text(ROOT / "docs", "*.md"), _text(ROOT / "storage", "*.py")
    tx, tx_init = make_optimizer("adamw", learning_rate=2e-3)

    def begin(seed: int) -> EasyDeLState:
        model = DecoderForCausalLM(CONFIG, rngs=nnx.Rngs(seed))
        return EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)

    @jax.jit
    def train_step(state: EasyDeLState, ids: jax.Array) -> tuple[EasyDeLState, jax.Array]:
        def loss_of(parameters: nnx.State) -> jax.Array:
            loss: jax.Array = state.merge(parameters)(input_ids=ids, labels=ids).loss
            return loss

        loss, grads = jax.value_and_grad(loss_of)(state.graphstate)
        return state.apply_gradients(grads=grads), loss

    def go_on(run: str, state: EasyDeLState, first: int, last: int, text: np.ndarray) -> None:
        numbers = np.random.default_rng(0)
        unseen = len(text) * 9 // 10

        def batch(begin: int, end: int) -> jax.Array:
            starts = numbers.integers(begin, end - LENGTH, BATCH)
            return jnp.asarray(np.stack([text[at : at + LENGTH] for at in starts]), jnp.int32)

        held = batch(unseen, len(text))
        recent: list[float] = []
        for step in range(first, last + 1):
            state, loss = train_step(state, batch(0, unseen))
            recent.append(float(loss))
            if step % EVERY == 0:
                # The same program tells the loss on unseen text; what it learns of it is dropped.
                _, seen = train_step(state, held)
                metrics = {"loss": sum(recent) / len(recent), "eval/loss": float(seen)}
                recent.clear()
                better = {"loss": "min", "eval/loss": "min"}
                save = state.save_state(
                    f"{store}/{run}", step=step, metrics=metrics, better=better, verbose=False
                )
        save.wait()

    go_on(FIRST, begin(0), 1, STEPS, docs)
    trained = Run.open(f"{store}/{FIRST}")
    fork_run(trained, trained.step(BRANCH), parse_uri(f"{store}/{FORKED}"), by="ben")
    forked = EasyDeLState.load_state(f"{store}/{FORKED}", tx=tx, verbose=False)
    go_on(FORKED, forked, BRANCH + 1, BRANCH + MORE, code)
    go_on(OTHER, begin(1), 1, BRANCH, docs)


def _text(folder: Path, pattern: str) -> np.ndarray:
    return np.frombuffer(
        b"\n".join(p.read_bytes() for p in sorted(folder.rglob(pattern))), np.uint8
    )


def prepare(client: Client) -> str:
    """Does what people would: owners, what is good, what is in production; the export's id."""
    owners = {FIRST: "ana", FORKED: "ben", OTHER: "chen"}
    for run, owner in owners.items():
        client.annotate_run(
            run, labels={"owner": owner, "data": "code" if run == FORKED else "docs"}
        )
    client.annotate(FIRST, STEPS, labels={"eval": "passed"})
    client.promote(FIRST, BRANCH, "staging", reason="half way, for the evaluation", expect=None)
    client.promote(FIRST, STEPS, "production", reason="passed the evaluation", expect=None)
    client.wait(client.verify(FIRST, STEPS).id)
    while client.checkpoint(FIRST, STEPS).verified is None:  # comes to be known a moment after
        time.sleep(0.2)
    client.wait(client.restore(FIRST, STEPS, target=f"{FIRST}-2").id)
    client.wait(client.convert(FORKED, BRANCH + MORE).id)
    done = client.wait(client.convert(FIRST, STEPS).id)
    assert done.result is not None
    return str(done.result["artifact_id"])


def pictures(export: str) -> list[Picture]:
    """What is taken."""
    run = f"/ui/default/{FIRST}"
    step = f"{run}/steps/{STEPS}"
    tensor = (
        "item=model&path=model/layers/0/self_attn/q_proj/kernel&slice=0:48,0:48&mesh=fsdp=4,tp=2"
    )
    drawn_run = (".timeline svg", ".chart canvas", "#steps table")
    return [
        Picture("runs", "/", ("#runs table",)),
        Picture("run", run, drawn_run),
        Picture("run-dark", run, drawn_run, scheme="dark"),
        Picture("run-phone", run, drawn_run, width=390, height=844),
        Picture("step", step, ("#notes",)),
        Picture("tensors", f"{step}/tensors?prefix=model/layers/0/self_attn/", ("#tensors table",)),
        Picture("tensor", f"{step}/tensor?{tensor}", (".statistics svg", "img.picture"), 1320),
        Picture(
            "compare",
            f"{step}/compare?other_run={FORKED}&other={BRANCH + MORE}",
            ("table.bars",),
        ),
        Picture("export", f"/artifacts/{export}", ("table",)),
        Picture("operations", "/operations", ("#operations table",)),
    ]


def take(browser: Browser, url: str, picture: Picture, output: Path) -> Path:
    """Takes a picture once all of it is drawn; its file.

    Raises:
        TimeoutError: what has to be seen does not appear (Playwright's own, which names it).
        ValueError: the file is larger than the documentation should carry.
    """
    context = browser.new_context(
        base_url=url,
        locale="en-US",
        color_scheme=picture.scheme,
        viewport={"width": picture.width, "height": picture.height},
    )
    context.set_default_timeout(PAGE_SECONDS * 1000)
    page = context.new_page()
    # "load" waits for images too; streams of events, which never end, are no part of it.
    page.goto(picture.path, wait_until="load")
    for selector in picture.drawn:
        page.locator(selector).first.wait_for(state="visible")
    shown = page.locator("main").bounding_box()
    assert shown is not None
    height = min(picture.height, int(shown["y"] + shown["height"]))
    path = output / f"dashboard-{picture.name}.png"
    page.screenshot(
        path=path,
        clip={"x": 0, "y": 0, "width": picture.width, "height": height},
        animations="disabled",
    )
    context.close()
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"{path} has {size} bytes, above {MOST_BYTES}: show less of the page")
    return path


if __name__ == "__main__":
    sys.exit(main())
