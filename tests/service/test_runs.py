import json
import shutil

import pytest
from fastapi.testclient import TestClient

from cairn import Run, Settings, create_app, promote_step
from cairn.service.catalog.refresh import Index
from cairn.storage.store.clock import from_rfc3339
from cairn.storage.store.records import canonical_json, sha256_of
from tests.service.commands import cairn_here
from tests.service.conftest import BASE_URL, PEER
from tests.service.planes import running_plane
from tests.service.stores import BYTES_PER_STEP, add_steps, make_run

RUNS = "/v1/roots/default/runs"


def names(answer):
    assert answer.status_code == 200, answer.text
    return [(run["root"], run["name"]) for run in answer.json()["runs"]]


def test_run_tells_what_it_holds(http, root):
    run = make_run(root / "llama-sft", [3, 6, 9], labels={"team": "nlp"})
    answer = http.get("/v1/roots/default/runs/llama-sft")
    assert answer.status_code == 200
    body = answer.json()
    assert from_rfc3339(body.pop("created")) == from_rfc3339(run.info().created)
    assert body == {
        "root": "default",
        "name": "llama-sft",
        "uri": f"file://{root}/llama-sft",
        "labels": {"team": "nlp"},
        "lineage": None,
        "latest_step": 9,
        "checkpoint_count": 3,
        "damaged_count": 0,
        "bytes": 3 * BYTES_PER_STEP,
        "problems": [],
        "lost_records": [],
    }


def test_run_without_steps_has_no_latest(http, root):
    make_run(root / "new")
    body = http.get("/v1/roots/default/runs/new").json()
    assert (body["latest_step"], body["checkpoint_count"], body["bytes"]) == (None, 0, 0)


def test_fork_tells_its_parent(http, root):
    parent = make_run(root / "parent", [5])
    digest = parent.step(5).manifest_digest
    lineage = {"run": str(parent.uri), "step": 5, "attempt": 1, "manifest_digest": digest}
    Run.create(root / "child", lineage=lineage)
    assert http.get("/v1/roots/default/runs/child").json()["lineage"] == lineage


def test_runs_of_all_roots_are_listed_by_root_and_name(root, tmp_path):
    make_run(root / "b", [1])
    make_run(root / "a")
    make_run(tmp_path / "archive" / "a", [7])
    settings = Settings(
        root=str(root), roots={"archive": str(tmp_path / "archive")}, data_dir=tmp_path / "data"
    )
    with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http:
        every = [("archive", "a"), ("default", "a"), ("default", "b")]
        assert names(http.get("/v1/runs")) == every
        assert names(http.get("/v1/roots/archive/runs")) == [("archive", "a")]
        assert http.get("/v1/roots/archive/runs/a").json()["latest_step"] == 7
        assert http.get("/v1/roots/default/runs/a").json()["latest_step"] is None
        roots = http.get("/v1/roots").json()["roots"]
    assert [entry["name"] for entry in roots] == ["default", "archive"]


def test_pages_hold_every_run_once(http, root):
    wanted = [("default", f"run-{number}") for number in range(7)]
    for _, name in wanted:
        make_run(root / name)
    seen, token, pages = [], None, 0
    while token is not None or not pages:
        parameters = {"page_size": 3} | ({"page_token": token} if token else {})
        answer = http.get("/v1/runs", params=parameters)
        seen += names(answer)
        token = answer.json()["next_page_token"]
        pages += 1
    assert seen == wanted
    assert pages == 3


def test_new_run_and_new_step_are_in_the_next_list_that_looks(http, root):
    assert names(http.get("/v1/runs")) == []
    run = make_run(root / "run", [1])
    fresh = {"refresh": True}
    assert http.get("/v1/runs", params=fresh).json()["runs"][0]["latest_step"] == 1
    add_steps(run, [2], base_step=1)
    assert http.get("/v1/runs").json()["runs"][0]["latest_step"] == 1
    assert http.get("/v1/runs", params=fresh).json()["runs"][0]["latest_step"] == 2


def test_run_that_is_gone_is_not_in_the_next_list_that_looks(http, root):
    make_run(root / "run", [1])
    make_run(root / "other", [1])
    assert names(http.get("/v1/runs")) == [("default", "other"), ("default", "run")]
    shutil.rmtree(root / "run")
    fresh = {"refresh": True}
    assert http.get("/v1/roots/default/runs/run", params=fresh).status_code == 404
    assert names(http.get("/v1/runs")) == [("default", "other")]
    make_run(root / "run", [1])
    assert names(http.get("/v1/runs", params=fresh)) == [("default", "other"), ("default", "run")]
    shutil.rmtree(root / "other")
    assert names(http.get("/v1/runs", params=fresh)) == [("default", "run")]


def test_folders_that_are_no_runs_are_left_out(http, root):
    (root / "empty").mkdir()
    (root / ".hidden").mkdir()
    (root / ".hidden" / "run.json").write_text("{}")
    (root / "file").write_text("")
    make_run(root / "run")
    assert names(http.get("/v1/runs")) == [("default", "run")]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "cairn.run", "version": 99, "name": "bad"}']
)
def test_run_that_cannot_be_read_does_not_hide_the_others(http, root, text):
    make_run(root / "good", [1])
    make_run(root / "bad")
    (root / "bad" / "run.json").write_text(text)
    assert names(http.get("/v1/runs")) == [("default", "good")]
    answer = http.get("/v1/roots/default/runs/bad")
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:cairn:problem:unsupported-format"
    assert "bad/run.json" in answer.json()["detail"]


