import subprocess
import sys

import jax.numpy as jnp
import pytest
from fastapi.testclient import TestClient

from cairn import Checkpointer, Settings, create_app
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.refresh import Index
from tests.service.conftest import BASE_URL, PEER
from tests.service.stores import make_run

ARRAY_FRAMEWORKS = "{'jax', 'flax', 'optax', 'orbax', 'torch', 'transformers'}"


def run_python(code, tmp_path):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={
            "PATH": "/usr/bin:/bin",
            "CAIRN_DATA_DIR": str(tmp_path / "data"),
            "CAIRN_ROOT": str(tmp_path / "store"),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_server_loads_no_array_framework_and_without_an_issuer_no_http_client(tmp_path):
    """Neither when it starts nor when it answers; an HTTP client takes half a second to load."""
    make_run(tmp_path / "store/run", [1])
    looking = f"found = {ARRAY_FRAMEWORKS} & set(sys.modules)\nassert not found, found\n"
    uses = (
        "import cairn.service.app, sys\n",
        "app = cairn.service.app.app\n",
        "cairn.service.app.create_app().openapi()\n",
        "assert not {'httpx', 'jwt'} & set(sys.modules)\n"
        "from fastapi.testclient import TestClient\n"  # an HTTP client
        f"with TestClient(app, base_url={BASE_URL!r}, client={PEER!r}) as http:\n"
        "    assert http.get('/readyz').status_code == 200, http.get('/readyz').text\n"
        "    assert http.get('/v1/runs').json()['runs'][0]['latest_step'] == 1\n",
    )
    done = run_python("".join(use + looking for use in uses), tmp_path)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_nothing(tmp_path):
    done = run_python(
        "import cairn.service, sys\n"
        "assert not {'fastapi', 'sqlalchemy', 'httpx'} & set(sys.modules)",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_client_needs_neither_server_nor_store_packages(tmp_path):
    done = run_python(
        "import cairn.service.client.client, sys\n"
        "found = {'dbos', 'sqlalchemy', 'tensorstore', 'numpy'} & set(sys.modules)\n"
        "assert not found, found",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_health_answers_with_the_version(http):
    answer = http.get("/healthz")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")


def test_readiness_names_what_is_not_usable(http):
    answer = http.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["errors"] == [
        {"field": "jobs", "detail": "the job engine of this server was not launched"}
    ]


def test_readiness_names_a_root_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "store").mkdir()
    settings = Settings(
        root=str(tmp_path / "store"),
        roots={"bad": str(tmp_path / "file")},
        data_dir=tmp_path / "data",
    )
    with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http:
        fields = [error["field"] for error in http.get("/readyz").json()["errors"]]
    assert "root bad" in fields
    assert "root default" not in fields


@pytest.mark.parametrize("peer", ["10.0.0.7", "2001:db8::1", "testclient"])
def test_peer_on_another_machine_is_refused(app, peer):
    with TestClient(app, base_url=BASE_URL, client=(peer, 1)) as http:
        answer = http.get("/v1/runs")
    assert answer.status_code == 403
    assert answer.headers["content-type"] == "application/problem+json"
    assert peer in answer.json()["detail"]


@pytest.mark.parametrize("host", ["evil.example:8321", "127.0.0.1.evil.example", "[::1", ""])
def test_foreign_name_for_this_address_is_refused(http, host):
    answer = http.get("/v1/runs", headers={"Host": host})
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:cairn:problem:forbidden")


@pytest.mark.parametrize("host", ["localhost:8321", "127.0.0.1", "[::1]:8321"])
def test_names_of_this_machine_are_answered(http, host):
    assert http.get("/v1/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:9999"])
def test_change_asked_for_by_a_foreign_page_is_refused(http, root, origin):
    make_run(root / "run", [1])
    path = "/v1/roots/default/runs/run/checkpoints/1:promote"
    headers = {"Origin": origin, "If-None-Match": "*"}
    answer = http.post(path, json={"alias": "production"}, headers=headers)
    assert answer.status_code == 403
    assert not (root / "run" / "aliases").exists()


def test_origin_that_is_no_url_is_refused(http, root):
    make_run(root / "run", [1])
    path = "/v1/roots/default/runs/run/checkpoints/1:promote"
    answer = http.post(path, json={"alias": "a"}, headers={"Origin": "http://["})
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:cairn:problem:forbidden")


def test_change_asked_for_by_our_own_page_is_done(http, root):
    make_run(root / "run", [1])
    path = "/v1/roots/default/runs/run/checkpoints/1:promote"
    headers = {"Origin": BASE_URL, "If-None-Match": "*"}
    assert http.post(path, json={"alias": "production"}, headers=headers).status_code == 200


def test_two_servers_share_one_store(root, tmp_path):
    make_run(root / "run", [1, 2])
    apps = [
        create_app(Settings(root=str(root), data_dir=tmp_path / name), jobs=False)
        for name in ("one", "two")
    ]
    path = "/v1/roots/default/runs/run"
    with (
        TestClient(apps[0], base_url=BASE_URL, client=PEER) as one,
        TestClient(apps[1], base_url=BASE_URL, client=PEER) as two,
    ):
        assert two.get(f"{path}/aliases").json()["aliases"] == []
        moved = one.post(
            f"{path}/checkpoints/2:promote",
            json={"alias": "production"},
            headers={"If-None-Match": "*"},
        )
        assert moved.status_code == 200
        fresh = {"refresh": True}
        found = two.get(f"{path}/checkpoints/2", params=fresh).json()
        assert found["aliases"] == ["production"]
        assert one.get(f"{path}/checkpoints").json() == two.get(f"{path}/checkpoints").json()


def test_control_plane_over_a_bucket(gcs, tmp_path):
    settings = Settings(root=f"{gcs.bucket_uri}/runs", data_dir=tmp_path / "data")
    path = "/v1/roots/default/runs/tiny"
    tree = {"kernel": jnp.arange(8, dtype=jnp.float32)}
    with (
        TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http,
        Checkpointer(f"{gcs.bucket_uri}/runs/tiny", writer_id="trainer") as trainer,
    ):
        assert http.get("/v1/runs").json()["runs"] == []
        for step in (3, 6):
            trainer.save(step, {"model": tree}, meta={}, metrics={"loss": 1 / step}).wait()
            announced = http.post(f"{path}/checkpoints", json={"step": step})
            assert announced.json()["step"] == step
            listed = http.get(f"{path}/checkpoints").json()["checkpoints"]
            assert listed[0]["step"] == step
        assert listed[0]["uri"] == f"{gcs.bucket_uri}/runs/tiny/attempts/1/6"
        assert listed[0]["metrics"] == {"loss": 1 / 6}
        assert listed[0]["leaves"] == 1
        created = http.post(
            f"{path}/checkpoints/6:promote",
            json={"alias": "production"},
            headers={"If-None-Match": "*"},
        )
        assert (created.status_code, created.headers["etag"]) == (200, '"1"')
        stale = http.post(
            f"{path}/checkpoints/3:promote",
            json={"alias": "production"},
            headers={"If-Match": '"7"'},
        )
        assert (stale.status_code, stale.json()["current"]["step"]) == (412, 6)
        assert http.get(f"{path}/checkpoints/9").status_code == 404
        assert http.get("/v1/roots/default/runs/other").status_code == 404
        before = http.get("/v1/runs").json(), http.get(f"{path}/checkpoints").json()
    assert before[0]["runs"][0]["checkpoint_count"] == 2
    catalog = Catalog.open(f"sqlite:///{tmp_path}/other.sqlite")
    rebuilt = Index(catalog).rebuild(settings.root_uris)
    assert (rebuilt.runs, rebuilt.checkpoints, rebuilt.aliases) == (1, 2, 1)
    catalog.close()


def test_bucket_that_does_not_exist_is_a_problem(gcs, tmp_path):
    settings = Settings(root=f"{gcs.bucket_uri}-missing/runs", data_dir=tmp_path / "data")
    with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http:
        answer = http.get("/v1/runs")
        fields = [error["field"] for error in http.get("/readyz").json()["errors"]]
    assert (answer.status_code, answer.json()["type"]) == (
        503,
        "urn:cairn:problem:store-unavailable",
    )
    assert f"{gcs.bucket_uri}-missing" in answer.json()["detail"]
    assert "root default" in fields
