"""The `cairn doctor` command and its list of checks."""

import contextlib
import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from cairn.installation import installed_version, missing_extra
from cairn.service.client.protocol.paths import DEFAULT_URL
from cairn.service.command.doctor.environment import (
    check_data_folder,
    check_emulators,
    check_settings,
)
from cairn.service.command.doctor.findings import (
    Check,
    Finding,
    Outcome,
    run_checks,
    without_passwords,
)
from cairn.service.command.doctor.installation import (
    check_commands,
    check_entry_points,
    check_names,
    check_versions,
)
from cairn.service.command.doctor.server import check_server
from cairn.service.command.failures import ExitStatus
from cairn.service.command.options import TIME, UrlOption, console, errors, name_place
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.errors import SettingsError
from cairn.service.settings import Settings, load_settings

app: Final = typer.Typer()

_ASKED_SECONDS: Final = 10.0
_SLACK: Final = 1.5
"""Ratio of a check's deadline to that of its requests: the check can still report a timeout."""


@app.command()
def doctor(
    probe: Annotated[
        bool,
        typer.Option("--probe/--no-probe", help="Write to each root for a moment, and clean up."),
    ] = True,
    timeout: Annotated[
        float | None, typer.Option(help="To wait for an answer; default: 10s.", **TIME)
    ] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Check this installation and suggest fixes.

    The command checks settings, roots, databases, the installation and the control plane, with the
    CAIRN_* variables of this shell: run it where the server or the job runs. It changes nothing,
    but writes test files to each root for a moment, unless --no-probe. Standard error says first
    which stores, databases and server are meant. The exit status is 1 if a check fails.
    """
    seconds = _ASKED_SECONDS if timeout is None else timeout
    settings = None
    with contextlib.suppress(SettingsError):  # the check `settings` reports it
        settings = load_settings()
    server = url or os.environ.get("CAIRN_URL") or DEFAULT_URL
    checks = _checks(settings, url, probe=probe, seconds=seconds)
    if settings is not None and "control plane" not in checks:
        name_place(settings)
    errors.print(f"Of the server {without_passwords(server)}", soft_wrap=True, markup=False)
    findings_list = run_checks(checks, seconds=seconds * _SLACK)
    if json:
        findings = [
            {
                "check": finding.check,
                "outcome": finding.outcome.value,
                "found": finding.found,
                "fix": finding.fix,
            }
            for finding in findings_list
        ]
        print_document({"ok": not _failed(findings_list), "findings": findings})
    else:
        _list(findings_list)
    if _failed(findings_list):
        raise typer.Exit(ExitStatus.FAILED)


def _failed(findings: Iterable[Finding]) -> bool:
    return any(finding.outcome is Outcome.FAIL for finding in findings)


def _list(findings: Iterable[Finding]) -> None:
    if not console.is_terminal:
        rows = (
            (finding.outcome.value, finding.check, finding.found, finding.fix)
            for finding in findings
        )
        print_table(console, ("outcome", "check", "found", "fix"), rows)
        return
    colors = {Outcome.OK: "green", Outcome.WARN: "yellow", Outcome.FAIL: "red"}
    for finding in findings:
        console.print(f"{finding.outcome.value:<5}", style=colors[finding.outcome], end="")
        console.print(f"{finding.check}: {finding.found}", soft_wrap=True)
        if finding.fix:
            console.print(f"     fix: {finding.fix}", soft_wrap=True)


def _checks(
    settings: Settings | None, url: str | None, *, probe: bool, seconds: float
) -> dict[str, Check]:
    """Return the checks by name; without settings, those that need none."""
    checks: dict[str, Check] = {
        "settings": lambda: check_settings(os.environ),
        "versions": check_versions,
        "entry points": lambda: check_entry_points(sys.path),
        "names": lambda: check_names(sys.path),
        "command": lambda: check_commands(os.environ.get("PATH", ""), Path(sys.executable).parent),
    }
    if settings is not None:
        try:
            checks |= _checks_of_server(settings, probe, seconds)
        except ModuleNotFoundError as error:
            explained = missing_extra(error, used="the control plane")
            if explained is None:
                raise
            text = (
                f"not installed here (no module `{explained.name}`), so no roots and databases are "
                "checked. A host without a server needs none."
            )
            finding = Finding("control plane", Outcome.OK, text)
            checks["control plane"] = lambda: [finding]
    checks["server"] = lambda: check_server(
        url, os.environ, version=installed_version(), seconds=seconds
    )
    return checks


def _checks_of_server(settings: Settings, probe: bool, seconds: float) -> dict[str, Check]:
    """Return the checks of roots and databases, which need the extras of a server.

    Raises:
        ModuleNotFoundError: They are not installed.
    """
    from cairn.service.command.doctor import databases, provider, stores

    roots = settings.root_uris
    schemes = frozenset(uri.scheme for uri in roots.values())
    return {
        "emulators": lambda: check_emulators(os.environ, schemes),
        "data folder": lambda: check_data_folder(settings.data_dir),
        **{
            f"root {name}": partial(stores.check_root, name, uri, probe=probe, seconds=seconds)
            for name, uri in roots.items()
        },
        "catalog": lambda: databases.check_catalog(settings.database_url, seconds=seconds),
        "added roots": lambda: databases.check_added_roots(settings, probe=probe, seconds=seconds),
        "keys": lambda: databases.check_keys(settings, seconds=seconds),
        provider.CHECK: lambda: provider.check_provider(settings),
        "jobs": lambda: databases.check_jobs(settings.jobs_database_url, seconds=seconds),
    }
