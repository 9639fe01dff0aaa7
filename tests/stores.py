"""Fixtures: the stores that tests run on.

`CAIRN_STORES=s3`, or a list with commas, names others than disks and GCS.
"""

import itertools
import os
import zlib

import pytest

from cairn import ObjectStore, StoreURI, parse_uri
from tests.faults.report import is_long
from tests.storage.copies import Copies

_NUMBERS = itertools.count(1)

STORES = tuple(os.environ.get("CAIRN_STORES", "file,gcs").split(","))
"""Kinds of stores that hold checkpoints, on which every test runs that is the same on all."""

WITHOUT_S3 = tuple(kind for kind in STORES if kind != "s3") or ("file",)
"""Those of them for a test that names its kinds, where the mark does nothing."""

BUCKETS = ("gcs", "s3")
"""Kinds of stores that are buckets: names of fixtures, whose `bucket_uri` is the test's own."""

SERVERS = {"gs": "gcs_server", "s3": "s3_server"}
"""Fixture of the double of a scheme."""

DATABASES = ("sqlite", "postgresql")
"""Kinds of databases that a control plane keeps its catalog in."""

IN_TURN = {
    "some_root_uri": STORES,
    "some_objects": ("memory", *STORES),
    "some_bucket_uri": tuple(kind for kind in STORES if kind in BUCKETS) or BUCKETS[:1],
    "some_database_url": DATABASES,
}
"""Fixtures of what is the same in all stores, or in both databases: each test runs on one of them,
in the long run on all."""


def pytest_generate_tests(metafunc):
    """Give each test one kind, by its name, so that a file goes through all of them."""
    for fixture, kinds in IN_TURN.items():
        give_in_turn(metafunc, fixture, kinds)


def give_in_turn(metafunc, fixture, kinds):
    """Give a test one of a fixture's kinds, by its name; in the long run all.

    A test that names its kinds itself has these. One that says `without_s3`, and why, has others.
    """
    if any(metafunc.definition.iter_markers("without_s3")):
        kinds = [kind for kind in kinds if kind != "s3"] or ["file"]
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if fixture in metafunc.fixturenames and not any(fixture in one for one in named):
        turn = zlib.crc32(metafunc.function.__name__.encode()) % len(kinds)
        metafunc.parametrize(fixture, kinds if is_long() else [kinds[turn]], indirect=True)


def _root_uri(request) -> StoreURI:
    if request.param in BUCKETS:
        return parse_uri(request.getfixturevalue(request.param).bucket_uri) / "root"
    return parse_uri(request.getfixturevalue("tmp_path") / "root")


def _objects(request) -> ObjectStore:
    if request.param in BUCKETS:
        return ObjectStore.open(f"{request.getfixturevalue(request.param).bucket_uri}/run")
    if request.param == "memory":
        return ObjectStore.open(f"memory://test-{next(_NUMBERS)}/run")
    return ObjectStore.open(request.getfixturevalue("tmp_path") / "run")


@pytest.fixture(params=STORES)
def root_uri(request) -> StoreURI:
    """An empty folder in each kind of store that holds checkpoints."""
    return _root_uri(request)


@pytest.fixture(params=["file", *BUCKETS])
def every_root_uri(request) -> StoreURI:
    """An empty folder in each kind of store, whatever `CAIRN_STORES` says: for conformance."""
    return _root_uri(request)


@pytest.fixture
def some_root_uri(request) -> StoreURI:
    """An empty folder in one kind of store that holds checkpoints."""
    return _root_uri(request)


@pytest.fixture
def some_bucket_uri(request) -> str:
    """An empty bucket, of one kind; of all in the long run."""
    return request.getfixturevalue(request.param).bucket_uri


@pytest.fixture(params=["file", "memory", *BUCKETS])
def objects(request) -> ObjectStore:
    """An empty object store of each kind."""
    return _objects(request)


@pytest.fixture
def some_objects(request) -> ObjectStore:
    """An empty object store of one kind."""
    return _objects(request)


@pytest.fixture(scope="session")
def copies(request, tmp_path_factory) -> Copies:
    """Runs that many tests begin with."""
    folder = tmp_path_factory.mktemp("made-once")
    return Copies(folder, lambda scheme: request.getfixturevalue(SERVERS[scheme]))
