"""Checks of the databases: they are readable and have this version's tables. Nothing is written."""

import shlex
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from sqlalchemy import URL, Engine, create_engine, inspect, make_url, select
from sqlalchemy.exc import SQLAlchemyError

from cairn.service.access.keys import has_valid_key
from cairn.service.catalog.migrate import is_newer_and_works, known_revisions, revisions
from cairn.service.catalog.models import AddedRootRow, KeyRow
from cairn.service.catalog.roots import overlap_of
from cairn.service.command.doctor.findings import Finding, Outcome
from cairn.service.command.doctor.stores import check_root
from cairn.service.private_files import shared_files
from cairn.service.settings import Settings
from cairn.storage.errors import InvalidURIError
from cairn.storage.store.uri import parse_uri

_SERVER_SCHEMA: Final = "dbos"
_ADDED: Final = "added roots"
_KEYS: Final = "keys"


def check_catalog(url: str, *, seconds: float) -> Iterator[Finding]:
    """Check that the catalog's tables are those of this version.

    Args:
        url: Address of the database.
        seconds: Time to wait for an answer.
    """
    yield from _check_database("catalog", "CAIRN_DATABASE_URL", url, seconds, _revision)


def check_jobs(url: str, *, seconds: float) -> Iterator[Finding]:
    """Check that the database of jobs has the tables that this version of the job engine needs.

    Args:
        url: Address of the database.
        seconds: Time to wait for an answer.
    """
    yield from _check_database("jobs", "CAIRN_JOBS_DATABASE_URL", url, seconds, _job_tables)


def check_added_roots(settings: Settings, *, probe: bool, seconds: float) -> Iterator[Finding]:
    """Check the roots that were added to the catalog, and compare them with the settings.

    It also names rules of the settings that fit no root. It does not report an unreadable
    catalog: `check_catalog` does.

    Args:
        settings: Settings that name the catalog and roots of their own.
        probe: Write to each root for a moment.
        seconds: Time to wait for the catalog or a store.
    """
    added: dict[str, str] = {}
    roots = settings.root_uris

    def look(check: str, engine: Engine, shown: str) -> Finding:
        with engine.connect() as connection:
            if inspect(connection).has_table(AddedRootRow.__tablename__):
                query = select(AddedRootRow.name, AddedRootRow.uri).order_by(AddedRootRow.name)
                added.update((name, uri) for name, uri in connection.execute(query))
        return Finding(check, Outcome.OK, shown)

    url = settings.database_url
    read = [
        finding.outcome
        for finding in _check_database(_ADDED, "CAIRN_DATABASE_URL", url, seconds, look)
    ]
    if not added:
        yield Finding(_ADDED, Outcome.OK, "none")
    for name, kept in added.items():
        try:
            uri = parse_uri(kept)
        except InvalidURIError as exc:
            fix = f"upgrade to the version that has added it, or cairn roots remove {name}"
            yield Finding(_ADDED, Outcome.WARN, f"{name}: {exc}", fix)
            continue
        if name in roots:
            text = f"{name}: the settings have {roots[name]}, which counts, the catalog {uri}"
            yield Finding(_ADDED, Outcome.WARN, text, f"cairn roots remove {name}")
            continue
        if overlap := overlap_of(uri, roots):
            text = f"{name}: expected a place apart from all others, found {uri}, {overlap}"
            fix = f"cairn roots remove {name}, or correct CAIRN_ROOTS"
            yield Finding(_ADDED, Outcome.WARN, text, fix)
        yield from check_root(name, uri, probe=probe, seconds=seconds)
    if Outcome.FAIL not in read:
        for rule in settings.policies_without_roots(added):
            fix = "correct the pattern, or add the root"
            yield Finding(
                "settings", Outcome.WARN, f"{rule} matches no root, so it does nothing", fix
            )


