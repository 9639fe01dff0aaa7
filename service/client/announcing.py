"""Announcements of saved steps to the control plane at `CAIRN_URL`.

An announcement is a hint: the server reads the step from the store and lists it seconds before its
scanner would. No save depends on it. An unreachable server costs one line in the log.
"""

import logging
import os
from typing import Final

logger = logging.getLogger(__name__)

SECONDS: Final = 5.0
"""Longest time to wait for the server's answer."""

_failed = False  # the last announcement failed; later failures are logged only after a success


def announce(run: str, step: int, attempt: int) -> None:
    """Announce a step if `CAIRN_URL` is set; log only the first of several failures in a row.

    Args:
        run: URI of the run. Its name on the server is that of the folder, in the root that the
            variable `CAIRN_ANNOUNCE_ROOT` names.
        step: The step that is durable.
        attempt: The attempt that saved it.
    """
    global _failed
    url = os.environ.get("CAIRN_URL")
    if not url:
        return
    # Imported late: a job that announces nothing does not load an HTTP client.
    from cairn.service.client.client import Client
    from cairn.service.client.protocol.paths import DEFAULT_ROOT
    from cairn.service.errors import ClientError, ProblemResponseError, SettingsError

    folder, _, name = run.rpartition("/")
    root = os.environ.get("CAIRN_ANNOUNCE_ROOT") or DEFAULT_ROOT
    try:
        with Client(url, timeout=SECONDS) as client:
            checkpoint = client.announce(name, step, attempt=attempt, root=root)
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
        if checkpoint.uri.startswith(f"{run}/"):
            _failed = False
        else:
            _complain(
                "%s has another run %s in its root %r: %s. Name the root that is %s by "
                "CAIRN_ANNOUNCE_ROOT.",
                *(url, name, root, checkpoint.uri, folder),
            )


def _complain(message: str, *values: object) -> None:
    global _failed
    if not _failed:
        logger.warning(message, *values)
    _failed = True
