"""How many requests a save waits for, one after the other, where each takes its time.

Requests that are on their way together are one round. A machine that is slow to start threads shows
more rounds than there are, never fewer: so the best of a few tries counts.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest

from cairn import Checkpointer, load, open_files, parse_uri
from tests.storage.store_checks.conftest import new_process

SECONDS = 0.2
TRIES = 3

__all__ = ["new_process"]


def state(step):
    return {"model": {f"w{n}": jnp.full((64, 8), step + n, jnp.float32) for n in range(3)}}


@pytest.fixture
def slowly(gcs):
    """Makes a call with all requests slow: (what it gave, the rounds it waited for, requests)."""
    open_files(parse_uri(gcs.bucket_uri)).list()  # its client is imported

    def run(call):
        slow = gcs.faults.add("slow", seconds=SECONDS, count=None, name=f"^{gcs.bucket}/")
        gcs.server.requests.clear()
        try:
            result = call()
            done = [one for one in gcs.server.requests if one.bucket == gcs.bucket]
        finally:
            gcs.faults.remove(slow.id)
        return result, rounds(done), len(done)

    return run


def rounds(requests):
    """The longest chain of requests of which each began once the one before it had ended."""
    count, last = 0, -1.0
    for one in sorted(requests, key=lambda one: one.ended):
        if one.began >= last:
            count, last = count + 1, one.ended
    return count


def most_rounds(most, attempt):
    """Tries until one takes no more rounds; what they took. Each is given its number."""
    took = []
    while len(took) < TRIES and not (took and took[-1] <= most):
        took.append(attempt(len(took)))
    return took[-1]


def begin(uri, slowly):
    """The rounds that a first save waits for."""
    with Checkpointer(uri) as checkpointer:
        return slowly(lambda: checkpointer.save(1, state(1), meta={}))[1]


@pytest.mark.parametrize("root", ["one that nobody has written to", "one that is known"])
def test_a_first_save_waits_for_four_requests_in_a_row(gcs, slowly, new_process, root):
    def attempt(number):
        uri = f"{gcs.bucket_uri}/root-{number}"
        if root == "one that is known":
            with Checkpointer(f"{uri}/other") as other:
                other.save(1, state(1), meta={}).wait()
            new_process()
        return begin(f"{uri}/run", slowly)

    assert most_rounds(4, attempt) <= 4


def test_a_job_that_starts_again_waits_for_four_requests_in_a_row(gcs, slowly, new_process):
    uri = f"{gcs.bucket_uri}/root/run"
    step = itertools.count(1)

    def attempt(_):
        with Checkpointer(uri) as before:
            before.save(next(step), state(1), meta={}).wait()
        new_process()
        with Checkpointer(uri) as checkpointer:
            return slowly(lambda: checkpointer.save(next(step), state(2), meta={}))[1]

    assert most_rounds(4, attempt) <= 4


def test_a_later_save_waits_for_none_and_its_step_is_listed_six_rounds_after_the_commit(
    gcs, slowly
):
    with Checkpointer(f"{gcs.bucket_uri}/root/run") as checkpointer:
        checkpointer.save(1, state(1), meta={}).wait()

        def attempt(number):
            step = 10 * number + 2
            handle, waited, _ = slowly(lambda: checkpointer.save(step, state(step), meta={}))
            assert waited == 0
            handle.wait()
            _, _, count = slowly(lambda: checkpointer.save(step + 1, state(1), meta={}).wait())
            assert count <= 46
            requests = [one for one in gcs.server.requests if one.bucket == gcs.bucket]
            marker = f"/{step + 1}/commit_success.txt"
            committed = max(one.ended for one in requests if one.name.endswith(marker))
            return rounds(one for one in requests if one.began >= committed)

        assert most_rounds(6, attempt) <= 6


def test_a_load_waits_for_few_requests_in_a_row(gcs, slowly):
    uri = f"{gcs.bucket_uri}/root/run"
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(1, state(1), meta={}).wait()
    found = []

    def attempt(_):
        loaded, waited, _ = slowly(lambda: load(uri, jax.tree.map(jnp.zeros_like, state(1))))
        found.append(loaded)
        return waited

    assert most_rounds(6, attempt) <= 6
    assert jax.tree.all(jax.tree.map(jnp.array_equal, found[0], state(1)))
