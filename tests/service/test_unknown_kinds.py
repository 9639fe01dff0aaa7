"""A newer server has started operations of a kind that this one does not know."""

import pytest

from cairn import Client, Settings, create_app
from cairn.service.schemas import Operation
from tests.service.access.conftest import Keys, bearer
from tests.service.jobs import done, save_llama, serving
from tests.service.seams import database
from tests.service.servers import serve

NEWER = "op-" + "f" * 32
REQUEST = {"root": "default", "run": "llama", "step": 1, "teacher": "other"}


def start_newer(url, name="cairn.distil", operation=NEWER, request=REQUEST):
    client = database.open_database(url)
    options = {
        "workflow_name": name,
        "queue_name": "cairn-distil-1",
        "workflow_id": operation,
        "app_version": database.APPLICATION_VERSION,
    }
    client.enqueue(options, request)
    client.destroy()


@pytest.fixture
def store(tmp_path):
    save_llama(tmp_path / "store/llama")
    return tmp_path / "store"


@pytest.fixture
def data(tmp_path):
    """Of a server that a newer one has shared its databases with."""
    settings = Settings(root=str(tmp_path / "store"), data_dir=tmp_path / "data")
    settings.prepare()
    return settings


@pytest.fixture
def http(store, data):
    with serving(store, data.data_dir) as client:
        start_newer(data.jobs_database_url)
        yield client


def test_it_is_listed_and_shown_among_those_that_are_known(http):
    own = done(http, "/v1/roots/default/runs/llama/checkpoints/1:verify", {})["id"]
    listed = http.get("/v1/operations").json()["operations"]
    assert {(one["id"], one["kind"]) for one in listed} == {(NEWER, "distil"), (own, "verify")}
    found = http.get(f"/v1/operations/{NEWER}")
    assert (found.status_code, found.json()["kind"], found.json()["state"]) == (
        200,
        "distil",
        "pending",
    )
    assert found.json()["request"] == REQUEST
    assert Operation.model_validate(found.json()).kind == "distil"


@pytest.mark.parametrize("verb", ["cancel", "resume"])
def test_nothing_is_done_to_it(http, verb):
    answer = http.post(f"/v1/operations/{NEWER}:{verb}")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cairn:problem:unknown-kind")
    assert "is a 'distil', which a newer server started" in answer.json()["detail"]
    assert http.get(f"/v1/operations/{NEWER}").json()["state"] == "pending"
    (entry,) = http.get("/v1/audit-events").json()["audit_events"]
    assert (entry["action"], entry["outcome"]) == (f"operation.{verb}", "refused")


def test_it_has_a_card_and_a_page_without_what_can_not_be_done(http):
    for path in ("/operations", f"/operations/{NEWER}", "/ui/default/llama/steps/1"):
        page = http.get(path)
        assert page.status_code == 200
        assert "This server does not know this kind of operation" in page.text
        assert f"{NEWER}/cancel" not in page.text
    refused = http.post(f"/operations/{NEWER}/cancel")
    assert refused.status_code == 409


def test_parts_of_jobs_and_what_is_not_ours_are_no_operations(http, data):
    other = "op-" + "e" * 32
    start_newer(data.jobs_database_url, "somebody.elses", other)
    assert http.get(f"/v1/operations/{other}").status_code == 404
    part = "op-" + "d" * 32
    start_newer(data.jobs_database_url, "cairn.part", part)
    assert http.get(f"/v1/operations/{part}").status_code == 404
    assert [one["id"] for one in http.get("/v1/operations").json()["operations"]] == [NEWER]


def test_keys_of_other_roots_see_nothing_of_it(store, data, tmp_path):
    (tmp_path / "more").mkdir()
    roots = {"more": str(tmp_path / "more")}
    with serving(store, data.data_dir, auth="keys", roots=roots) as http:
        start_newer(data.jobs_database_url)
        start_newer(data.jobs_database_url, operation=NEWER[:-1] + "e", request={"teacher": "x"})
        keys = Keys(data.database_url)
        elsewhere = bearer(keys.make("elsewhere", "operate", roots=["more"]))
        everywhere = bearer(keys.make("everywhere", "read"))
        assert http.get("/v1/operations", headers=elsewhere).json()["operations"] == []
        assert len(http.get("/v1/operations", headers=everywhere).json()["operations"]) == 2


def test_clients_read_it(store, data):
    app = create_app(data)
    with serve(app) as url, Client(url) as cairn:
        start_newer(data.jobs_database_url)
        (found,) = cairn.operations()
        assert (found.kind, cairn.operation(NEWER).kind) == ("distil", "distil")
