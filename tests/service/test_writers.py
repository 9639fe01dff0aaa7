"""Who writes a run over HTTP, and taking it from a job that is over, or is to end."""

import pytest

from cairn import Client, FencedError, Run, Writer
from cairn.service.errors import ProblemResponseError
from tests.service.access.conftest import Keys, bearer
from tests.service.jobs import serving
from tests.service.servers import serve
from tests.service.stores import begin_saving, make_run

RUN = "/v1/roots/default/runs/run"


@pytest.fixture
def run(root):
    return make_run(root / "run", [1, 2])


@pytest.fixture
def writer(run):
    made = Writer(run, writer="job-7")
    made.begin()
    yield made
    made.close()


def test_writer_is_told_from_the_store(http, root, run, writer):
    found = http.get(f"{RUN}/writer").json()
    assert (found["writer"], found["attempt"], found["holds"]) == ("job-7", 2, True)
    writer.close()
    assert http.get(f"{RUN}/writer").json()["holds"] is False
    Run.create(root / "new")
    assert http.get("/v1/roots/default/runs/new/writer").json() == {
        "writer": None,
        "attempt": None,
        "expires": None,
        "holds": False,
    }


def test_run_that_is_taken_over_is_free_and_its_writer_saves_no_more(http, run, writer):
    answer = http.post(f"{RUN}:takeOver", json={"attempt": 2, "reason": "the node is gone"})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"writer": "job-7", "ended": 2, "attempt": 3, "latest_step": 2}
    assert http.get(f"{RUN}/writer").json()["holds"] is False
    writer.drop()
    with pytest.raises(FencedError):
        writer.claim(3)
    other = Writer(run, writer="job-8")
    assert other.begin() == 4
    other.close()
    assert [one["step"] for one in http.get(f"{RUN}/checkpoints").json()["checkpoints"]] == [2, 1]


def test_step_in_flight_is_abandoned_as_soon_as_its_writer_is_replaced(http, run):
    begin_saving(run, 3)
    shown = f"{RUN}/checkpoints/3?refresh=true"
    assert http.get(shown).json()["state"] == "in_flight"
    assert http.post(f"{RUN}:takeOver", json={"attempt": 2}).status_code == 200
    assert http.get(shown.removesuffix("?refresh=true")).json()["state"] == "abandoned"


def test_what_is_not_held_as_it_was_seen_stays_and_the_trail_tells_all(http, run, writer):
    stale = http.post(f"{RUN}:takeOver", json={"attempt": 1})
    assert (stale.status_code, stale.json()["type"]) == (
        412,
        "urn:cairn:problem:precondition-failed",
    )
    assert "job-7, by attempt 2" in stale.json()["detail"]
    assert http.get(f"{RUN}/writer").json()["holds"] is True
    http.post(f"{RUN}:takeOver", json={"attempt": 2, "reason": "gone"})
    done, refused = http.get("/v1/audit-events").json()["audit_events"]
    assert (done["action"], done["outcome"], done["run"]) == ("run.takeOver", "done", "run")
    assert done["detail"] == {
        "attempt": 2,
        "reason": "gone",
        "writer": "job-7",
        "latest_step": 2,
    }
    assert refused["outcome"] == "refused"


def test_only_administrators_of_its_root_take_a_run_over(root, run, writer, tmp_path):
    (tmp_path / "more").mkdir()
    roots = {"more": str(tmp_path / "more")}
    with serving(root, tmp_path / "data", auth="keys", roots=roots) as http:
        keys = Keys(http.app.state.plane.settings.database_url)
        operator = bearer(keys.make("operator", "operate"))
        elsewhere = bearer(keys.make("elsewhere", "admin", roots=["more"]))
        own = bearer(keys.make("own", "admin", roots=["default"]))
        asked = {"attempt": 2}
        assert http.get(f"{RUN}/writer", headers=operator).status_code == 200
        assert http.post(f"{RUN}:takeOver", json=asked, headers=operator).status_code == 403
        assert http.post(f"{RUN}:takeOver", json=asked, headers=elsewhere).status_code == 403
        assert http.post(f"{RUN}:takeOver", json=asked, headers=own).status_code == 200


def test_client_takes_a_run_over(app, run, writer):
    with serve(app) as url, Client(url) as cairn:
        held = cairn.writer("run")
        assert (held.writer, held.holds) == ("job-7", True)
        with pytest.raises(ProblemResponseError) as raised:
            cairn.take_over_run("run", attempt=9)
        assert raised.value.status == 412
        taken = cairn.take_over_run("run", attempt=held.attempt, reason="gone")
        assert (taken.writer, taken.latest_step) == ("job-7", 2)
        assert not cairn.writer("run").holds
