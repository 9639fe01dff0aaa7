"""Pytest fixtures of the GCS double.

`gcs_server` runs one double per test session; `gcs` gives each test a bucket of its own. The
client libraries read the environment when they are imported or first used, so the variables and
the port they name are set when pytest is configured, before any test module is imported. The
port refuses connections until `gcs_server` starts.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from tests.gcs.faults import Faults
from tests.gcs.server import GcsServer, bind, client_environment

_LISTENER = pytest.StashKey[socket.socket]()
_SAVED = pytest.StashKey[dict[str, str | None]]()
_NUMBERS = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    """Binds the session's port and tells every client library of it."""
    listener = bind()
    host, port = listener.getsockname()[:2]
    environment = client_environment(f"http://{host}:{port}")
    config.stash[_LISTENER] = listener
    config.stash[_SAVED] = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    # gcsfs sends blocks of 5 MB as bytes, about which aiohttp warns; ours to bear, not to mend.
    config.addinivalue_line(
        "filterwarnings", "ignore:Sending a large body directly with raw bytes:ResourceWarning"
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Frees the port and puts the environment back."""
    config.stash[_LISTENER].close()
    for name, value in config.stash[_SAVED].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@dataclass(frozen=True)
class Gcs:
    """A running double, as one test sees it.

    Attributes:
        server: the double.
        bucket: name of the test's own, empty bucket.
        kind: name of the fixture.
    """

    server: GcsServer
    bucket: str

    kind: ClassVar[str] = "gcs"

    @property
    def bucket_uri(self) -> str:
        """ "gs://<bucket>"."""
        return f"gs://{self.bucket}"

    @property
    def faults(self) -> Faults:
        """Faults to order; all are taken back when the test ends."""
        return self.server.faults

    @property
    def env(self) -> dict[str, str]:
        """The variables for a process that the test starts with an environment of its own."""
        return client_environment(self.server.url)

    def names(self, prefix: str = "") -> list[str]:
        """The objects in the bucket, by name, without a request."""
        bucket = self.server.store.bucket(self.bucket)
        names: list[str] = []
        while batch := bucket.batch(names[-1] if names else "", after=bool(names)):
            names += [stored.name for stored in batch]
        return [name for name in names if name.startswith(prefix)]

    def file(self, name: str) -> Path:
        """The file that holds an object's bytes, for tests that damage it on purpose."""
        bucket = self.server.store.bucket(self.bucket)
        return bucket.folder.data(bucket.get(name).generation)

    def set_quota(self, nbytes: int | None, *, status: int = 403) -> None:
        """Limits the bytes that the bucket may hold; None lifts the limit."""
        self.faults.set_quota(nbytes, bucket=self.bucket, status=status)


@pytest.fixture(scope="session")
def gcs_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GcsServer]:
    """One double for the whole session, on the port that the environment names."""
    root = tmp_path_factory.mktemp("gcs-double")
    with GcsServer(root, request.config.stash[_LISTENER]) as server:
        yield server
    assert not server.failures, "\n".join(server.failures)


@pytest.fixture
def gcs(gcs_server: GcsServer) -> Iterator[Gcs]:
    """A double with a fresh bucket and no faults; the bucket is removed afterwards."""
    bucket = f"test-{os.getpid()}-{next(_NUMBERS)}"
    gcs_server.store.create_bucket(bucket)
    yield Gcs(gcs_server, bucket)
    gcs_server.faults.clear()
    gcs_server.store.delete_bucket(bucket, force=True)
