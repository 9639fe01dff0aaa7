"""OpenAPI document of the HTTP API: `python -m cairn.service.command.openapi`."""

import json
import sys

from cairn.service.app import create_app


def main() -> None:
    """Print the OpenAPI document as JSON."""
    json.dump(create_app().openapi(), sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
