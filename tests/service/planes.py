"""The control plane as `cairn serve` starts it, in a process of its own."""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from examples.demo.servers import control_plane
from tests.programs.program import Program


@contextmanager
def running_plane(
    root: str | Path,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    port: int = 0,
) -> Iterator[tuple[str, Program]]:
    """The URL of a control plane of a root, which keeps its data in a folder; its process.

    Port 0 takes any free one.
    """
    with control_plane(str(root), folder, environment or {}, port, start) as (url, _, process):
        yield url, process


def start(arguments: list[str], environment: Mapping[str, str], errors: IO[str]) -> Program:
    """Starts Python, for what starts it so (`examples.demo.servers`), but forked."""
    return Program(arguments, env=environment, stdout=subprocess.PIPE, stderr=errors)
