"""(m) Each request of each verb to a bucket fails, in each way, and others come in between.

A request is one by what it asks for, as threads of a verb go in any order. The long run takes each
of each verb; `make test` a few of an overwrite, and a few of a reader and a writer meanwhile.
"""

import re
import threading
from collections import Counter
from functools import partial

import pytest

from cairn import StorageError, StoreUnavailableError, parse_uri
from tests.faults import report
from tests.faults.bucket_verbs import VERBS, Job, opened, saved, seen
from tests.gcs.impatience import impatient
from tests.storage.copies import Copies
from tests.storage.seams import gcs as client
from tests.storage.seams import s3 as client_of_s3
from tests.stores import SERVERS

CHANGES = ("upload", "objects.put", "objects.delete", "objects.rewrite", "objects.copy")
WAYS = ("refused once", "answer lost", "down", "done, then down", "never answered")
SHORT = {"overwrite, held": ("answer lost", "done, then down")}
PLAN = dict.fromkeys(VERBS, WAYS) if report.is_long() else SHORT
OF_SHORT = re.compile(r"/run/(attempts|manifests)/[0-9.]+json")
UNIQUE = re.compile(r"[0-9a-f]{8,}|-[0-9]{9,}-")

pytestmark = pytest.mark.timeout(3600 if report.is_long() else 300)


@pytest.fixture(autouse=True)
def _impatient():
    with impatient(max_retries=2):
        yield