def check_keys(settings: Settings, *, seconds: float) -> Iterator[Finding]:
    """Check that a server that others can reach has a key, without which it does not start.

    It does not report an unreadable catalog: `check_catalog` does.

    Args:
        settings: Settings of the server.
        seconds: Time to wait for the catalog.
    """
    if not settings.needs_key:
        return
    valid = False

    def look(check: str, engine: Engine, shown: str) -> Finding:
        nonlocal valid
        with engine.connect() as connection:
            if inspect(connection).has_table(KeyRow.__tablename__):
                valid = has_valid_key(connection, now=datetime.now(UTC))
        return Finding(check, Outcome.OK, shown)

    url = settings.database_url
    read = list(_check_database(_KEYS, "CAIRN_DATABASE_URL", url, seconds, look))
    if any(finding.outcome is Outcome.FAIL for finding in read):
        return
    if valid:
        yield Finding(_KEYS, Outcome.OK, "a valid key exists")
        return
    text = f"CAIRN_HOST: {settings.host!r} can be reached by others, and there is no valid key: "
    text += "the server does not start"
    yield Finding(_KEYS, Outcome.FAIL, text, "cairn keys create --name NAME --scope admin")


def _check_database(
    check: str,
    setting: str,
    url: str,
    seconds: float,
    look: Callable[[str, Engine, str], Finding],
) -> Iterator[Finding]:
    try:
        parsed = make_url(url)
        file = parsed.database if parsed.get_backend_name() == "sqlite" else None
        if file and not Path(file).exists():
            yield Finding(check, Outcome.OK, f"{file} will be created on first start")
            return
        for path, mode in shared_files(file).items():
            text = f"{path}: expected mode 600, found {mode:o}: others may read secrets in it"
            yield Finding(check, Outcome.WARN, text, f"chmod 600 {shlex.quote(str(path))}")
        engine = _engine(parsed, seconds)
    except SQLAlchemyError:  # not the error's text, which may have the password
        text = f"{setting}: expected one such as sqlite:////srv/cairn/catalog.sqlite or "
        text += "postgresql+psycopg://user:password@host/database, found another text"
        yield Finding(check, Outcome.FAIL, text, f"correct {setting}")
        return
    except ImportError as exc:
        fix = "python -m pip install 'cairn-checkpoints[postgres]'"
        yield Finding(check, Outcome.FAIL, f"{setting}: {exc}", fix)
        return
    try:
        yield look(check, engine, f"{parsed!r}")
    except SQLAlchemyError as exc:
        cause = " ".join(str(getattr(exc, "orig", exc)).split())
        text = f"{setting}: {parsed!r}: expected a database that can be read, found: {cause}"
        yield Finding(check, Outcome.FAIL, text, f"start it, or correct {setting}")
    finally:
        engine.dispose()


def _engine(url: URL, seconds: float) -> Engine:
    if url.get_backend_name() != "sqlite":
        return create_engine(url, connect_args={"connect_timeout": max(2, int(seconds))})
    uri = url.set(database=f"file:{url.database}", query={"mode": "ro", "uri": "true"})
    return create_engine(uri, connect_args={"timeout": seconds})


def _revision(check: str, engine: Engine, shown: str) -> Finding:
    with engine.connect() as connection:
        revision, head = revisions(connection)
        newer = is_newer_and_works(connection)
    if revision == head:
        return Finding(check, Outcome.OK, f"{shown}, tables of version {head}")
    if newer:
        text = f"{shown}, tables of version {revision}, with which this one, {head}, works"
        return Finding(check, Outcome.OK, text)
    if revision is not None and revision not in known_revisions():
        text = f"{shown}: expected tables of version {head} at most, found {revision}: a newer "
        text += "Cairn has made them"
        fix = "python -m pip install --upgrade 'cairn-checkpoints[server]'"
        return Finding(check, Outcome.FAIL, text, fix)
    text = f"{shown}: expected tables of version {head}, found {revision or 'none'}"
    return Finding(check, Outcome.WARN, text, "cairn upgrade")


def _job_tables(check: str, engine: Engine, shown: str) -> Finding:
    schema = None if engine.dialect.name == "sqlite" else _SERVER_SCHEMA
    with engine.connect() as connection:
        there = inspect(connection).has_table("workflow_status", schema=schema)
    if there:
        return Finding(check, Outcome.OK, f"{shown} has the tables of jobs")
    text = f"{shown}: expected the tables of jobs, found none"
    return Finding(check, Outcome.WARN, text, "cairn upgrade")
