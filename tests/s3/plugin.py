"""Pytest fixtures of the S3 double: one server for the session, a bucket for each test.

The variables that name it are set while a test uses it, and not for others: they are those that
people set, which some tests look at.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest

from tests.gcs.plugin import Gcs
from tests.s3.server import S3Server, client_environment

_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class S3(Gcs):
    """A running double of S3, as one test sees it."""

    server: S3Server
    kind: ClassVar[str] = "s3"

    @property
    def bucket_uri(self) -> str:
        """ "s3://<bucket>"."""
        return f"s3://{self.bucket}"

    @property
    def env(self) -> dict[str, str]:
        """The variables for a process that the test starts with an environment of its own."""
        return client_environment(self.server.url)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One double for the whole session."""
    with S3Server(tmp_path_factory.mktemp("s3-double")) as server:
        yield server
    assert not server.failures, "\n".join(server.failures)


@pytest.fixture
def s3(s3_server: S3Server) -> Iterator[S3]:
    """A double with a fresh bucket and no faults, where `s3://` leads in this test."""
    bucket = f"test-{os.getpid()}-{next(_NUMBERS)}"
    s3_server.store.create_bucket(bucket)
    with pytest.MonkeyPatch.context() as patch:  # of its own: a test undoes its patches and goes on
        for name, value in client_environment(s3_server.url).items():
            patch.setenv(name, value)
        yield S3(s3_server, bucket)
    s3_server.faults.clear()
    s3_server.store.delete_bucket(bucket, force=True)
    assert s3_server.uploads.names(bucket) == [], "an upload that nobody has completed or aborted"
