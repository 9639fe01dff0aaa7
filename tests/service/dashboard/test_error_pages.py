"""Errors are pages for browsers, parts of pages for forms, and JSON for programs."""

import pytest
from fastapi.testclient import TestClient

from tests.service.conftest import BASE_URL, PEER
from tests.service.stores import make_run

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FORM = {"HX-Request": "true", "Origin": BASE_URL}
PROMOTE = "/ui/default/run/steps/1/promote"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nothing", 404),
        ("/ui/other/run", 404),
        ("/ui/default/none", 404),
        ("/ui/default/run/steps/7", 404),
        ("/ui/default/run/steps/x", 422),
        ("/ui/default/run?filter=nonsense", 422),
        ("/ui/default/run/steps/1/plan?mesh=4", 422),
        ("/?page_token=x", 422),
        ("/operations/op-0", 422),
        ("/operations", 503),
    ],
)
def test_browser_reads_a_page_and_a_program_json(http, root, path, status):
    make_run(root / "run", [1])
    read = http.get(path, headers=HTML)
    assert (read.status_code, read.headers["content-type"]) == (status, "text/html; charset=utf-8")
    assert f'<p class="code">{status}</p>' in read.text
    assert 'href="/">All runs</a>' in read.text
    assert read.headers["x-request-id"] in read.text
    assert "Content-Security-Policy" in read.headers
    told = http.get(path)
    assert (told.status_code, told.headers["content-type"]) == (status, "application/problem+json")
    assert told.json()["status"] == status


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/nothing", "<h1>Page not found</h1>"),
        ("/ui/other/run", "There is no root &#34;other&#34; on this server."),
        ("/ui/default/none", "There is no run &#34;none&#34; in root &#34;default&#34;."),
        ("/ui/default/run/steps/7", "There is no step 7 in run &#34;run&#34; (steps 1)."),
        ("/ui/default/a b", "use letters, digits, &#39;.&#39;, &#39;_&#39;, &#39;=&#39;"),
    ],
)
def test_page_of_what_is_not_there_says_so_in_a_sentence(http, root, path, sentence):
    make_run(root / "run", [1])
    page = http.get(path, headers=HTML)
    assert sentence in page.text
    assert "expected" not in page.text


def test_below_the_api_everybody_is_answered_json(http):
    answer = http.get("/v1/runs?nonsense=1", headers=HTML)
    assert answer.headers["content-type"] == "application/problem+json"


def test_unexpected_error_is_a_page_that_says_nothing_of_the_inside(app, root, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("the inside")

    monkeypatch.setattr("cairn.service.dashboard.pages.runs.page_of_runs", broken)
    with TestClient(app, base_url=BASE_URL, client=PEER) as http:
        answer = http.get("/", headers=HTML)
    assert (answer.status_code, answer.headers["content-type"]) == (500, "text/html; charset=utf-8")
    assert "the inside" not in answer.text


def test_form_that_cannot_be_is_answered_with_a_part_that_says_why(http, root):
    make_run(root / "run", [1])
    answer = http.post(PROMOTE, data={"alias": "7"}, headers=FORM)
    assert answer.status_code == 422
    assert answer.text.startswith('<div class="notice bad" role="alert">')
    assert "a number alone is a step, not an alias" in answer.text
    assert "[A-Za-z" not in answer.text


def test_what_a_form_says_is_text_wherever_it_is_shown(http, root):
    make_run(root / "run", [1])
    hostile = '<script>alert("x")</script>'
    data = {"name": "note", "value": hostile}
    for path in ("/ui/default/run/labels", "/ui/default/run/steps/1/notes"):
        assert hostile not in http.post(path, data=data, headers=FORM).text
    promoted = http.post(PROMOTE, data={"alias": "best", "reason": hostile}, headers=FORM)
    assert promoted.status_code == 200
    for path in ("", "/aliases", "/steps/1"):
        page = http.get(f"/ui/default/run{path}", headers=HTML)
        assert page.status_code == 200
        assert hostile not in page.text
        assert "&lt;script&gt;" in page.text


def test_page_of_another_site_changes_nothing(http, root):
    make_run(root / "run", [1])
    answer = http.post(
        PROMOTE, data={"alias": "best"}, headers=HTML | {"Origin": "https://evil.example"}
    )
    assert answer.status_code == 403
    assert not (root / "run" / "aliases").exists()


def test_alias_that_moved_since_the_page_was_shown_stays(http, root):
    make_run(root / "run", [1, 2])
    assert http.post(PROMOTE, data={"alias": "best"}, headers=FORM).status_code == 200
    later = PROMOTE.replace("/1/", "/2/")
    unseen = http.post(later, data={"alias": "best"}, headers=FORM)
    assert unseen.status_code == 412
    assert "Already changed by" in unseen.text
    stale = http.post(later, data={"alias": "best", "seen": "best=99"}, headers=FORM)
    assert stale.status_code == 412
    alias = http.get("/v1/roots/default/runs/run/aliases/best").json()
    assert alias["step"] == 1
    seen = f"best={alias['sequence']}"
    assert http.post(later, data={"alias": "best", "seen": seen}, headers=FORM).status_code == 200
