"""The Dockerfile's steps are carried out, and what they make is run as the image would run it.

That takes 50 s of CPU: `make proofs` does it, `make test` what `test_dockerfile.py` has.
"""

import importlib
import os
import re
import shutil
import tempfile
import time
import tomllib
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import httpx
import pytest

from cairn import Client
from cairn.service.schemas import OperationState
from tests.deploy.databases import running_guarded_postgresql
from tests.deploy.image import Build, free_port, make_base
from tests.deploy.metrics import WORKER_FAMILIES, families
from tests.deploy.repository import ROOT, VARIABLES_TO_COME
from tests.deploy.test_dockerfile import DOCKERFILE, TRAINING
from tests.service.jobs import save_llama

pytestmark = pytest.mark.timeout(900)  # whoever is first builds, by a registry that may be slow

DUMP_AND_RESTORE = ("pg_dump", "pg_restore")


@pytest.fixture(scope="module")
def base():
    """The base image's interpreter."""
    # Not below pytest's folder, which only its owner may enter: the image has a user of its own.
    with tempfile.TemporaryDirectory(prefix="cairn-base-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        yield make_base(Path(folder))


@pytest.fixture(scope="module")
def images(base):
    """Every stage, built; packages come from the registry, or pip's cache of it."""
    with tempfile.TemporaryDirectory(prefix="cairn-image-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        yield Build(DOCKERFILE, Path(folder), base).run()


@pytest.fixture
def guarded_postgresql():
    """A PostgreSQL that wants a password of `cairn`, with a database of that name."""
    with running_guarded_postgresql() as server:
        yield server


@pytest.fixture
def store(images):
    """A run with a step, on the volume."""
    volume = images["server"].path("/var/lib/cairn")
    folder = volume / "store"
    save_llama(folder / "llama")
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 10001, 10001)
    yield folder
    for path in volume.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def running(image, announced, **variables):
    """What the image runs by itself, once it says so."""
    # A file, and no pipe: nobody empties it while the program works.
    with tempfile.NamedTemporaryFile() as log:
        written = Path(log.name).read_text
        command = [*image.entrypoint, *image.command]
        process = image.start(command, variables, log)
        try:
            deadline = time.monotonic() + 60
            while announced not in written():
                assert process.poll() is None, written()
                assert time.monotonic() < deadline, written()
                time.sleep(0.05)
            yield process
            process.terminate()
            assert process.wait(60) == 0, written()
        finally:
            process.kill()
            process.wait()


def packages(image):
    """What is installed in it, by name."""
    (folder,) = image.path("/opt/cairn").glob("lib/python3.*/site-packages")
    return {one.name.lower(): one for one in metadata.distributions(path=[str(folder)])}


def test_the_image_holds_the_pinned_packages_and_none_of_training(images):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    found = {name: one.version for name, one in packages(images["server"]).items()}
    ours = found.pop("cairn-checkpoints")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert ours == project["version"] == images["server"].labels["org.opencontainers.image.version"]
    assert found == {name: pins[name] for name in found}
    assert {"dbos", "fastapi", "psycopg", "tensorstore"} <= set(found)
    assert not {"pip", "setuptools", *TRAINING} & set(found)


def test_the_wheel_was_built_by_the_pinned_backend(images):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pinned,) = [line.split("==")[1] for line in lines if line.startswith("setuptools==")]
    wheel = packages(images["server"])["cairn-checkpoints"].read_text("WHEEL")
    assert f"Generator: setuptools ({pinned})" in wheel.splitlines()


@pytest.mark.parametrize("target", ["server", "worker"])
def test_nothing_that_the_build_needed_is_left(target, images):
    root = images[target].root
    assert sorted(path.name for path in root.iterdir()) == ["opt", "var"]
    program = (
        f"import importlib.util as u; print([m for m in {TRAINING!r} if u.find_spec(m)])\n"
        "import cairn.service.app, cairn.service.jobs, psycopg\n"
        "print(cairn.__file__)\n"
    )
    done = images[target].run("python", "-c", program)
    assert done.returncode == 0, done.stderr
    missing, place = done.stdout.splitlines()
    assert missing == "[]"
    assert place.startswith(str(root / "opt/cairn/lib"))


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_server_and_worker_do_their_work_as_the_images_start_them(images, store, database, request):
    server, worker = images["server"], images["worker"]
    port, worker_port = str(free_port()), str(free_port())
    outside = contents(server)
    shared = {"CAIRN_ROOT": str(store), "CAIRN_WORKER_PORT": worker_port}
    if database == "postgresql":
        shared |= request.getfixturevalue("guarded_postgresql").variables
    health = server.run(*server.health, CAIRN_PORT=port)
    assert health.returncode != 0, "healthy, though nothing runs"
    with running(server, "cairn: http://", CAIRN_PORT=port, CAIRN_WORKER="false", **shared):
        health = server.run(*server.health, CAIRN_PORT=port)
        assert health.returncode == 0, health.stderr
        with Client(f"http://127.0.0.1:{port}") as client:
            assert client.ready()
            assert [(run.name, run.latest_step) for run in client.runs()] == [("llama", 1)]
            asked = client.convert("llama", 1)
            assert client.operation(asked.id).state is OperationState.PENDING
            with running(worker, "cairn: worker ", **shared):
                assert ending(client, asked).state is OperationState.SUCCEEDED
                if "CAIRN_WORKER_PORT" not in VARIABLES_TO_COME:
                    health = worker.run(*worker.health, **shared)
                    assert health.returncode == 0, health.stderr
                    told = httpx.get(f"http://127.0.0.1:{worker_port}/metrics").text
                    assert WORKER_FAMILIES - families(told) == set()
    assert list(store.rglob("model*.safetensors"))
    assert contents(server) == outside, "written outside of the volume"


