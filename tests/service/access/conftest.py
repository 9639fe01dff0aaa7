"""A control plane that answers those with keys, from anywhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cairn import Settings
from cairn.service.access.callers import Scope
from cairn.service.access.keys import make_key
from cairn.service.catalog.engine import Catalog

ELSEWHERE = ("203.0.113.7", 50000)
ADDRESS = "https://cairn.example"


@dataclass(frozen=True)
class Keys:
    """Makes keys in the database of a control plane."""

    database_url: str

    def make(
        self,
        name: str,
        scope: str = "read",
        *,
        roots: list[str] | None = None,
        lifetime: timedelta | None = None,
    ) -> str:
        now = datetime.now(UTC)
        with self.catalog() as catalog:
            _, key = make_key(
                catalog,
                name=name,
                scope=Scope(scope),
                roots=roots,
                expires=None if lifetime is None else now + lifetime,
                by="test",
                now=now,
            )
        return key

    @contextmanager
    def catalog(self) -> Iterator[Catalog]:
        catalog = Catalog.open(self.database_url)
        try:
            yield catalog
        finally:
            catalog.close()


@pytest.fixture
def settings(root: Path, tmp_path: Path) -> Settings:
    other = tmp_path / "other"
    other.mkdir()
    return Settings(
        root=str(root),
        roots={"other": str(other)},
        data_dir=tmp_path / "data",
        scan_seconds=0,
        auth="keys",
    )


@pytest.fixture
def keys(settings: Settings) -> Keys:
    settings.prepare()
    return Keys(settings.database_url)


@pytest.fixture
def http(app: FastAPI) -> Iterator[TestClient]:
    """Asks from another machine, without a key."""
    with TestClient(app, base_url=ADDRESS, client=ELSEWHERE, follow_redirects=False) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
