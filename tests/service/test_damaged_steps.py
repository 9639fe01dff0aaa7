"""Damage is a state: a step whose verification failed, at every door of the control plane."""

import shutil
from pathlib import Path

import httpx
import pytest

from cairn import Client, Damage, Run, Settings, create_app, promote_step, roll_back
from cairn.service.client.pull import pull
from cairn.service.errors import ProblemResponseError
from cairn.storage.arrays.ocdbt import is_data_file
from cairn.storage.runs.annotate import note_verified
from tests.service.commands import cairn_here
from tests.service.jobs import artifact_of, done, save_llama, serving, watch
from tests.service.servers import serve

RUN = "/v1/roots/default/runs/llama"
STEP = f"{RUN}/checkpoints/2"
REASON = "the optimizer alone is damaged"
DOORS = {
    "convert": {"dtype": "float16"},
    "gather": {"items": ["model"]},
    "restore": {"mode": "fork", "run": "forked"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run of three steps, whose second has a damaged optimizer that nobody knows of."""
    root = tmp_path_factory.mktemp("store")
    save_llama(root / "llama", (1, 2, 3))
    shutil.copytree(root / "llama", root / "sound")
    damage(root / "llama")
    return root


def damage(run: Path) -> None:
    folder = run / "attempts" / "1" / "2"
    values = [path for path in folder.rglob("*") if is_data_file(str(path.relative_to(folder)))]
    path = max(
        (one for one in values if "optimizer" in one.parts), key=lambda one: one.stat().st_size
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # steps 1 and 3 have the same file
    path.write_bytes(data)


@pytest.fixture(scope="module")
def planes(root, tmp_path_factory):
    """Two control planes of one store; the second executes no jobs."""
    data = tmp_path_factory.mktemp("data")
    with (
        serving(root, data / "second", scan_seconds=0, worker=False) as second,
        serve(create_app(Settings(root=str(root), data_dir=data / "first", scan_seconds=0))) as url,
        httpx.Client(base_url=url, timeout=60) as first,
    ):
        yield first, second


@pytest.fixture(scope="module")
def exported(planes):
    """An export of the step that was made before anybody knew."""
    return done(planes[0], f"{STEP}:convert", {})


@pytest.fixture(scope="module")
def asked_before(planes):
    """A job that was asked for before anybody knew, and did not begin to write."""
    started = planes[0].post(f"{STEP}:convert", json={"memory": "1", "dtype": "float64"}).json()
    assert "memory" in watch(planes[0], started["id"])["error"]["detail"]
    return started["id"]


@pytest.fixture(scope="module")
def verified(planes, exported, asked_before):
    """The operation that found the damage."""
    http = planes[0]
    operation = watch(http, http.post(f"{STEP}:verify").json()["id"])
    assert operation["error"]["type"] == "urn:cairn:problem:damaged"
    return operation


@pytest.fixture(scope="module")
def http(planes, verified):
    return planes[0]


def steps_of(http, **query):
    found = http.get(f"{RUN}/checkpoints", params=query).json()["checkpoints"]
    return [(one["step"], one["state"]) for one in found]


def is_refused(answer):
    return answer.status_code == 409 and answer.json()["type"] == "urn:cairn:problem:step-damaged"


def test_a_step_whose_verification_failed_is_damaged(http, verified):
    step = http.get(STEP).json()
    assert (step["state"], step["verified"]) == ("damaged", None)
    damaged = step["damaged"]
    assert (damaged["job"], damaged["by"], damaged["loads"]) == (verified["id"], "verify", False)
    assert damaged["leaves"] == ["optimizer: mu/embedding"]
    assert (damaged["leaf_count"], damaged["problem_count"]) == (1, len(damaged["problems"]))
    assert http.get(f"{RUN}/checkpoints/3").json()["damaged"] is None


def test_lists_have_damaged_steps_and_can_be_asked_for_them(http):
    everything = [(3, "listed"), (2, "damaged"), (1, "listed")]
    assert steps_of(http) == steps_of(http, state="available") == everything
    assert steps_of(http, state="damaged") == steps_of(http, filter="state = damaged")
    assert steps_of(http, state="damaged", order_by="created") == [(2, "damaged")]
    assert steps_of(http, state="listed") == [(3, "listed"), (1, "listed")]
    assert steps_of(http, filter="state = listed") == [(3, "listed"), (1, "listed")]
    run = http.get(RUN).json()
    assert (run["damaged_count"], run["checkpoint_count"], run["latest_step"]) == (1, 3, 3)
    found = http.get("/v1/roots/default/runs", params={"filter": "states:damaged"}).json()["runs"]
    assert [one["name"] for one in found] == ["llama"]
    usage = http.get(f"{RUN}/usage").json()["steps"]
    assert {one["step"]: one["state"] for one in usage}[2] == "damaged"
    metrics = http.get("/metrics").text
    assert 'cairn_index_damaged_checkpoints{root="default"} 1.0' in metrics


def test_a_damaged_step_is_never_promoted(http):
    headers = {"If-None-Match": "*"}
    body = {"alias": "production"}
    assert is_refused(http.post(f"{STEP}:promote", json=body, headers=headers))
    forced = {**body, "despite_damage": REASON}
    assert http.post(f"{STEP}:promote", json=forced, headers=headers).status_code == 422
    assert http.get(f"{RUN}/aliases").json()["aliases"] == []
    (entry, *_) = audit_of(http, "alias.promote")
    assert entry["outcome"] == "refused"


def audit_of(http, action):
    found = http.get("/v1/audit-events", params={"filter": f"action = {action}"})
    return found.json()["audit_events"]


@pytest.mark.parametrize("verb", DOORS)
def test_what_makes_something_of_a_damaged_step_takes_a_reason(http, verb):
    body = DOORS[verb]
    refused = http.post(f"{STEP}:{verb}", json=body)
    assert is_refused(refused)
    assert "steps/3" in refused.json()["detail"]  # the newest sound one
    blank = http.post(f"{STEP}:{verb}", json={**body, "despite_damage": " \n"})
    assert blank.status_code == 422
    started = http.post(f"{STEP}:{verb}", json={**body, "despite_damage": REASON})
    operation = watch(http, started.json()["id"])
    if verb == "restore":  # what is not as it was saved is never copied
        assert operation["error"]["type"] == "urn:cairn:problem:corrupt"
    else:
        assert operation["state"] == "succeeded"
    action = {"restore": "checkpoint.fork"}.get(verb, f"checkpoint.{verb}")
    (entry,) = audit_of(http, action)[:1]
    assert (entry["detail"]["despite_damage"], entry["outcome"]) == (REASON, "done")
    assert entry["detail"]["operation"] == operation["id"]


def test_an_export_from_before_is_refused_and_stays_downloadable(http, exported):
    assert is_refused(http.post(f"{STEP}:convert", json={}))
    artifact = artifact_of(http, exported)
    file = f"/v1/artifacts/{artifact['id']}/files/{artifact['files'][0]['name']}"
    assert http.get(file).status_code == 200
    again = done(http, f"{STEP}:convert", {"despite_damage": REASON})
    assert again["result"]["existing"] is True


def test_an_alias_whose_step_is_found_damaged_stays_and_the_command_tells(http, root):
    shutil.copytree(root / "sound", root / "served")
    run = Run.open(root / "served")
    promote_step(run, 2, "production", expect=None)
    promote_step(run, 3, "staging", expect=None)
    note_verified(run, run.step(2), damage=Damage(at="2026-01-02T03:04:05Z"))
    shown = cairn_here("aliases", "served", url=str(http.base_url))
    assert shown.stderr == "production: served/steps/2 is damaged\n"
    assert "production\t2\t" in shown.stdout
    roll_back(run, 1, by="ann", strand=["production", "staging"])
    shown = cairn_here("aliases", "served", url=str(http.base_url))
    assert shown.stderr == "production: served/steps/2 is damaged\n"


def test_a_job_that_was_asked_for_before_looks_again(http, asked_before):
    assert http.post(f"/v1/operations/{asked_before}:resume").status_code == 200
    operation = watch(http, asked_before)
    assert operation["error"]["type"] == "urn:cairn:problem:step-damaged"


def test_a_verification_that_found_damage_is_not_resumed(http, verified):
    answer = http.post(f"/v1/operations/{verified['id']}:resume")
    assert answer.status_code == 409
    assert "verify again" in answer.json()["detail"]


def test_a_damaged_step_can_be_read_compared_and_verified(http):
    assert http.get(f"{STEP}/files").status_code == 200
    assert http.get(f"{STEP}/tensors").status_code == 200
    assert http.get(f"{STEP}:diff", params={"other": 3}).status_code == 200


def test_other_control_planes_and_a_rebuilt_index_tell_of_it(planes, verified):
    second = planes[1]
    assert steps_of(second, refresh=True, state="damaged") == [(2, "damaged")]
    plane = second.app.state.plane
    plane.index.rebuild(plane.roots)
    found = second.get(STEP).json()
    assert (found["state"], found["damaged"]["job"]) == ("damaged", verified["id"])


def test_damage_is_an_event_once(http):
    found = http.get("/v1/events", params={"run": "llama", "kind": "step.damaged"}).json()
    (event,) = found["events"]
    assert (event["detail"]["step"], event["detail"]["leaves"]) == (2, ["optimizer: mu/embedding"])


def test_the_command_says_damaged_and_what_to_do(http, root):
    url, step = str(http.base_url), "llama/steps/2"
    ran = cairn_here("verify", step, url=url)
    assert ran.returncode == 7
    assert f"{step} is damaged: it can't be promoted" in ran.stderr
    assert "The newest sound step is llama/steps/3" in ran.stderr
    for place in (step, str(root / "llama" / "steps" / "2")):
        shown = cairn_here("show", place, url=url).stdout
        assert "state: damaged, attempt 1" in shown
        assert "damaged leaves: optimizer: mu/embedding" in shown
    listed = cairn_here("checkpoints", "llama", url=url)
    assert "\tdamaged\t" in listed.stdout
    assert "llama: 1 damaged step" in listed.stderr
    stored = cairn_here("checkpoints", f"{root}/llama")
    assert stored.stdout == listed.stdout
    assert f"`cairn checkpoints {root}/llama --state damaged`" in stored.stderr
    titles, *rows = (line.split("\t") for line in cairn_here("top", url=url).stdout.splitlines())
    shown = {row[1]: row[titles.index("damaged")] for row in rows if row[0] == "default"}
    assert (shown["llama"], shown["sound"]) == ("1", "")
    for place in (step, str(root / "llama" / "steps" / "2")):
        assert f"{place} is damaged: plain Orbax" in cairn_here("path", place, url=url).stderr
    assert cairn_here("path", "llama/steps/3", url=url).stderr == ""


@pytest.mark.parametrize("verb", ["convert", "gather", "fork", "rollback", "pull", "promote"])
def test_the_command_refuses_a_damaged_step(http, verb, tmp_path):
    rest = {"fork": ["commanded"], "pull": [str(tmp_path / "pulled")]}.get(verb, [])
    step = ["llama", "2", "production"] if verb == "promote" else ["llama/steps/2", *rest]
    ran = cairn_here(verb, *step, url=str(http.base_url))
    assert ran.returncode == 7
    assert "the step is damaged" in ran.stderr
    assert not list(tmp_path.iterdir())


def test_what_is_damaged_is_pulled_for_a_reason(http, exported, tmp_path):
    with Client(str(http.base_url)) as client:
        place = {"root": "default", "options": {}}
        with pytest.raises(ProblemResponseError, match="damaged"):
            pull(client, "llama", 2, tmp_path, **place)
        assert not list(tmp_path.iterdir())
        found = pull(client, "llama", 2, tmp_path, despite_damage=REASON, **place)
    assert found.artifact == exported["result"]["artifact_id"]


def test_pages_say_it_and_ask_for_the_reason(http, verified):
    page = http.get("/ui/default/llama/steps/2").text
    assert "This step is damaged" in page
    for text in (
        verified["id"],
        "optimizer: mu/embedding",
        "the newest sound step",
        "Verify again",
        "A damaged step can't be promoted",
    ):
        assert text in page
    assert '<button type="submit" class="main" disabled>Promote</button>' in page
    assert page.count('name="despite_damage" required') == 3  # export, fork, roll back
    card = page[page.index(f'id="{verified["id"]}"') :].partition("</article>")[0]
    assert "Verify again" in card
    assert "Retry" not in card
    run = http.get("/ui/default/llama").text
    assert "A step of this run is damaged" in run
    assert "1 damaged step" in run
    assert 'class="mark damaged"' in run
    assert "1 damaged step" in http.get("/").text
    sound = http.get("/ui/default/llama/steps/3").text
    assert 'name="despite_damage"' not in sound
    assert "data-often" in sound  # a page that stays open tells, too, once it is found damaged


def test_a_rollback_to_a_damaged_step_takes_a_reason(http, root):
    shutil.copytree(root / "llama", root / "back")  # with what is noted of its steps
    back = "/v1/roots/default/runs/back/checkpoints/2"
    headers = {"If-Match": "*"}
    body = {"mode": "rollback"}
    assert is_refused(http.post(f"{back}:restore", json=body, headers=headers))
    done(http, f"{back}:restore", {**body, "despite_damage": REASON}, headers)
    (entry,) = audit_of(http, "checkpoint.rollback")[:1]
    assert entry["detail"]["despite_damage"] == REASON


def test_a_repaired_step_that_is_verified_again_is_listed_everywhere(planes, http, root):
    shutil.copytree(root / "llama", root / "mended")
    place = "/v1/roots/default/runs/mended"
    step = f"{place}/checkpoints/2"
    for plane in planes:
        assert plane.get(step, params={"refresh": True}).json()["state"] == "damaged"
    shutil.copytree(root / "sound" / "attempts", root / "mended" / "attempts", dirs_exist_ok=True)
    done(http, f"{step}:verify", {})
    second = planes[1]
    second.get(step, params={"refresh": True})
    for _ in range(2):
        for plane in planes:
            found = plane.get(step).json()
            assert (found["state"], found["damaged"]) == ("listed", None)
            assert found["verified"] is not None
            assert plane.get(place).json()["damaged_count"] == 0
        second.app.state.plane.index.rebuild(second.app.state.plane.roots)
    for plane in planes:
        events = plane.get("/v1/events", params={"run": "mended"}).json()["events"]
        kinds = [one["kind"] for one in events if one["kind"].startswith("step.")]
        assert kinds[-2:] == ["step.damaged", "step.recovered"]
    assert "damaged" not in plane.get("/ui/default/mended/steps/2").text
    headers = {"If-None-Match": "*"}
    promoted = http.post(f"{step}:promote", json={"alias": "production"}, headers=headers)
    assert promoted.status_code == 200


def test_a_note_that_cannot_be_read_lifts_nothing(http, root):
    shutil.copytree(root / "llama", root / "unread")
    step = "/v1/roots/default/runs/unread/checkpoints/2"
    assert http.get(step, params={"refresh": True}).json()["state"] == "damaged"
    (record,) = (root / "unread" / "annotations").glob("2.1.json")
    record.write_bytes(record.read_bytes()[:-20])
    assert http.get(step, params={"refresh": True}).json()["state"] == "damaged"
    events = http.get("/v1/events", params={"run": "unread", "kind": "step.recovered"}).json()
    assert events["events"] == []
