"""What a job of several processes saves and loads, at a size that is given; see the benchmark."""

from __future__ import annotations

import dataclasses
import os
import time

import jax

from cairn import EasyDeLState
from tests.gcs.server import client_environment
from tests.multi_process.scenarios import SAVE_SECONDS, SMALL, digest, host_leaves, make_state

BUCKET = "many"
RUN = f"gs://{BUCKET}/run"


def save(url: str, vocabulary: int) -> dict[str, float | str]:
    """Saves a fresh state, each process its part; until it was durable, and a digest of it."""
    os.environ.update(client_environment(url))
    state = make_state(dataclasses.replace(SMALL, vocab_size=vocabulary, hidden_size=128))
    began = time.monotonic()
    state.save_state(RUN, verbose=False).wait(SAVE_SECONDS)
    return {"seconds": time.monotonic() - began, "digest": digest(host_leaves(state))}


def load(urls: list[str], replicas: int) -> dict[str, float | str]:
    """Loads it, each process from its own server, on so many replicas of sharded values."""
    os.environ.update(client_environment(urls[jax.process_index()]))
    began = time.monotonic()
    state = EasyDeLState.load_state(
        RUN, auto_shard_model=True, sharding_axis_dims=(replicas, -1, 1, 1), verbose=False
    )
    seconds = time.monotonic() - began
    return {"seconds": seconds, "digest": digest(host_leaves(state))}