def ending(client, operation):
    """An operation once it has ended."""
    deadline = time.monotonic() + 60
    while not (found := client.operation(operation.id)).state.final:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def test_without_its_password_the_database_is_named_and_nothing_is_served(
    images, store, guarded_postgresql
):
    variables = {**guarded_postgresql.variables, "PGPASSWORD": "another", "CAIRN_ROOT": str(store)}
    done = images["server"].run("cairn", "serve", CAIRN_PORT=str(free_port()), **variables)
    assert done.returncode != 0
    assert "CAIRN_DATABASE_URL" in done.stderr
    assert "password authentication failed" in done.stderr
    assert "another" not in done.stdout + done.stderr


def test_a_dump_of_the_database_brings_back_what_the_store_does_not_hold(
    images, store, guarded_postgresql
):
    page = (ROOT / "docs/howto/deploy.md").read_text(encoding="utf-8")
    dump, restore = (re.search(rf"postgres ({tool} .*) [<>]", page)[1] for tool in DUMP_AND_RESTORE)
    server, port = images["server"], str(free_port())
    settings = {"CAIRN_ROOT": str(store), "CAIRN_PORT": port, **guarded_postgresql.variables}
    client = Client(f"http://127.0.0.1:{port}")
    with running(server, "cairn: http://", **settings), client:
        first = ending(client, client.convert("llama", 1))
        kept = guarded_postgresql.run(*dump.split())
        later = ending(client, client.gather("llama", 1))
        client.promote("llama", 1, "production", expect=None)
    guarded_postgresql.run(*restore.split(), standard_input=kept)
    done = server.run("cairn", "index", "rebuild", **settings)
    assert done.stdout == "1 run, 1 checkpoint, 1 alias\n", done.stderr
    client = Client(f"http://127.0.0.1:{port}")
    with running(server, "cairn: http://", **settings), client:
        assert [one.id for one in client.operations()] == [first.id]
        assert client.alias("llama", "production").step == 1
        # What was done since is found in the store, and not done again.
        again = ending(client, client.gather("llama", 1))
        assert again.result == {**later.result, "existing": True}


def contents(image):
    """Every file but those of the volume, with its size and time."""
    (volume,) = (image.path(name) for name in image.volumes)
    return {
        path: (found.st_size, found.st_mtime_ns)
        for path in image.root.rglob("*")
        if not path.is_relative_to(volume)
        for found in [path.lstat()]
    }


def test_the_user_of_the_images_may_write_nothing_but_the_volume(images):
    for target in ("server", "worker"):
        image = images[target]
        uid, gid = image.user.split(":")
        assert min(int(uid), int(gid)) > 0  # numbers: Kubernetes can tell that it is not root
        assert image.volumes == ("/var/lib/cairn",)
        assert image.variables["CAIRN_DATA_DIR"] == image.variables["HOME"] == image.folder
    if os.getuid() == 0:
        program = (
            "import os, sys\n"
            "for folder, names, files in os.walk(sys.argv[1]):\n"
            "    for path in [folder, *(os.path.join(folder, name) for name in files)]:\n"
            "        if os.access(path, os.W_OK):\n"
            "            print(path)\n"
        )
        done = images["server"].run("python", "-c", program, str(images["server"].root))
        assert done.stdout.splitlines() == [str(images["server"].path("/var/lib/cairn"))]


def test_every_kind_of_job_is_there_without_the_packages_of_training(images):
    names = sorted(path.stem for path in (ROOT / "service/jobs/kinds").glob("[a-z]*.py"))
    assert importlib.import_module(f"cairn.service.jobs.kinds.{names[0]}")
    program = "".join(f"import cairn.service.jobs.kinds.{name}\n" for name in names)
    done = images["worker"].run("python", "-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr


def test_an_instruction_that_is_not_understood_is_an_error_here(tmp_path, base):
    for name in (".dockerignore", "constraints.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("cairn", "interop", "service", "state", "storage"):
        (tmp_path / name).mkdir()
    file = tmp_path / "Dockerfile"
    file.write_text("FROM scratch AS one\nONBUILD RUN true\n")
    (tmp_path / "built").mkdir()
    with pytest.raises(NotImplementedError, match="ONBUILD RUN true"):
        Build(file, tmp_path / "built", base).run()
