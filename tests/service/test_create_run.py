"""Runs made over HTTP before their job starts."""

import re
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient

from cairn import (
    InvalidURIError,
    Run,
    Settings,
    SettingsError,
    check_run,
    create_app,
    list_runs,
    promote_step,
)
from cairn.storage.runs.records.layout import RUN_FILE, check_run_name
from tests.plain_orbax import manager
from tests.service.access.conftest import ADDRESS, ELSEWHERE, Keys, bearer
from tests.service.jobs import done, save_llama, serving
from tests.service.seams import addresses as at
from tests.service.stores import add_steps, make_run
from tests.service.test_errors import check_problem as check_status

RUNS = "/v1/roots/default/runs"
NEW = {"name": "llama-sft", "labels": {"team": "nlp"}}


def check_problem(answer, status, kind):
    problem = check_status(answer, status)
    assert problem["type"] == f"urn:cairn:problem:{kind}"
    return problem


def test_a_run_is_there_before_its_job_which_goes_on_in_it(http, root):
    made = http.post(RUNS, json=NEW)
    assert (made.status_code, made.headers["Location"]) == (201, f"{RUNS}/llama-sft")
    body = made.json()
    assert (body["root"], body["name"], body["labels"]) == ("default", "llama-sft", NEW["labels"])
    assert (body["latest_step"], body["checkpoint_count"], body["bytes"]) == (None, 0, 0)
    found = http.get(made.headers["Location"])
    assert (found.json(), found.headers["ETag"]) == (body, made.headers["ETag"])
    assert http.get("/v1/runs").json()["runs"] == [body]
    assert http.get(f"{RUNS}/llama-sft/checkpoints").json()["checkpoints"] == []
    add_steps(Run.open(root / "llama-sft"), [3])
    now = http.get(f"{RUNS}/llama-sft?refresh=true").json()
    assert (now["labels"], now["latest_step"]) == (NEW["labels"], 3)
    assert now["created"] == body["created"]


def test_a_name_that_exists_is_refused_by_name(http, root):
    make_run(root / "llama-sft", [3])
    refused = check_problem(http.post(RUNS, json=NEW), 409, "run-exists")
    assert f"{root}/llama-sft" in refused["detail"]
    assert Run.open(root / "llama-sft").info().labels == {}
    (root / "lost").mkdir()
    (root / "lost" / "lease.json").write_text("{}")
    refused = check_problem(http.post(RUNS, json={"name": "lost"}), 409, "run-exists")
    assert "lost its record" in refused["detail"]
    assert not (root / "lost" / RUN_FILE).exists()


def test_a_folder_of_plain_checkpoints_is_told_to_be_adopted(http, root):
    manager(root / "theirs", steps=(3,))
    refused = check_problem(http.post(RUNS, json={"name": "theirs"}), 422, "invalid-uri")
    assert "cairn adopt" in refused["detail"]


def test_a_link_out_of_the_root_is_not_followed(http, root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    check_problem(http.post(RUNS, json={"name": "linked"}), 409, "leads-out")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body.name"),
        ({"name": ""}, "body.name"),
        ({"name": "../run"}, "body.name"),
        ({"name": ".hidden"}, "body.name"),
        ({"name": "x" * 129}, "body.name"),
        ({"name": 7}, "body.name"),
        ({"name": "run", "labels": {"a": None}}, "body.labels.a"),
        ({"name": "run", "labels": {"a": "\0"}}, "body"),
        ({"name": "run", "labels": {f"l{n}": "x" for n in range(101)}}, "body.labels"),
        ({"name": "run", "label": {}}, "body.label"),
    ],
)
def test_names_and_labels_that_cannot_be_are_refused(http, root, body, field):
    refused = check_problem(http.post(RUNS, json=body), 422, "invalid-request")
    assert field in [error["field"] for error in refused["errors"]]
    assert list_runs(root) == []


def test_a_root_that_is_not_there_has_no_runs_made_in_it(http):
    check_problem(http.post("/v1/roots/nowhere/runs", json=NEW), 404, "root-not-found")


@pytest.mark.parametrize("left", ["an empty folder", "nothing"])
def test_where_a_root_is_not_mounted_no_run_is_made(http, root, left):
    make_run(root / "old", [1])
    assert len(http.get("/v1/runs").json()["runs"]) == 1
    root.rename(root.with_name("elsewhere"))
    if left == "an empty folder":
        root.mkdir()
    refused = check_problem(http.post(RUNS, json=NEW), 503, "store-unavailable")
    assert "the root is not where it was" in refused["detail"]
    assert not (root / "llama-sft").exists()
    if root.exists():
        root.rmdir()
    root.with_name("elsewhere").rename(root)
    assert http.post(RUNS, json=NEW).status_code == 201
    assert len(http.get("/v1/runs").json()["runs"]) == 2


