"""A control plane over a store in a temporary folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cairn import Settings, create_app
from tests.service.databases import PostgreSQL, running_postgresql
from tests.service.migrated import made_anew, made_once
from tests.stores import DATABASES

BASE_URL = "http://127.0.0.1:8321"
PEER = ("127.0.0.1", 50000)


@pytest.fixture(scope="session", autouse=True)
def _made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with made_once(tmp_path_factory.mktemp("databases")):
        yield


@pytest.fixture
def migrations() -> Iterator[None]:
    """Databases that the test makes are migrated, each by itself."""
    with made_anew():
        yield


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    with running_postgresql() as server:
        yield server


def _database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/catalog.sqlite"
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return server.create()


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database, of either kind."""
    return _database_url(request, tmp_path)


@pytest.fixture
def some_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database, of one kind; of both in the long run."""
    return _database_url(request, tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder of the root `default`."""
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def settings(root: Path, tmp_path: Path) -> Settings:
    return Settings(root=str(root), data_dir=tmp_path / "data", scan_seconds=0)


@pytest.fixture
def app(settings: Settings) -> FastAPI:
    """Without the job engine, which a process can have only once."""
    return create_app(settings, jobs=False)


@pytest.fixture
def http(app: FastAPI) -> Iterator[TestClient]:
    """Asks the application, from this machine."""
    with TestClient(app, base_url=BASE_URL, client=PEER) as client:
        yield client
