"""Checks of the environment: settings, misspelt names, storage emulators, the data folder."""

import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from cairn.service.command.doctor.findings import Finding, Outcome, without_passwords
from cairn.service.command.variables import PREFIX, unread_variables
from cairn.service.errors import SettingsError
from cairn.service.settings import load_settings
from cairn.service.sizes import size_text

_SECRET: Final = re.compile(r"KEY|SECRET|TOKEN|PASSWORD")
_SMALL_BYTES: Final = 10**9
_FULL_BYTES: Final = 10**8
_WITH_SECRETS: Final = ("CAIRN_ENV_FILE", "CAIRN_KEY_FILE")
_GCS_FLAGS: Final = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")


def check_settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """List the variables that are set, warn of those that nothing reads, and load the settings."""
    unread = unread_variables(environment)
    for name, value in sorted(environment.items()):
        if not name.upper().startswith(PREFIX):
            continue
        if name not in unread:
            yield Finding("settings", Outcome.OK, f"{name}={_shown(name, value)}")
            if name in _WITH_SECRETS:
                yield from _readable_by_all(name, Path(value).expanduser())
            continue
        near = unread[name]
        text = f"{name}: expected a setting of Cairn's, found a name that nothing reads"
        if near:
            fix = f'export {near}="${name}"; unset {name}'
            yield Finding("settings", Outcome.WARN, f"{text}; the nearest is {near}", fix)
        else:
            yield Finding("settings", Outcome.WARN, text, f"unset {name}")
    try:
        load_settings()
    except SettingsError as exc:
        yield Finding("settings", Outcome.FAIL, _shown("", str(exc)), "correct the variable")


def _readable_by_all(name: str, path: Path) -> Iterator[Finding]:
    """Warn of a file with a key or a password that users outside its group may access."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return  # the check that needs the file reports it
    if mode & 0o007:
        text = f"{name}: {path}: expected mode 600, found {mode:o}: it may have a secret"
        yield Finding("settings", Outcome.WARN, text, f"chmod o= {shlex.quote(str(path))}")


def _shown(name: str, value: str) -> str:
    """Return the value of a variable; `***` in place of a secret."""
    return "***" if _SECRET.search(name.upper()) else without_passwords(value)


def check_emulators(environment: Mapping[str, str], schemes: frozenset[str]) -> Iterator[Finding]:
    """Report variables that send requests for buckets to an emulator, maybe left from a test.

    Args:
        environment: Environment variables.
        schemes: URI schemes of the roots.
    """
    hosts = {name: environment[name] for name in _GCS_FLAGS if environment.get(name)}
    places = {re.sub(r"^[a-z]+://", "", host).rstrip("/") for host in hosts.values()}
    used = "gs" in schemes
    unset = f"unset {' '.join(hosts)}"
    named = ", ".join(f"{name}={host}" for name, host in hosts.items())
    if hosts and (len(hosts) < len(_GCS_FLAGS) or len(places) > 1):
        yield Finding(
            "emulators",
            Outcome.FAIL if used else Outcome.WARN,
            f"expected both of {' and '.join(_GCS_FLAGS)} for one place, or none, found {named}: "
            "arrays and listings would go to different stores",
            unset,
        )
    elif hosts:
        yield Finding(
            "emulators",
            Outcome.WARN,
            f"gs:// is not Google Cloud Storage here, found {named}",
            unset,
        )
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):  # the first counts
        if endpoint := environment.get(name):
            yield Finding("emulators", Outcome.OK, f"s3:// is at {name}={endpoint}")
            break


def check_data_folder(folder: Path) -> Iterator[Finding]:
    """Check the permissions and the free space of the folder of the databases.

    Args:
        folder: `CAIRN_DATA_DIR`; a server creates it at its first start.
    """
    name = "data folder"
    quoted = shlex.quote(str(folder))
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        text = f"{folder}: expected a folder, found a file at {there}"
        yield Finding(name, Outcome.FAIL, text, "export CAIRN_DATA_DIR=/another/folder")
        return
    if not os.access(there, os.W_OK | os.X_OK):
        text = f"{folder}: expected a folder that this user may write, found {there} is not"
        yield Finding(name, Outcome.FAIL, text, f'sudo chown "$(id -u)" {shlex.quote(str(there))}')
        return
    if there == folder and (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o077:
        text = f"{folder}: expected mode 700, found {mode:o}: others may look into it"
        yield Finding(name, Outcome.WARN, text, f"chmod 700 {quoted}")
    free = shutil.disk_usage(there).free
    if free < _SMALL_BYTES:
        outcome = Outcome.FAIL if free < _FULL_BYTES else Outcome.WARN
        text = f"{folder}: expected {size_text(_SMALL_BYTES)} free, found {size_text(free)}"
        yield Finding(name, outcome, text, f"df -h {shlex.quote(str(there))}")
        return
    remark = "" if there == folder else " will be created on first start"
    yield Finding(name, Outcome.OK, f"{folder}{remark}, {size_text(free)} free")
