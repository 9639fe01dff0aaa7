"""`python -m tests.service.slow_server SECONDS serve ...`: `cairn serve` with slow exports.

Each block that an export writes waits so many seconds first.
"""

import sys
import time

from tests.service.seams import cli, export_job


def main(seconds: str, *arguments: str) -> None:
    real = export_job.write_shard

    def slow(files, rel, shard, *, on_data, **options):
        def wait_first(data):
            time.sleep(float(seconds))
            on_data(data)

        return real(files, rel, shard, on_data=wait_first, **options)

    export_job.write_shard = slow
    sys.argv[1:] = arguments
    cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
