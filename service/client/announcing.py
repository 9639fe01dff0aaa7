"""Tells the control plane of `CAIRN_URL` of the steps that a job has saved.

A hint: the server looks at the store, and lists have the step from then on, seconds earlier than
its scanner would find it. Nothing waits for it, and a server that is not there costs a line in the
log, once.
"""

import logging
import os
from typing import Final

logger = logging.getLogger(__name__)

SECONDS: Final = 5.0
"""How long the server may take for an answer."""

_failed = False  # the last time


def announce(run: str, step: int, attempt: int) -> None:
    """Announce a step, if `CAIRN_URL` names a server; failures are logged, the first of a row only.

    Args:
        run: URI of the run. The server knows its folder by the root `CAIRN_ANNOUNCE_ROOT`.
        step: The step that is durable.
        attempt: The attempt that saved it.
    """
    url = os.environ.get("CAIRN_URL")
    if not url:
        return
    # Not before: a job that announces nothing does not load an HTTP client.
    from cairn.service.client.client import Client
    from cairn.service.client.protocol import DEFAULT_ROOT
    from cairn.service.errors import ClientError, ProblemResponseError, SettingsError

    folder, _, name = run.rpartition("/")
    root = os.environ.get("CAIRN_ANNOUNCE_ROOT") or DEFAULT_ROOT
    try:
        with Client(url, timeout=SECONDS) as client:
            found = client.announce(name, step, attempt=attempt, root=root)
    except ProblemResponseError as exc:
        if exc.status == 404:
            _complain(
                "%s knows no step %d of %s in its root %r, so nobody is told of what is saved "
                "here. Name the root that is %s by CAIRN_ANNOUNCE_ROOT, or configure it there.",
                *(url, step, name, root, folder),
            )
        else:
            _complain("%s was not told of step %d of %s: %s", url, step, run, exc)
    except (ClientError, SettingsError) as exc:
        _complain("%s was not told of step %d of %s: %s", url, step, run, exc)
    else:
        if found.uri.startswith(f"{run}/"):
            _done()
        else:
            _complain(
                "%s has another run %s in its root %r: %s. Name the root that is %s by "
                "CAIRN_ANNOUNCE_ROOT.",
                *(url, name, root, found.uri, folder),
            )


def _complain(message: str, *values: object) -> None:
    global _failed
    if not _failed:
        logger.warning(message, *values)
    _failed = True


def _done() -> None:
    global _failed
    _failed = False
