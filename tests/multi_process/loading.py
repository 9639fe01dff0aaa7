"""What each process of a job asks a store for when it loads a state: each has a server of its own.

The servers hold the same objects. What one process asks for is what its server was asked.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax

from cairn import EasyDeLState
from tests.gcs.server import GcsServer, client_environment
from tests.multi_process.launcher import Job
from tests.multi_process.scenarios import digest, host_leaves, make_state

VALUES = re.compile(r"/(?:ocdbt\.process_[0-9]+/)?d/[0-9a-f]+$")
BUCKET = "loaded"
RUN = f"gs://{BUCKET}/run"
JOB_SECONDS = 240

Launch = Callable[..., Job]


class Asked(NamedTuple):
    """What one process asked its server for, but for values.

    Attributes:
        objects: requests of each object that was read, by name.
        lists: requests of listings.
        bytes: of all answers.
    """

    objects: Counter[str]
    lists: int
    bytes: int

    @property
    def requests(self) -> int:
        """Of objects and of listings."""
        return self.objects.total() + self.lists


def save(url: str) -> str:
    """Saves a fresh state, each process its part; a digest of all values."""
    os.environ.update(client_environment(url))
    state = make_state()
    state.save_state(RUN, verbose=False).wait()
    return digest(host_leaves(state))


def load(urls: list[str]) -> str:
    """Loads it, each process from its own server; a digest of all values."""
    os.environ.update(client_environment(urls[jax.process_index()]))
    state = EasyDeLState.load_state(
        RUN, auto_shard_model=True, sharding_axis_dims=(1, -1, 1, 1), verbose=False
    )
    return digest(host_leaves(state))


def ask(launch: Launch, folder: Path, count: int) -> list[Asked]:
    """What each of `count` processes asks for when they load what as many saved."""
    with GcsServer(folder / "saved") as server:
        server.store.create_bucket(BUCKET)
        job = launch("loading.save", {"url": server.url}, count=count)
        saved = job.results(JOB_SECONDS)
    with ExitStack() as stack:
        servers = []
        for number in range(count):
            shutil.copytree(folder / "saved", folder / str(number))
            servers.append(stack.enter_context(GcsServer(folder / str(number))))
        urls = [server.url for server in servers]
        found = launch("loading.load", {"urls": urls}, count=count).results(JOB_SECONDS)
        assert found == saved, "every value is what was saved"
        return [_asked(list(server.requests)) for server in servers]


def _asked(requests: Sequence[Any]) -> Asked:
    others = [one for one in requests if not VALUES.search(one.name)]
    lists = [one for one in others if one.operation.endswith("list")]
    objects = Counter(one.name for one in others if one not in lists)
    return Asked(objects, len(lists), sum(one.answered for one in others))
