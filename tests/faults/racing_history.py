"""Whether a run that several jobs wrote has one history: judged from its plain objects."""

import json
from collections import defaultdict
from typing import Any

from cairn import ObjectStore, Run
from tests.faults.contents import damage, key_of
from tests.faults.forked import Told
from tests.faults.racing_writer import fast_clock
from tests.storage.records import parse_attempt_file, parse_manifest_file


def judge(told: Told) -> None:
    """Answer the driver's questions: (uri, {writer: the start of its keys}, what they told)."""
    for uri, writers, reports in told.asked():
        told.tell(history_problems(uri, writers, reports))


def history_problems(
    uri: str, writers: dict[str, list[int]], reports: list[list[Any]]
) -> dict[str, Any]:
    """What contradicts one history, and how many steps and attempts there are.

    Args:
        uri: the run.
        writers: each job, and what the keys of its steps begin with.
        reports: [job, "durable", save, step, attempt] for each step that a job was told is safe.
    """
    run = Run.open(uri, clock=fast_clock(0.0))
    attempts = _attempts(run.objects)
    expected = _counting(run.objects, attempts)
    infos = run.steps()
    listed = [(info.step, info.attempt) for info in infos]
    wrong = []
    if sorted(listed) != sorted(expected.items()):
        wrong.append(f"listed {listed}, by the rule {expected}")
    if len({step for step, _ in listed}) != len(listed):
        wrong.append(f"a step is listed twice: {listed}")
    for job, _, save, step, attempt in reports:
        if (step, attempt) not in listed:
            wrong.append(f"{job} was told that step {step} of attempt {attempt} is durable")
        elif key_of(run, next(info for info in infos if info.step == step))[-1] != save:
            wrong.append(f"step {step} is not save {save} of {job}")
    for info in infos:
        manifest = run.manifest(info)
        if manifest.writer != attempts[info.attempt]["writer"]:
            wrong.append(f"step {info.step}: by {manifest.writer}, in {attempts[info.attempt]}")
        prefixes = [key for job, key in writers.items() if job.split("#")[0] == manifest.writer]
        if key_of(run, info)[:-1] not in prefixes:
            wrong.append(f"step {info.step} of {manifest.writer} holds {key_of(run, info)}")
        wrong += damage(run, info)
    return {"wrong": wrong, "steps": len(listed), "attempts": len(attempts)}


def _attempts(objects: ObjectStore) -> dict[int, dict[str, Any]]:
    found = {parse_attempt_file(name): name for name in objects.children("attempts/")}
    return {
        number: json.loads(objects.read(name).value)
        for number, name in found.items()
        if number is not None
    }


def _counting(objects: ObjectStore, attempts: dict[int, dict[str, Any]]) -> dict[int, int]:
    """The rule: a manifest counts unless a later attempt kept less; the last attempt's then."""
    held = defaultdict(int)
    for name in objects.list("manifests/"):
        step, attempt = parse_manifest_file(name)
        if all(later["base_step"] >= step for n, later in attempts.items() if n > attempt):
            held[step] = max(held[step], attempt)
    return dict(held)
