"""Records of a run are lost, swapped, of another run, or have a flipped bit: never a wrong step.

Whoever asks is told what the run was, or gets an error; whoever saves, retains or repairs then does
what is right, or refuses. A check of the run names whatever is not told of.
"""

from collections import Counter
from random import Random

import pytest

from cairn import (
    Manifest,
    RetentionPolicy,
    StorageError,
    Writer,
    apply_retention,
    check_run,
    collect_garbage,
    parse_uri,
    repair_run,
)
from cairn.storage.runs.records.layout import COMMIT_FILE, alias_file, manifest_file, step_dir
from tests.faults import report
from tests.faults.damaged_runs import (
    Template,
    answers,
    any_damages,
    is_missing,
    one_bit,
    wrong_answers,
)
from tests.storage.stored_runs import PLAIN, write_data

pytestmark = pytest.mark.timeout(3600 if report.is_long() else 300)

IN_A_BUCKET = {"short": 1, "long": 200}
COUNTS = {"file": {"short": 5, "long": 600}, "gcs": IN_A_BUCKET, "s3": IN_A_BUCKET}
NEXT_STEP = 80
NEEDED = {70: None, 50: "production", 60: "candidate"}
"""Steps that no policy may delete, and the alias that names each."""


@pytest.fixture(params=["file", *report.buckets()])
def template(request, tmp_path):
    """(kind of the store, the run that is copied)."""
    if request.param == "file":
        return "file", Template(parse_uri(tmp_path))
    double = request.getfixturevalue(request.param)
    return request.param, Template(parse_uri(double.bucket_uri) / "root", double)


def look(run, right, when):
    """What is wrong with what a run answers, and with what a check of it names."""
    found = answers(run)
    problems = [f"{when}: {text}" for text in wrong_answers(found, right)]
    checked = check_run(run)
    if is_missing(found, right) and not (checked.problems or checked.unlisted):
        problems.append(f"{when}: {found['steps']}, and a check names nothing")
    return problems


def save(run, damage, right):
    """As a job that starts anew."""
    writer = Writer(run, writer="job")
    try:
        attempt = writer.claim(NEXT_STEP)
        write_data(run, NEXT_STEP, attempt)
        created = "2026-11-21T12:00:00Z"
        writer.publish(
            Manifest(
                step=NEXT_STEP,
                attempt=attempt,
                created=created,
                writer="job",
                items=("model",),
                **PLAIN,
            )
        )
    finally:
        writer.close()
    if run.latest_step() != NEXT_STEP:
        return [f"after a save the latest step is {run.latest_step()}"]
    listed = {**right["steps"], NEXT_STEP: attempt}
    return look(run, {**right, "steps": listed, "latest": None}, "after a save")


def retain(run, damage, right):
    """A policy that keeps the last step, and the collector."""
    try:
        apply_retention(run, RetentionPolicy(keep_last=1), by="me", grace=0)
        collect_garbage(run, by="me")
    finally:
        there = run.objects.list()
    needed = [
        (step, right["steps"][step])
        for step, alias in NEEDED.items()
        if alias is None or damage.bytes.get(alias_file(alias), b"") is not None
    ]
    names = [f"{step_dir(attempt, step)}/{COMMIT_FILE}" for step, attempt in needed]
    names += [manifest_file(*key) for key in needed if manifest_file(*key) not in damage.bytes]
    return [f"a policy deleted {name}" for name in names if name not in there]


def repair(run, damage, right):
    """Twice: the second time nothing is left to do."""
    first = repair_run(run, by="me", dry_run=False)
    problems = look(run, right, f"after {first}")
    left = [one.name for one in first if one.action is None]
    checked = check_run(run)
    if not left and not checked.ok:
        problems.append(f"after {first}: {checked.problems}")
    again = [one.name for one in repair_run(run, by="me")]
    if not set(again) <= set(left):
        problems.append(f"after {first}: a second one finds {again}")
    return problems


ACTS = (save, retain, repair)


def play(template, count):
    """Trials: how many broke a promise, what they broke, and which acts were refused."""
    lost, problems, refused = 0, [], Counter()
    right = template.answers
    for number in range(count):
        rng = Random(f"{report.seed()} records {number}")
        damage, act = any_damages(template, rng), rng.choice(ACTS)
        with template.copy(damage) as run:
            found = look(run, right, "at first")
            try:
                found += act(run, damage, right)
            except StorageError:
                refused[act.__name__] += 1
                found += look(run, right, f"after a refused {act.__name__}")
        lost += bool(found)
        problems += [f"trial {number}: {damage.how}: {text}" for text in found]
    return lost, problems, refused


def test_lost_and_swapped_records_give_no_wrong_step(template):
    kind, made = template
    count = report.trials(**COUNTS[kind])
    lost, problems, refused = play(made, count)
    report.record(
        fault="i a lost or swapped record",
        store=kind,
        trials=count,
        survived=count - lost,
        lost=lost,
        note=f"then refused: {dict(refused)}",
    )
    assert not problems, "\n".join(problems)


def flips_and_repairs(made, count):
    """Trials of one flipped bit: how many broke a promise, what they broke, how many are mended."""
    lost, problems, mended = 0, [], 0
    for number in range(count):
        damage = one_bit(made, Random(f"{report.seed()} bits {number}"))
        (name,) = damage.bytes
        with made.copy(damage) as run:
            found = look(run, made.answers, "at first")
            if name not in check_run(run).unreadable:
                found.append("a check does not name it")
            done = next(one for one in repair_run(run, by="me", dry_run=False) if one.name == name)
            found += look(run, made.answers, f"after {done}")
            checked = check_run(run)
            if done.done and (not checked.ok or kinds(answers(run)) != kinds(made.answers)):
                found.append(f"after {done}: {checked}")
            if not done.done and (not done.hint or checked.unreadable != (name,)):
                found.append(f"not mended, {done}: {checked}")
            again = [one for one in repair_run(run, by="me") if one.action is not None]
            if again or (done.done and repair_run(run, by="me")):
                found.append(f"after {done} there is more to do: {again}")
        mended += done.done
        lost += bool(found)
        problems += [f"trial {number}: {damage.how}: {text}" for text in found]
    return lost, problems, mended


def kinds(found):
    """Answers; of errors only what they are."""
    errors = {name: type(one) for name, one in found.items() if isinstance(one, StorageError)}
    return {**found, **errors}


def test_a_flipped_bit_in_a_record_is_named_and_mended_or_said_to_be_lost(tmp_path):
    count = report.trials(short=5, long=400)
    lost, problems, mended = flips_and_repairs(Template(parse_uri(tmp_path)), count)
    report.record(
        fault="j one flipped bit in a record",
        store="file",
        trials=count,
        survived=count - lost,
        lost=lost,
        note=f"{mended} mended by the others",
    )
    assert mended > 0
    assert not problems, "\n".join(problems)
