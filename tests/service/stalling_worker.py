"""`python -m tests.service.stalling_worker REACHED --name NAME`: a worker that hangs in an export.

Once it has begun to write a shard, for good; then the file REACHED appears.
"""

import functools
import sys
import threading
from pathlib import Path

from tests.service.seams import cli, export_job


def hang(reached: str, *_args: object, **_more: object) -> None:
    Path(reached).touch()
    threading.Event().wait()


if __name__ == "__main__":
    export_job.write_shard = functools.partial(hang, sys.argv.pop(1))
    sys.argv.insert(1, "worker")
    cli.main()
