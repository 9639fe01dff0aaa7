"""Serves the demo's store until interrupted: `make serve`."""

import argparse
import sys
from pathlib import Path

from examples.demo.servers import control_plane, store


def main() -> int:
    """Starts the store's server if it needs one, and the control plane; waits for Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=("file", "gcs", "s3"), default="file")
    parser.add_argument("--folder", type=Path, default=Path(".demo"))
    parser.add_argument("--port", type=int, default=8321)
    arguments = parser.parse_args()
    folder = arguments.folder / arguments.store
    if not folder.exists():
        print(f"{folder} holds no demo store yet; run: make demo STORE={arguments.store}")
        return 1
    with (
        store(arguments.store, folder) as (root, environment),
        control_plane(root, folder, environment, arguments.port) as (url, _, process),
    ):
        print(f"{root} is served at {url} (API: {url}/openapi.json); Ctrl-C ends it", flush=True)
        try:
            return process.wait()
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
