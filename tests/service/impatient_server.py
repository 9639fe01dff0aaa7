"""`python -m tests.service.impatient_server PORT`: a control plane that tries again at once.

It is the real one (settings from the environment), but what a receiver does not take is sent again
after hundredths of a second, and given up after four tries.
"""

import sys

import uvicorn

from cairn import create_app
from cairn.service.settings import load_settings
from tests.service.seams import sender

TRIES = 4


def main(port: str) -> None:
    sender.RETRY_SECONDS = (0.02,) * (TRIES - 1)
    sender.POLL_SECONDS = 0.02
    sender.ASK_SECONDS = 0.1
    uvicorn.run(create_app(load_settings()), host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1])
