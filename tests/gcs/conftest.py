"""What the double's own tests share: Google's client, raw HTTP, and the double as a process."""

import http.client
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from google.cloud import storage

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def client(gcs):
    """Google's own client."""
    client = storage.Client()
    yield client
    client.close()


@pytest.fixture
def bucket(gcs, client):
    """The test's bucket, through Google's own client."""
    return client.bucket(gcs.bucket)


@pytest.fixture
def http_connection(gcs):
    """One keep-alive connection to the double."""
    connection = http.client.HTTPConnection(gcs.server.host, gcs.server.port)
    yield connection
    connection.close()


class Process:
    """The double as a process of its own."""

    def __init__(self, root: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gcs", "--root", str(root), *arguments],
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            text=True,
        )
        self.ready = json.loads(self.process.stdout.readline())
        self.port = self.ready["port"]

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            connection.close()

    def stop(self, number: int) -> int:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        status = self.process.wait(timeout=30)
        self.process.stdout.close()
        return status


@pytest.fixture
def start_process(tmp_path):
    """Starts doubles on one folder, one after the other; none outlives the test."""
    processes = []

    def start(*arguments):
        process = Process(tmp_path / "store", "--bucket", "kept", *arguments)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.stop(9)
