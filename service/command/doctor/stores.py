"""Checks of a root: it answers, meets the store checks, and its clock agrees with this host's."""

import os
import shlex
from collections.abc import Iterator
from typing import Final

from cairn.counts import count_text
from cairn.service.command.doctor.findings import Finding, Outcome
from cairn.service.command.doctor.s3 import check_bucket, check_credentials
from cairn.storage.errors import StorageError, StoreCheckError
from cairn.storage.runs.lease import CLOCK_MARGIN_SECONDS
from cairn.storage.store.deadlines import deadline_after, deadline_seconds_left
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI
from cairn.storage.store_checks.clocks import seconds_ahead
from cairn.storage.store_checks.probe import probe_now

_CLOCK_WARN_SECONDS: Final = CLOCK_MARGIN_SECONDS / 3
_REACH: Final = "check address, credentials and network"
_SET_CLOCK: Final = "sudo timedatectl set-ntp true"


def check_root(name: str, uri: StoreURI, *, probe: bool, seconds: float) -> Iterator[Finding]:
    """Check that a root answers; with `probe`, also its clock and what a store must promise.

    Args:
        name: Name of the root.
        uri: URI of the root.
        probe: Write test files for a moment, as each job does at its first save; none of them stay.
        seconds: Time to wait for the store.
    """
    check = f"root {name}"
    with deadline_after(seconds):
        if uri.scheme == "file" and (finding := _folder_problem(check, uri)):
            yield finding
            return
        try:
            if uri.scheme == "s3":
                yield check_credentials(check, uri)
            count = len(open_files(uri).list())
        except StorageError as exc:
            yield Finding(check, Outcome.FAIL, _error_text(exc, uri, seconds), _REACH)
            return
        yield Finding(check, Outcome.OK, f"{uri} answers, {count_text(count, 'entry')}")
        if uri.scheme == "s3":
            yield from check_bucket(check, uri)
        if not probe:
            return
        try:
            probe_now(uri)
            ahead = seconds_ahead(uri)
        except StoreCheckError as exc:
            text = "; ".join((str(exc).splitlines()[0], *exc.problems))
            yield Finding(check, Outcome.FAIL, text, "use another store for runs, or fix this one")
        except StorageError as exc:
            if deadline_seconds_left() == 0:
                fix = _REACH
            elif uri.scheme == "file":
                fix = f'sudo chown "$(id -u)" {shlex.quote(uri.local_path)}'
            else:
                fix = "give this identity the right to read, write and delete objects there"
            yield Finding(check, Outcome.FAIL, _error_text(exc, uri, seconds), fix)
        else:
            yield Finding(check, Outcome.OK, "compare-and-swap works")
            if ahead is not None:
                yield _clock(check, ahead)


def _error_text(error: StorageError, uri: StoreURI, seconds: float) -> str:
    """Return the error's text, or that of a timeout if the check's time is up.

    After a timeout the error names the seconds that its own wait had left, not the deadline.
    """
    if deadline_seconds_left() == 0:
        return f"{uri}: expected an answer within {seconds:.3g} s, found none"
    return str(error)


def _folder_problem(check: str, uri: StoreURI) -> Finding | None:
    path = uri.local_path
    if not os.path.lexists(path):
        text = f"{uri}: expected a folder, found nothing; the first save will create it"
        return Finding(check, Outcome.WARN, text, f"mkdir -p {shlex.quote(path)}")
    if not os.path.isdir(path):
        return Finding(
            check, Outcome.FAIL, f"{uri}: expected a folder, found none", "correct CAIRN_ROOT"
        )
    return None


def _clock(check: str, ahead: float) -> Finding:
    apart = abs(ahead)
    where = "ahead of" if ahead > 0 else "behind"
    text = f"expected a clock within {CLOCK_MARGIN_SECONDS:.0f} s of the store's, found this "
    text += f"host's {apart:.1f} s {where} it"
    if apart > CLOCK_MARGIN_SECONDS:
        return Finding(check, Outcome.FAIL, f"{text}: leases end too soon or too late", _SET_CLOCK)
    if apart > _CLOCK_WARN_SECONDS:
        return Finding(check, Outcome.WARN, text, _SET_CLOCK)
    return Finding(check, Outcome.OK, "its clock agrees with this host's")
