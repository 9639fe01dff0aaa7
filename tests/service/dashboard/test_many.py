"""Pages of stores that have much are as light, and ask as little of the catalog."""

import re
from datetime import UTC, datetime, timedelta
from html import unescape

from sqlalchemy import event, insert

from cairn.service.catalog.models import EventRow
from tests.service.seams import models
from tests.service.stores import make_run

HTML = {"Accept": "text/html"}
LINK = re.compile('href="([^"]+)" rel="(next|prev)"')
RUNS = 400
STEPS = 30
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def fill(catalog, numbers):
    """Runs of these numbers, of which only the catalog knows."""
    runs = [
        {
            "id": 10 + at,
            "root": "default",
            "name": f"run-{at:04}",
            "uri": f"file:///nowhere/run-{at:04}",
            "created": NOW,
            "labels": {"owner": f"person-{at % 10}", "team": "nlp"},
            "latest_step": STEPS,
            "checkpoint_count": STEPS,
            "nbytes": STEPS * 10**9,
            "problems": [],
            "revision": 1,
        }
        for at in numbers
    ]
    steps = [
        {
            "run_id": run["id"],
            "step": step,
            "attempt": 1,
            "state": "listed",
            "created": NOW + timedelta(minutes=step),
            "nbytes": 10**9,
            "items": ["model"],
            "iterators": {},
            "labels": {},
            "metrics": {"loss": 1.0},
            "better": {},
            "stamps": {},
        }
        for run in runs
        for step in range(STEPS)
    ]
    events = [
        {
            "uid": f"evt-{run['id']}-{at}",
            "kind": "job.ended",
            "root": "default",
            "run": run["name"],
            "sequence": at + 1,
            "identity": f"{run['id']}-{at}",
            "detail": {"operation": f"op-{at}", "kind": "verify", "state": "failed", "step": at},
            "at": NOW,
        }
        for run in [*runs[:50], *runs[50:][-50:]]
        for at in range(100)
    ]
    with catalog.write() as session:
        session.execute(insert(EventRow), events)
        session.execute(insert(models.RunRow), runs)
        session.execute(insert(models.CheckpointRow), steps)


def statements_of(http, catalog, path):
    """How many statements a page has the database execute, the fewest of three times; the page.

    What has just changed in the store is read again, until it is some seconds old.
    """
    return min((_statements_of(http, catalog, path) for _ in range(3)), key=lambda one: one[0])


def _statements_of(http, catalog, path):
    count = 0

    def executed(*_arguments):
        nonlocal count
        count += 1

    event.listen(catalog.engine, "before_cursor_execute", executed)
    try:
        answer = http.get(path, headers=HTML)
    finally:
        event.remove(catalog.engine, "before_cursor_execute", executed)
    assert answer.status_code == 200
    return count, answer


def test_pages_of_many_runs_ask_no_more_than_pages_of_few(http, app, root):
    catalog = app.state.plane.catalog
    make_run(root / "run", [1])
    assert http.get("/", headers=HTML).status_code == 200
    paths = "/", "/?q=run-03&owner=person-3", "/?order_by=bytes+desc"
    few_runs = range(300, RUNS)  # as many as a page shows, and all that the search finds
    fill(catalog, few_runs)
    few = [statements_of(http, catalog, path)[0] for path in paths]
    fill(catalog, [at for at in range(RUNS) if at not in few_runs])
    for path, before in zip(paths, few, strict=True):
        count, answer = statements_of(http, catalog, path)
        assert count <= before, path
        assert len(answer.content) < 85_000  # labels may be longer than these
        assert answer.text.count("every 1 min") > 5
        assert answer.text.count("27.0 GB") > 5  # all but the last three steps
        assert answer.text.count("verify failed: step 99, 39 more") > 4


def test_pages_of_a_list_lead_forth_and_back(http, app, root):
    make_run(root / "run", [1])
    http.get("/", headers=HTML)
    fill(app.state.plane.catalog, range(RUNS))

    def page_at(address):
        text = http.get(address, headers=HTML).text
        links = {rel: unescape(href) for href, rel in LINK.findall(text)}
        return re.search(r"/ui/default/([^\"/]+)", text)[1], links

    name, links = page_at("/?order_by=name")
    assert (name, set(links)) == ("run", {"next"})
    seen = [name]
    for direction in ("next", "next", "prev", "prev"):
        name, links = page_at(links[direction])
        seen.append(name)
    assert seen == ["run", "run-0049", "run-0099", "run-0049", "run"]
    assert set(links) == {"next"}


def test_runs_are_asked_for_by_a_part_of_their_name_and_by_states_of_their_steps(http, app, root):
    make_run(root / "run", [1])
    http.get("/", headers=HTML)
    fill(app.state.plane.catalog, range(RUNS))

    def names(text):
        found = http.get("/v1/runs", params={"filter": text, "page_size": 1000}).json()["runs"]
        return [one["name"] for one in found]

    assert names("name:UN-012") == [f"run-012{at}" for at in range(10)]
    assert names('name:"%"') == names("states:in_flight") == []
    assert len(names("states:listed AND name:run-0")) == RUNS
    assert names("NOT name:run-") == ["run"]
