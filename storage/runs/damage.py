"""Steps whose damage is noted: their refusal, and sound steps to use in their place.

A verification that fails notes the damage in the step's annotation; one that succeeds removes the
note; see `note_verified`. Nothing here reads the bytes of a step.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from types import EllipsisType
from typing import Final, Literal

from cairn.storage.errors import StepDamagedError
from cairn.storage.runs.history import History, StepKey
from cairn.storage.runs.records.annotations import Annotation, Damage
from cairn.storage.runs.records.layout import ATTEMPTS, annotation_file, manifest_file, step_dir
from cairn.storage.runs.records.manifest import Manifest
from cairn.storage.runs.records.placed import UNREADABLE, judge_records, read_record
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo, StepState

__all__ = [
    "OnDamage",
    "damage_of",
    "damaged_steps",
    "doubtful_steps",
    "known_damage",
    "newest_sound",
    "refuse_damaged",
    "shared_problems",
    "step_address",
    "step_damaged",
]

logger = logging.getLogger("cairn.restore")

OnDamage = Literal["refuse", "skip"]
"""Handling of a damaged step that was not named, such as the latest.

"refuse" raises an error; "skip" uses another step that is sound.
"""

_READ_AT_ONCE: Final = 32
_NAMED: Final = 5


def damage_of(run: Run, key: StepKey) -> Damage | None:
    """Return the noted damage of the step `key`, (step, attempt); None if there is none.

    Raises:
        UnsupportedFormatError, CorruptionError: the annotation can't be read.
        StoreUnavailableError: the store gives no answer.
    """
    stored = read_record(run.objects, annotation_file(*key), Annotation)
    return None if stored is None else stored[0].damaged


def known_damage(run: Run, key: StepKey) -> Damage | None:
    """Return the noted damage of a step; None if there is none or the annotation can't be read.

    An unreadable annotation is logged. Use this for loads, which check the bytes that they read.
    """
    try:
        return damage_of(run, key)
    except UNREADABLE as exc:
        logger.warning("%s: nothing tells whether it is damaged: %s", step_address(run, key), exc)
        return None


def refuse_damaged(
    run: Run,
    info: StepInfo,
    *,
    despite_damage: str | None = None,
    always: bool = False,
    damage: Damage | EllipsisType | None = ...,
) -> None:
    """Raise StepDamagedError if a step is damaged, unless there is a reason to use it anyway.

    Args:
        run: the run.
        info: the step.
        despite_damage: why the step is used though it is damaged; a blank text is not a reason.
        always: refuse a damaged step even with a reason.
        damage: the step's damage, if the caller has just read it; by default it is read here.

    Raises:
        StepDamagedError: the step is damaged, and there is no reason.
        UnsupportedFormatError, CorruptionError: the step's annotation can't be read.
        StoreUnavailableError: the store gives no answer.
    """
    key = info.step, info.attempt
    damage = damage_of(run, key) if damage is ... else damage
    if damage is None or (not always and (despite_damage or "").strip()):
        return
    sound = newest_sound(run, run.history())
    use = "" if sound is None else f"The newest sound step is {step_address(run, sound)}. "
    forced = "; or give despite_damage= a reason to use it as it is" * (not always)
    raise step_damaged(
        run,
        key,
        damage,
        next_step=f"{use}Restore its files from a backup and verify it again{forced}.",
    )


def step_damaged(run: Run, key: StepKey, damage: Damage, *, next_step: str) -> StepDamagedError:
    """Return the error for a damaged step.

    Args:
        run: the run.
        key: (step, attempt).
        damage: the step's damage.
        next_step: what the user can do, for the message.
    """
    problems = list(damage.problems[:_NAMED])
    if damage.problem_count > len(problems):
        problems.append(f"and {damage.problem_count - len(problems)} more")
    return StepDamagedError(
        "the step is damaged",
        path=step_address(run, key),
        expected="a step whose last verification found what was saved",
        found=damage.text(),
        next_step=next_step,
        problems=problems,
    )


def step_address(run: Run, key: StepKey) -> str:
    """Return a step's address in the form of references."""
    return f"{run.uri}/steps/{key[0]}"


def newest_sound(
    run: Run, history: History, *, skipped: Collection[StepKey] = ()
) -> StepKey | None:
    """Return the highest listed step without noted damage; None if there is none.

    Args:
        run: the run.
        history: history of the run.
        skipped: steps not to return, damaged or not.
    """
    states = history.states()
    listed = [key for key, state in states if state is StepState.LISTED and key not in skipped]
    listed.sort(reverse=True)
    # From the highest step down, in batches: the sound one is mostly in the first.
    for start in range(0, len(listed), _READ_AT_ONCE):
        keys = listed[start : start + _READ_AT_ONCE]
        damaged = damaged_steps(run, keys)
        if sound := [key for key in keys if key not in damaged]:
            return sound[0]
    return None


def damaged_steps(run: Run, keys: Iterable[StepKey]) -> set[StepKey]:
    """Return the steps of `keys` whose damage is noted."""
    return _told(run, keys)[0]


def doubtful_steps(run: Run, keys: Iterable[StepKey]) -> set[StepKey]:
    """Return the steps of `keys` whose damage is noted or whose annotation can't be read."""
    return set.union(*_told(run, keys))


def _told(run: Run, keys: Iterable[StepKey]) -> tuple[set[StepKey], set[StepKey]]:
    """Return the steps with noted damage, and those whose annotation can't be read."""
    names = {annotation_file(*key): key for key in keys}
    notes, unreadable = judge_records(run.objects, names, Annotation.parse)
    damaged = {names[name] for name, note in notes.items() if note.damaged is not None}
    return damaged, {names[name] for name in unreadable}


def shared_problems(
    run: Run, key: StepKey, *, files: Mapping[str, str], assets: Mapping[str, str]
) -> dict[StepKey, tuple[str, ...]]:
    """Return the problems of other listed steps that share bytes with a damaged step.

    On a disk, steps share the files that did not change between them. Assets are shared everywhere.

    Args:
        run: the run.
        key: the damaged step.
        files: the problem of each of its damaged files, by name.
        assets: the problem of each of its damaged assets, by SHA-256.
    """
    try:
        listed = {other for other in run.step_attempts().items() if other != key}
    except UNREADABLE:  # a later verification of those steps will find the problems
        return {}
    problems: dict[StepKey, list[str]] = {other: [] for other in listed}
    # In a bucket each step has files of its own.
    if files and run.uri.scheme == "file":
        folders = {step_dir(attempt, step): (step, attempt) for step, attempt in (*listed, key)}
        entries = []
        for file in run.files.usage(ATTEMPTS):
            *folder, name = f"{ATTEMPTS}{file.name}".split("/", 3)
            if file.identity is not None and "/".join(folder) in folders:
                entries.append((folders["/".join(folder)], name, file.identity))
        wrong = {
            identity: name for owner, name, identity in entries if owner == key and name in files
        }
        for owner, name, identity in sorted(entries):
            if owner != key and identity in wrong:
                problem = files[wrong[identity]].removeprefix(f"{wrong[identity]}: ")
                problems[owner].append(
                    f"{name}: {problem} (the same file as that of step {key[0]})"
                )
    if assets:
        manifests, _ = judge_records(
            run.objects, {manifest_file(*other): other for other in listed}, Manifest.parse
        )
        for other in listed:
            manifest = manifests.get(manifest_file(*other))
            if manifest is not None:
                used = {asset.sha256 for asset in manifest.assets}
                problems[other] += [assets[name] for name in sorted(used & assets.keys())]
    return {other: tuple(lines) for other, lines in problems.items() if lines}
