"""`python -m tests.service.stalling_server PORT STALL_AT REACHED`: a control plane that hangs.

It is the real one (settings from the environment), but writing a file named STALL_AT… stops after
its first block, for good; then the file REACHED appears. An empty STALL_AT never hangs.
"""

import sys
import threading
from pathlib import Path

import uvicorn

from cairn import create_app
from tests.service.seams import export_job


def main(port: str, stall_at: str, reached: str) -> None:
    real = export_job.write_shard

    def stalling(files, rel, shard, *, on_data, **options):
        def hang(data):
            on_data(data)
            Path(reached).touch()
            threading.Event().wait()

        chosen = hang if stall_at and rel.startswith(stall_at) else on_data
        return real(files, rel, shard, on_data=chosen, **options)

    export_job.write_shard = stalling
    uvicorn.run(create_app(), port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