@pytest.fixture(scope="module")
def copies(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made-once")
    return Copies(folder, lambda scheme: request.getfixturevalue(SERVERS[scheme]))


class Bucket:
    """Runs in a bucket, one for each case, and the requests about the last of them."""

    def __init__(self, double, copies, prepare):
        self.double, self.copies, self.prepare = double, copies, prepare
        self.cases = 0

    def new_run(self):
        self.cases += 1
        self.root = parse_uri(self.double.bucket_uri) / f"root-{self.cases}"
        self.copies.put(self.prepare, self.root / "run")
        return self.root / "run"

    def asked(self, request):
        """What a request asks for; None if it is about no run."""
        query = request.query
        name = request.name or query.get("name") or query.get("prefix") or ""
        if not f"{request.bucket}/{name}".startswith(f"{self.double.bucket}/{self.root.path}/"):
            return None
        return request.operation, UNIQUE.sub("*", name.removeprefix(self.root.path))

    def requests(self, act):
        """Everything that is asked for while `act` is called, with how often before."""
        asked = []
        self.double.faults.add(
            "slow", predicate=lambda one: asked.append(self.asked(one)), count=None
        )
        act()
        self.double.faults.clear()
        keys = [key for key in asked if key is not None]
        return [(key, keys[:at].count(key)) for at, key in enumerate(keys)]

    def order(self, way, key, before):
        """Have the request that asks for `key` after `before` such fail, and what `way` says."""
        faults, hit = self.double.faults, []

        def is_it(request):
            asked = self.asked(request)
            if asked == key and not hit:
                is_it.left -= 1
                if is_it.left < 0:
                    hit.append(request)
                    return True
            return False

        def comes_after(request):
            return bool(hit) and self.asked(request) is not None and request is not hit[0]

        def asks_the_same(request):
            return is_it(request) or (bool(hit) and self.asked(request) == key)

        is_it.left = before
        if way == "never answered":
            return faults.add("lost_response", predicate=asks_the_same, count=None)
        kind = {"refused once": "status", "down": "status", "held": "hold"}.get(
            way, "lost_response"
        )
        ordered = faults.add(kind, predicate=is_it)
        if "down" in way:
            faults.add("status", predicate=comes_after, count=None)
        return ordered


def died(act):
    getattr(act, "die", lambda: None)()


def play(bucket, verb, before, after, way, request, kill):
    """One case: how it ended, and what is wrong."""
    uri = bucket.new_run()
    act = verb.begin(uri)
    ordered = bucket.order(way, *request)
    wrong = []
    outcome = "done"
    try:
        result = act()
        if not verb.agrees(result):
            wrong.append(f"returned {result}")
    except StorageError as exc:
        outcome = type(exc).__name__
        if not isinstance(exc, StoreUnavailableError):
            wrong.append(f"raised {exc!r}")
    fired = ordered.fired
    if kill:
        died(act)
    bucket.double.faults.clear()
    now = seen(uri, verb.attempts)
    if now != after and (outcome == "done" or now != before):
        wrong.append(f"{outcome}, and there is {now}")
    again = verb.begin(uri) if kill else act
    try:
        again()
    except verb.already:
        if now != after:
            wrong.append("the same again was refused")
    except StorageError as exc:
        wrong.append(f"the same again raised {exc!r}")
    died(again)
    if (then := seen(uri, verb.attempts)) != after:
        wrong.append(f"{outcome}, and after the same again there is {then}")
    return outcome if fired else "not asked", wrong


@pytest.mark.parametrize("name", PLAN)
def test_a_verb_whose_request_fails_says_the_truth_and_can_be_asked_for_again(name, double, copies):
    verb = VERBS[name]
    bucket = Bucket(double, copies, verb.prepare)
    uri = bucket.new_run()
    before, act = seen(uri, verb.attempts), verb.begin(uri)
    requests = bucket.requests(act)
    died(act)
    after = seen(uri, verb.attempts)
    if not report.is_long():
        requests = [one for one in requests if one[0][0] == "upload" and OF_SHORT.match(one[0][1])]
    outcomes, wrong = Counter(), []
    for way in PLAN[name]:
        for request in requests:
            if way == "never answered" and request[0][0] not in CHANGES:
                continue
            ends = {"down" in way, False} if report.is_long() else {"down" in way}
            for kill in ends:
                outcome, problems = play(bucket, verb, before, after, way, request, kill)
                outcomes[way, outcome] += 1
                wrong += [f"{way}: {request}: {text}" for text in problems]
    lost = len({line.partition(": returned")[0] for line in wrong})
    report.record(
        fault=f"m each request: {name}",
        store=bucket.double.kind,
        trials=outcomes.total(),
        survived=outcomes.total() - lost,
        lost=lost,
        note=f"{len(requests)} requests; {dict(outcomes)}",
    )
    assert not wrong, "\n".join(wrong)
    assert requests


def listing(uri):
    return sorted(opened(uri).step_attempts().items())


@pytest.fixture
def pages(monkeypatch):
    """Lists come two names at a time."""
    request = client.request

    def small(operation, path, call, *arguments, **options):
        if "maxResults" in options:
            options["maxResults"] = 2
        return request(operation, path, call, *arguments, **options)

    monkeypatch.setattr(client, "request", small)
    call = client_of_s3.call

    def small_of_s3(operation, path, method, /, **query):
        return call(operation, path, method, **query, MaxKeys=2)

    monkeypatch.setattr(client_of_s3, "call", small_of_s3)


def held(bucket, act, request, meanwhile):
    """Do `meanwhile` while a request of `act` waits; whether it asked that, and what it gave."""
    result = []

    def run():
        try:
            result.append(act())
        except StorageError as exc:
            result.append(exc)

    ordered = bucket.order("held", *request)
    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and not ordered.fired:
        thread.join(0.002)
    if ordered.fired:
        meanwhile()
    bucket.double.faults.clear()
    thread.join()
    return ordered.fired > 0, result[0]


def later_steps(uri):
    """Overwrite the second step, then save the third and a fourth anew."""
    job = Job(uri)
    job.save(2, overwrite=True)
    job.save(3)
    job.save(4)
    job.die()


def told(fault, double, requests, wrong):
    report.record(
        fault=f"m {fault}",
        store=double.kind,
        trials=len(requests),
        survived=len(requests) - len(wrong),
        lost=len(wrong),
    )
    assert requests
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("pages")
def test_a_reader_that_an_overwrite_overtakes_sees_the_run_as_it_was_at_some_moment(double, copies):
    bucket = Bucket(double, copies, saved)
    requests = bucket.requests(partial(listing, bucket.new_run()))
    if not report.is_long():
        requests = requests[len(requests) // 2 :][:2]
    moments = [
        [(1, 1), (2, 1), (3, 1)],
        *([(1, 1), (2, 2), (3, 2), (4, 2)][:end] for end in (2, 3, 4)),
    ]
    wrong = []
    for request in requests:
        uri = bucket.new_run()
        _, result = held(bucket, partial(listing, uri), request, partial(later_steps, uri))
        if result not in moments:
            wrong.append(f"{request}: {result}")
    told("a reader that is overtaken", double, requests, wrong)


@pytest.mark.usefixtures("pages")
def test_a_writer_that_wakes_after_its_successor_leaves_what_that_has_saved(double, copies):
    """It is at any of the requests of an overwrite then, of another step."""
    bucket = Bucket(double, copies, saved)
    act = VERBS["overwrite, held"].begin(bucket.new_run())
    # All of a process wait for the probe of a store, the successor here too.
    requests = [one for one in bucket.requests(act) if "/.cairn-" not in one[0][1]]
    died(act)
    if not report.is_long():
        requests = [one for one in requests if one[0][0] == "upload" and OF_SHORT.match(one[0][1])]
    wrong = []
    for request in requests:
        uri = bucket.new_run()
        act = VERBS["overwrite, held"].begin(uri)
        left = []

        def succeed(uri=uri, left=left):
            job = Job(uri, 1, overwrite=True)
            left.append(job())
            job.die()

        asked, result = held(bucket, act, request, succeed)
        died(act)
        if asked and listing(uri) != [(1, left[0])]:
            wrong.append(f"{request}: {listing(uri)}, told {result}")
        successor = Job(uri).begin()
        if asked and successor.writer.attempt.base_step != 1:
            wrong.append(f"{request}: the next goes on from {successor.writer.attempt}")
        died(successor)
    told("a writer that wakes late", double, requests, wrong)
