import json

import pytest

from tests.service.jobs import done, save_llama, serving, watch

GATHER = "/v1/roots/default/runs/llama/checkpoints/1:gather"
VERIFY = "/v1/roots/default/runs/llama/checkpoints/1:verify"
UNKNOWN = "/v1/operations/op-00000000000000000000000000000000"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    save_llama(root / "llama", steps=(1, 2))
    return root


@pytest.fixture(scope="module")
def http(store, tmp_path_factory):
    with serving(store, tmp_path_factory.mktemp("data")) as client:
        yield client


def events(http, operation, **headers):
    """(status, [(id, operation), ...]) of an event stream, read to its end."""
    found, last_id, body = [], None, None
    with http.stream("GET", f"/v1/operations/{operation}/events", headers=headers) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                body = json.loads(line.removeprefix("data: "))
            elif line.startswith("id: "):
                last_id = line.removeprefix("id: ")
            elif not line and body is not None:
                found.append((last_id, body))
                body = None
        return stream.status_code, found


def test_accepted_operation_can_be_found_at_its_location(http):
    answer = http.post(GATHER, json={})
    found = http.get(answer.headers["Location"])
    assert found.status_code == 200
    assert found.json()["id"] == answer.json()["id"]
    assert found.json()["request"]["run"] == "llama"
    assert found.json()["request"]["step"] == 1
    watch(http, answer.json()["id"])


def test_events_end_with_the_final_state(http):
    started = http.post(GATHER, json={"dtype": "float16"}).json()
    status, found = events(http, started["id"])
    states = [body["state"] for _, body in found]
    assert status == 200
    assert states[-1] == "succeeded"
    assert states == sorted(states, key=["pending", "running", "succeeded"].index)
    assert len({name for name, _ in found}) == len(found)
    last = found[-1][1]
    assert last["progress"]["done_bytes"] == last["progress"]["total_bytes"] > 0
    assert last == http.get(f"/v1/operations/{started['id']}").json()


def test_last_event_id_hears_nothing_twice(http):
    operation = done(http, GATHER, {})
    _, found = events(http, operation["id"])
    assert len(found) == 1
    status, again = events(http, operation["id"], **{"Last-Event-ID": found[0][0]})
    assert (status, again) == (204, [])
    _, older = events(http, operation["id"], **{"Last-Event-ID": "of-an-earlier-state"})
    assert older == found


def test_list_is_newest_first_in_pages(http):
    ids = [done(http, VERIFY, {})["id"] for _ in range(3)]
    first = http.get("/v1/operations", params={"page_size": 2}).json()
    assert [one["id"] for one in first["operations"]] == [ids[2], ids[1]]
    newer = done(http, VERIFY.replace("/1:", "/2:"), {})["id"]
    rest = http.get(
        "/v1/operations", params={"page_size": 1000, "page_token": first["next_page_token"]}
    ).json()
    listed = [one["id"] for one in rest["operations"]]
    assert listed[0] == ids[0]
    assert not {newer, ids[1], ids[2]} & {*listed}
    assert rest["next_page_token"] is None


def test_list_can_be_of_one_state(http):
    done(http, GATHER, {})
    succeeded = http.get("/v1/operations", params={"state": "succeeded"}).json()["operations"]
    assert {one["state"] for one in succeeded} == {"succeeded"}
    assert http.get("/v1/operations", params={"state": "failed"}).json()["operations"] == []


def test_token_of_another_list_is_refused(http):
    done(http, VERIFY, {})
    done(http, VERIFY, {})
    token = http.get("/v1/operations", params={"page_size": 1}).json()["next_page_token"]
    answer = http.get("/v1/operations", params={"page_token": token, "state": "failed"})
    assert answer.status_code == 422


@pytest.mark.parametrize("verb", ["cancel", "resume"])
def test_what_has_succeeded_is_neither_cancelled_nor_resumed(http, verb):
    operation = done(http, GATHER, {})
    answer = http.post(f"/v1/operations/{operation['id']}:{verb}")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cairn:problem:operation-state")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", UNKNOWN),
        ("GET", f"{UNKNOWN}/events"),
        ("POST", f"{UNKNOWN}:cancel"),
        ("POST", f"{UNKNOWN}:resume"),
    ],
)
def test_unknown_operation_is_not_found(http, method, path):
    answer = http.request(method, path)
    assert answer.status_code == 404
    assert answer.json()["type"] == "urn:cairn:problem:operation-not-found"


def test_malformed_id_is_refused(http):
    assert http.post("/v1/operations/x:cancel").status_code == 422
    assert http.get("/v1/operations/x").status_code == 422


def test_verb_is_not_taken_for_a_part_of_the_name(http):
    answer = http.get("/v1/operations/x:cancel")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert http.post("/v1/operations/x:frobnicate").status_code == 404


def test_no_job_is_started_without_an_engine(store, tmp_path):
    from fastapi.testclient import TestClient

    from cairn.service.app import create_app
    from cairn.service.settings import Settings
    from tests.service.conftest import BASE_URL, PEER

    app = create_app(Settings(root=str(store), data_dir=tmp_path), jobs=False)
    with TestClient(app, base_url=BASE_URL, client=PEER) as client:
        answer = client.post(GATHER, json={})
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:cairn:problem:not-ready")
