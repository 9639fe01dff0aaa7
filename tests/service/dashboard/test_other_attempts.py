"""A step that was saved anew is not taken for the one that an alias, or a page, was about."""

import re
from html import unescape

import pytest

from cairn import promote_step
from tests.service.conftest import BASE_URL
from tests.service.stores import add_steps, make_run

FORM = {"HX-Request": "true", "Origin": BASE_URL}
HTML = {"Accept": "text/html"}


@pytest.fixture
def run(root):
    """Aliases name steps 2 and 1; step 2 was saved anew by attempt 2 since."""
    run = make_run(root / "run", [1, 2])
    first = promote_step(run, 2, "production", expect=None)
    promote_step(run, 1, "production", expect=first.sequence)
    promote_step(run, 2, "candidate", expect=None)
    add_steps(run, [2], base_step=1)
    return run


def fields_of(page: str, button: str) -> dict[str, str]:
    """What the form with this button sends, and where to, as `action`."""
    (form,) = [
        one for one in re.findall("<form.*?</form>", page, re.DOTALL) if f">{button}<" in one
    ]
    sent = re.findall(r'<input[^>]* name="([^"]+)"[^>]* value="([^"]*)"', form)
    (action,) = re.findall(r' action="([^"]+)"', form)
    return {"action": unescape(action), **{name: unescape(value) for name, value in sent}}


def test_alias_is_not_compared_by_another_attempts_step(http, run):
    asked = {"root": "default", "run": "run", "step": "candidate", "other": "production"}
    answer = http.get("/compare", params=asked, headers=HTML, follow_redirects=False)
    assert answer.status_code == 409
    assert "attempt 1" in answer.text
    assert "attempt 2" in answer.text
    asked["step"] = "2"
    answer = http.get("/compare", params=asked, headers=HTML, follow_redirects=False)
    assert answer.headers["location"].startswith("/ui/default/run/steps/2/compare?")


def test_alias_is_promoted_back_by_hand_to_the_attempt_that_its_history_names(http, run):
    alias = "/v1/roots/default/runs/run/aliases/production"
    before = http.get(f"{alias}/history").json()["events"][1]
    assert (before["step"], before["attempt"]) == (2, 1)

    def promoted(attempt):
        return http.post(
            "/v1/roots/default/runs/run/checkpoints/2:promote",
            json={"alias": "production", "attempt": attempt},
            headers={"If-Match": http.get(alias).headers["ETag"]},
        )

    refused = promoted(1)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:cairn:problem:step-changed")
    assert http.get(alias).json()["step"] == 1
    assert promoted(2).json()["attempt"] == 2


def test_alias_does_not_go_back_to_a_step_that_was_saved_anew(http, run):
    page = http.get("/ui/default/run/aliases/production", headers=FORM).text
    form = fields_of(page, "Revert production")
    assert form["action"].endswith("/steps/2/promote")
    answer = http.post(form.pop("action"), data=form, headers=FORM)
    assert answer.status_code == 409
    assert "attempt 2" in answer.text
    assert run.aliases.require("production").step == 1
    page = http.get("/ui/default/run/aliases", headers=HTML).text
    assert "step 2</a> (attempt 1)" in page  # where `candidate` still is


def test_page_that_showed_a_step_does_not_promote_one_that_was_saved_since(http, run):
    form = fields_of(http.get("/ui/default/run/steps/2", headers=HTML).text, "Promote")
    add_steps(run, [2], base_step=1)
    stale = form | {"alias": "candidate"}
    path = stale.pop("action")
    moved = promote_step(run, 1, "candidate", expect=run.aliases.require("candidate").sequence)
    faster = http.post(path, data=stale, headers=FORM)
    assert faster.status_code == 409  # whatever the alias is by now
    stale["seen"] = f"candidate={moved.sequence}"
    again = http.post(path, data=stale, headers=FORM)
    assert again.status_code == 409
    assert run.aliases.require("candidate").step == 1
    assert http.get("/ui/default/run/steps/2", headers=HTML).status_code == 200


def test_page_that_showed_a_step_notes_nothing_of_one_that_was_saved_since(http, run):
    form = fields_of(http.get("/ui/default/run/steps/2", headers=HTML).text, "Save")
    path, noted = form.pop("action"), form | {"kind": "label", "name": "eval", "value": "passed"}
    add_steps(run, [2], base_step=1)
    assert http.post(path, data=noted, headers=FORM).status_code == 409
    assert http.get("/v1/roots/default/runs/run/checkpoints/2").json()["labels"] == {}
    noted["attempt"] = "3"
    assert "passed" in http.post(path, data=noted, headers=FORM).text


@pytest.mark.parametrize(
    ("button", "job"),
    [("Fork", "fork"), ("Fork", "convert"), ("Roll back to step 2", "rollback")],
)
def test_page_that_showed_a_step_starts_no_job_with_one_saved_since(http, run, button, job):
    add_steps(run, [3], base_step=2)
    form = fields_of(http.get("/ui/default/run/steps/2", headers=HTML).text, button)
    add_steps(run, [2, 3], base_step=1)
    del form["action"]
    answer = http.post(f"/ui/default/run/steps/2/{job}", data=form, headers=FORM)
    assert answer.status_code == 409
    assert "attempt 4" in answer.text
