"""A bucket that takes a request and never answers: every call ends, with an error that says so."""

from random import Random

import pytest

from tests.faults import report
from tests.faults.hangs import READS, Hangs, short_deadline

pytestmark = pytest.mark.timeout(3600 if report.is_long() else 300)

SHORT_SAMPLES = 1


@pytest.fixture
def hangs(double):
    made = Hangs(double, f"{double.bucket_uri}/run")
    with short_deadline():
        yield made


def indices(count, name):
    """Every request in the long run; else some, and the last, before which most has happened."""
    if report.is_long():
        return range(count)
    chosen = Random(f"{report.seed()} {name}").sample(range(count), min(SHORT_SAMPLES, count))
    return sorted({*chosen, count - 1})


def recorded(hangs, name, trials):
    lost = len({problem.partition(":")[0] for problem in hangs.problems})
    report.record(
        fault=f"g a request that is never answered: {name}",
        store=hangs.double.kind,
        trials=trials,
        survived=trials - lost,
        lost=lost,
        note=f"{hangs.hung} met a request that hung",
    )
    assert hangs.hung > 0
    assert not hangs.problems, "\n".join(hangs.problems)


SHORT_SAVES = [("hang", None), ("mute", 1)]
LONG_SAVES = [*SHORT_SAVES, ("hang", 1), ("stall_download", None)]


@pytest.mark.parametrize(("kind", "count"), LONG_SAVES if report.is_long() else SHORT_SAVES)
def test_a_save_whose_store_falls_silent_fails_and_is_never_published(hangs, kind, count):
    chosen = indices(hangs.begin(kind), f"save {kind} {count}")
    for at in chosen:
        hangs.save(at, kind, count)
    recorded(hangs, f"save {kind}" + (" at one request" if count == 1 else ""), len(chosen))


SHORT = [("load", "stall_download"), ("promote", "hang")]
LONG = [(name, kind) for name in READS for kind in ("hang", "stall_download")]


@pytest.mark.parametrize(("name", "kind"), LONG if report.is_long() else SHORT)
def test_a_call_whose_store_falls_silent_ends(hangs, name, kind):
    hangs.begin(kind)
    chosen = indices(hangs.requests(lambda: READS[name](hangs.uri, 1), kind), name)
    for at in chosen:
        hangs.read(name, at, kind, None)
    recorded(hangs, f"{name} {kind}", len(chosen))