@pytest.mark.parametrize("moment", ["yesterday", "2026-11-21", "0001-01-01T00:00:00+14:00"])
def test_record_of_an_impossible_moment_does_not_hide_the_others(http, root, moment):
    make_run(root / "good", [1])
    for name, file in (("one", "run.json"), ("two", "aliases/best.json")):
        run = make_run(root / name, [1])
        promote_step(run, 1, "best", expect=None)
        record = json.loads((root / name / file).read_text())
        del record["checksum"]
        for field in {"created", "at"} & record.keys():
            record[field] = moment
        checksum = sha256_of(canonical_json(record))
        (root / name / file).write_bytes(canonical_json(record | {"checksum": checksum}))
    assert ("default", "good") in names(http.get("/v1/runs"))
    answer = http.get("/v1/roots/default/runs/one")
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:cairn:problem:unsupported-format"
    answer = http.get("/v1/roots/default/runs/two")
    assert answer.status_code == 200
    (problem,) = answer.json()["problems"]
    assert "aliases/best.json" in problem


def test_damaged_record_does_not_hide_the_others(http, root):
    make_run(root / "good", [1])
    for name, file in (("one", "run.json"), ("two", "aliases/best.json")):
        run = make_run(root / name, [1])
        promote_step(run, 1, "best", expect=None)
        stored = (root / name / file).read_bytes()
        (root / name / file).write_bytes(stored.replace(b'"version":1', b'"version": 1'))
    assert ("default", "good") in names(http.get("/v1/runs"))
    answer = http.get("/v1/roots/default/runs/one")
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:cairn:problem:corrupt"
    assert "is not what was written" in answer.json()["detail"]
    answer = http.get("/v1/roots/default/runs/two")
    assert answer.status_code == 200
    (problem,) = answer.json()["problems"]
    assert "aliases/best.json" in problem
    assert "is not what was written" in problem


def test_root_without_folder_is_empty(tmp_path):
    settings = Settings(root=str(tmp_path / "none"), data_dir=tmp_path / "data")
    with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http:
        assert names(http.get("/v1/runs")) == []
    assert not (tmp_path / "none").exists()


def test_link_out_of_the_root_is_no_run(http, root, tmp_path):
    make_run(tmp_path / "outside", [1])
    (root / "link").symlink_to(tmp_path / "outside")
    answer = http.get("/v1/roots/default/runs/link")
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:cairn:problem:leads-out"
    assert names(http.get("/v1/runs")) == []


def test_page_token_is_opaque_and_bound_to_its_list(http, root):
    for name in "abc":
        make_run(root / name, [1, 2])
    token = http.get("/v1/runs", params={"page_size": 1}).json()["next_page_token"]
    for path in ("/v1/roots/default/runs", "/v1/roots/default/runs/a/checkpoints"):
        answer = http.get(path, params={"page_token": token})
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == "query.page_token"
    assert json.dumps(token).isascii()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_page_whose_runs_go_while_it_is_made_leads_on_to_the_next(http, root, monkeypatch, size):
    for name in "abcd":
        make_run(root / name, [1])
    assert len(names(http.get("/v1/runs"))) == 4
    look = Index.refresh_runs

    def gone_by_now(self, roots, runs):
        shutil.rmtree(root / "a", ignore_errors=True)
        look(self, roots, runs)

    monkeypatch.setattr(Index, "refresh_runs", gone_by_now)
    asked = {"page_size": size, "refresh": "true"}
    found, token = [], None
    for _ in range(4):
        page = http.get("/v1/runs", params={**asked, **({"page_token": token} if token else {})})
        assert page.status_code == 200
        found += [name for _, name in names(page)]
        token = page.json()["next_page_token"]
        if token is None:
            break
    assert found == ["b", "c", "d"]


def test_usage_of_a_run_is_what_du_says(http, root):
    make_run(root / "run", [3, 6])
    http.delete(f"{RUNS}/run/checkpoints/6")
    found = http.get(f"{RUNS}/run/usage")
    assert found.status_code == 200, found.text
    told = found.json()
    files = [path for path in (root / "run").rglob("*") if path.is_file()]
    assert (told["bytes"], told["files"]) == (sum(f.stat().st_size for f in files), len(files))
    assert sum(told["uses"].values()) == told["bytes"]
    assert {one["step"]: one["state"] for one in told["steps"]} == {3: "listed", 6: "trashed"}
    assert http.get(f"{RUNS}/nothing/usage").status_code == 404


def test_usage_is_shown_in_the_shell(root, tmp_path):
    run = make_run(root / "run", [3])
    (tmp_path / "data").mkdir()
    with running_plane(root, tmp_path / "data") as (url, _):
        served = cairn_here("usage", "run", url=url).stdout
    stored = cairn_here("usage", str(run.uri)).stdout
    assert served == stored
    *_, row, summary = served.splitlines()
    assert row.split("\t")[:3] == ["3", "1", "listed"]
    files = [path for path in (root / "run").rglob("*") if path.is_file()]
    assert summary.startswith(f"{sum(f.stat().st_size for f in files)} bytes in {len(files)} files")