def test_of_many_who_ask_at_once_one_makes_it(http, root):
    def ask(number):
        return http.post(RUNS, json={"name": "run", "labels": {"by": str(number)}})

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(6)))
    assert sorted(one.status_code for one in answers) == [201, *[409] * 5]
    (made,) = [one.json() for one in answers if one.status_code == 201]
    assert Run.open(root / "run").info().labels == made["labels"]
    assert check_run(Run.open(root / "run")).ok


def test_the_trail_has_who_made_it_with_what(http):
    http.post(RUNS, json=NEW)
    http.post(RUNS, json=NEW)
    refused, made = http.get("/v1/audit-events").json()["audit_events"]
    assert (made["action"], made["root"], made["run"]) == ("run.create", "default", "llama-sft")
    assert made["detail"] == {"labels": NEW["labels"], "after": NEW["labels"]}
    assert (made["outcome"], refused["outcome"]) == ("done", "refused")


def test_it_takes_a_key_that_may_operate_in_this_root(root, tmp_path):
    settings = Settings(
        root=str(root),
        roots={"other": str(tmp_path / "other")},
        data_dir=tmp_path / "data",
        scan_seconds=0,
        auth="keys",
    )
    settings.prepare()
    keys = Keys(settings.database_url)
    reader, elsewhere = keys.make("reader", "read"), keys.make("ci", "operate", roots=["other"])
    operator = keys.make("cd", "operate", roots=["default"])
    with TestClient(create_app(settings, jobs=False), ADDRESS, client=ELSEWHERE) as http:
        for key in (reader, elsewhere):
            assert http.post(RUNS, json=NEW, headers=bearer(key)).status_code == 403
        assert list_runs(root) == []
        assert http.post(RUNS, json=NEW, headers=bearer(operator)).status_code == 201


def test_jobs_on_a_run_without_steps_find_nothing_amiss(root, tmp_path):
    save_llama(root / "llama")
    with serving(root, tmp_path / "data") as http:
        http.post(RUNS, json=NEW)
        path = f"{RUNS}/llama-sft"
        assert done(http, f"{path}:verify", {"steps": "all"})["result"]["records"]["sound"]
        assert done(http, f"{path}:gc", {"dry_run": False})["result"]["count"] == 0
        assert http.post(f"{path}:repair", json={}).json()["repairs"] == []
        usage = http.get(f"{path}/usage").json()
        assert (usage["files"], usage["garbage"], usage["steps"]) == (1, 0, [])
        fork = {"mode": "fork", "run": "llama-sft"}
        refused = http.post(f"{RUNS}/llama/checkpoints/1:restore", json=fork)
        check_problem(refused, 409, "run-exists")
        assert http.get(path).json()["labels"] == NEW["labels"]


@pytest.mark.parametrize("name", ["lr=0.001", "a+b", "a=b+c"])
def test_run_names_with_signs_of_configs_work_in_paths_queries_and_pages(http, root, name):
    made = http.post(RUNS, json={"name": name})
    assert (made.status_code, made.headers["Location"]) == (201, f"{RUNS}/{name}")
    add_steps(Run.open(root / name), [3, 4])
    promote_step(Run.open(root / name), 3, "best", expect=None)
    http.get(f"{RUNS}/{name}?refresh=true")
    aliases = http.get(f"{RUNS}/{quote(name, safe='')}/aliases").json()["aliases"]
    assert [(alias["alias"], alias["step"]) for alias in aliases] == [("best", 3)]
    listed = http.get("/v1/runs", params={"filter": f'name = "{name}"'}).json()["runs"]
    assert [run["name"] for run in listed] == [name]
    page = http.get("/").text
    (link,) = set(re.findall(r'href="(/ui/[^"/]+/[^"/]+)"', page))
    assert http.get(link).status_code == 200
    for path in (f"{link}/steps/3", f"{link}/aliases", at.compare("default", name, 3)):
        answer = http.get(path, follow_redirects=True)
        assert answer.status_code == 200, path
        assert name in answer.text
    asked = at.compare("default", name, 3, ("default", name, 4))
    assert http.get(asked, follow_redirects=True).status_code == 200
    events = http.get("/v1/events", params={"run": name}).json()["events"]
    assert {event["run"] for event in events} == {name}


def test_a_run_name_that_does_not_fit_is_refused_with_one_that_does():
    for name, fitting in {
        "run 1": "run-1",
        ".hidden": "hidden",
        "_old": "old",
        "a" * 129: "a" * 128,
        "=": "run-1",
    }.items():
        with pytest.raises(InvalidURIError, match=re.escape(f"such as {fitting!r}")):
            check_run_name(name)
        check_run_name(fitting)


def test_a_root_has_no_sign_of_a_run():
    with pytest.raises(SettingsError, match="root 'a=b'"):
        Settings(roots={"a=b": "/tmp/store"})
