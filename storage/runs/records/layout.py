"""Names of a run's files and addresses of its steps, and parsers for both.

All names are relative to the run's folder. `parse_x(x_file(...))` returns the arguments again; a
name of any other form gives None. Numbers are plain decimal: no sign, no leading zero. A checkpoint
is addressed as "run", "run@alias", "run@latest" or "run/steps/N".
"""

import contextlib
import operator
import os
import re
from dataclasses import dataclass
from typing import Final, NamedTuple, SupportsIndex

from cairn.storage.arrays.orbax_tree import META_ITEM
from cairn.storage.errors import InvalidURIError
from cairn.storage.store.uri import RUN_NAME, RUN_NAME_RULE, StoreURI, parse_uri

__all__ = [
    "ALIASES",
    "ANNOTATIONS",
    "ASSETS",
    "ATTEMPTS",
    "COMMIT_FILE",
    "DAMAGED",
    "EXPORTS",
    "INDEX_FILE",
    "ITERATORS",
    "LEASE_FILE",
    "MANIFESTS",
    "RUN_FILE",
    "RUN_FOLDERS",
    "TRASH",
    "CheckpointRef",
    "ExportManifestName",
    "StepFolder",
    "alias_file",
    "annotation_file",
    "asset_file",
    "attempt_dir",
    "attempt_file",
    "check_alias",
    "check_attempt",
    "check_run_name",
    "check_step",
    "export_dir",
    "export_manifest",
    "export_manifests",
    "forgotten_file",
    "hold_file",
    "hold_files",
    "intent_file",
    "is_run_name",
    "iterator_file",
    "lifted_file",
    "manifest_file",
    "manifest_files",
    "parse_alias_file",
    "parse_annotation_file",
    "parse_attempt_file",
    "parse_export_manifest",
    "parse_hold_file",
    "parse_intent_file",
    "parse_lifted_file",
    "parse_manifest_file",
    "parse_ref",
    "parse_step_folder",
    "parse_trash_file",
    "step_dir",
    "step_of",
    "trash_file",
    "trash_files",
]

RUN_FILE: Final = "run.json"
LEASE_FILE: Final = "lease.json"
COMMIT_FILE: Final = "commit_success.txt"
"""File that Orbax writes into a step's folder once the step is complete."""

INDEX_FILE: Final = "cairn.index"
"""File in a step's folder with the locations and digests of all values. See `step_index`."""

ITERATORS: Final = f"{META_ITEM}/iterators/"
"""Folder of iterator states in a step's folder, inside the JSON item, where Orbax has its own."""

ATTEMPTS: Final = "attempts/"
MANIFESTS: Final = "manifests/"
ANNOTATIONS: Final = "annotations/"
BEST: Final = "best:"
"""Prefix of a reference to the best step by a metric, in the place of an alias."""
ALIASES: Final = "aliases/"
TRASH: Final = "trash/"
EXPORTS: Final = "exports/"
ASSETS: Final = "assets/"
DAMAGED: Final = "damaged/"
"""Folder of records that a repair has replaced."""

RUN_FOLDERS: Final = frozenset(
    {ALIASES, ANNOTATIONS, ASSETS, ATTEMPTS, DAMAGED, EXPORTS, MANIFESTS, TRASH}
)
"""All folders of a run."""

MAX_NUMBER: Final = 10**18 - 1
_NUMBER = r"(0|[1-9][0-9]{0,17})"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_RUN_NAME = re.compile(RUN_NAME)
_ALIAS = re.compile(r"(?![0-9]+\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TRY = re.compile(_NAME)
_TOKEN = re.compile(r"[0-9a-f]{16}")

_ATTEMPT_FILE = re.compile(rf"attempts/{_NUMBER}\.json")
_STEP_ATTEMPT = re.compile(rf"{_NUMBER}\.{_NUMBER}\.json")
_HOLD_FILE = re.compile(rf"trash/{_NUMBER}\.{_NUMBER}\.({_TOKEN.pattern})\.hold\.json")
_STEP_FOLDER = re.compile(rf"{_NUMBER}(\.orbax-checkpoint-tmp[A-Za-z0-9._-]{{0,64}})?")
_EXPORT_MANIFEST = re.compile(
    rf"exports/{_NUMBER}\.{_NUMBER}/({_KIND.pattern})-({_DIGEST.pattern})\.json"
)


class StepFolder(NamedTuple):
    """Parsed name of a folder below `attempts/<n>/`.

    Attributes:
        step: the step that the folder holds.
        temporary: True while Orbax has not given the folder its final name yet.
    """

    step: int
    temporary: bool


class ExportManifestName(NamedTuple):
    """Parsed name of an export's manifest."""

    step: int
    attempt: int
    kind: str
    digest: str


def check_step(step: SupportsIndex) -> int:
    """Return `step` as a plain integer; integers of NumPy and JAX are accepted too.

    Raises:
        InvalidURIError: `step` is negative, above 10**18 - 1, or not an integer.
    """
    return _check_number(step, "step")


def check_attempt(attempt: SupportsIndex) -> int:
    """Return `attempt` as a plain integer.

    Raises:
        InvalidURIError: `attempt` is negative, above 10**18 - 1, or not an integer.
    """
    return _check_number(attempt, "attempt")


def _check_number(number: SupportsIndex, what: str) -> int:
    plain = -1
    # NumPy 2.0 accepts its booleans as indices, as Python does.
    if not isinstance(number, bool) and getattr(number, "dtype", None) != "bool":
        with contextlib.suppress(TypeError):  # no integer: a float, a text, an array of several
            plain = operator.index(number)
    if not 0 <= plain <= MAX_NUMBER:
        raise InvalidURIError(
            f"invalid {what}",
            expected=f"an integer from 0 to {MAX_NUMBER}",
            found=repr(number),
        )
    return plain


def _check(pattern: re.Pattern[str], text: str, what: str, rule: str, example: str = "") -> str:
    if not pattern.fullmatch(text):
        raise InvalidURIError(
            f"invalid {what}",
            expected=rule,
            found=repr(text)[:200],
            next_step=f"Choose another name, {example}." if example else "Choose another name.",
        )
    return _plain(text)


def _plain(text: str) -> str:
    """Return the text as a plain `str`: members of text enums format differently in f-strings."""
    return str.__str__(text)


def check_run_name(name: str) -> str:
    """Return `name` if it is a valid run name.

    Raises:
        InvalidURIError: `name` is not valid.
    """
    fitting = re.sub(r"[^A-Za-z0-9._=+-]+", "-", name).lstrip("-._=+")[:128].rstrip("-") or "run-1"
    return _check(_RUN_NAME, name, "run name", RUN_NAME_RULE, f"such as {fitting!r}")


def is_run_name(name: str) -> bool:
    """Return True if `name` is a valid run name."""
    return _RUN_NAME.fullmatch(name) is not None


def check_alias(alias: str, *, within: object = "") -> str:
    """Return `alias` if it is a valid alias name.

    Args:
        alias: the name.
        within: the text that the name is a part of, for the error.

    Raises:
        InvalidURIError: `alias` is not valid. Digits alone and "latest" are refused because a
            reference with them would name a step.
    """
    rule = (
        "a letter or digit, then up to 63 letters, digits, '.', '_' or '-'; "
        "not digits alone, not 'latest'"
    )
    if _plain(alias) == "latest" or not _ALIAS.fullmatch(alias):
        raise InvalidURIError(
            "invalid alias",
            path=within,
            expected=rule,
            found=repr(alias)[:200],
            next_step="Choose another name; RUN/steps/N names a step, and RUN alone its latest.",
        )
    return _plain(alias)


def attempt_file(attempt: int) -> str:
    """Return the name of an attempt's record; the attempt exists once this file does."""
    return f"attempts/{check_attempt(attempt)}.json"


def attempt_dir(attempt: int) -> str:
    """Return the folder of an attempt's steps: an ordinary Orbax root."""
    return f"attempts/{check_attempt(attempt)}"


def step_dir(attempt: int, step: int) -> str:
    """Return the folder of one step: an ordinary Orbax checkpoint."""
    return f"{attempt_dir(attempt)}/{check_step(step)}"


def iterator_file(name: str, process: int, processes: int) -> str:
    """Return the name, in a step's folder, of the file with one process's state of an iterator.

    Grain uses the same file names.
    """
    return f"{ITERATORS}{name}/process_{process}-of-{processes}.json"


def manifest_file(step: int, attempt: int) -> str:
    """Return the name of a step's manifest; the step is verified complete once this file exists."""
    return f"manifests/{_stem(step, attempt)}.json"


def manifest_files(step: int) -> str:
    """Return the common prefix of the names of a step's manifests; no other names have it."""
    return f"{MANIFESTS}{check_step(step)}."


def annotation_file(step: int, attempt: int) -> str:
    """Return the name of the file with a step's labels and metrics."""
    return f"annotations/{_stem(step, attempt)}.json"


def trash_file(step: int, attempt: int) -> str:
    """Return the name of the tombstone of a soft-deleted step."""
    return f"trash/{_stem(step, attempt)}.json"


def trash_files(step: int) -> str:
    """Return the prefix of a step's tombstones, intents and holds; no other names have it."""
    return f"{TRASH}{check_step(step)}."


def forgotten_file(step: int, attempt: int) -> str:
    """Return the name of the marker by which a repair gives up a step's lost manifest."""
    return f"{DAMAGED}{MANIFESTS}{_stem(step, attempt)}.forgotten"


def lifted_file(step: int, attempt: int) -> str:
    """Return the name of the copy of the step's last withdrawn tombstone.

    It shows that the tombstone was withdrawn, not lost.
    """
    return f"trash/{_stem(step, attempt)}.lifted"


def intent_file(step: int, attempt: int) -> str:
    """Return the name of an intent: its writer is about to create the step's tombstone."""
    return f"trash/{_stem(step, attempt)}.intent.json"


def hold_file(step: int, attempt: int, token: str) -> str:
    """Return the name of a hold, which marks the step as in use by its writer.

    Args:
        step: step number.
        attempt: the attempt that wrote the step.
        token: 16 hexadecimal digits, unique to this hold.
    """
    rule = "16 lower-case hexadecimal digits"
    return f"trash/{_stem(step, attempt)}.{_check(_TOKEN, token, 'token', rule)}.hold.json"


def hold_files(step: int, attempt: int) -> str:
    """Return the prefix of a step's holds; its tombstone and its intent have it too."""
    return f"{TRASH}{_stem(step, attempt)}."


def alias_file(alias: str) -> str:
    """Return the name of an alias's record."""
    return f"aliases/{check_alias(alias)}.json"


def asset_file(sha256: str) -> str:
    """Return the name of an asset: a small file stored once for all steps, named by its SHA-256."""
    return f"assets/{_check(_SHA256, sha256, 'asset', '64 lower-case hexadecimal digits')}"


def export_dir(step: int, attempt: int, kind: str, digest: str, try_: str) -> str:
    """Return the folder of one try at an export."""
    _check(_TRY, try_, "try", "a letter or digit, then letters, digits, '.', '_' or '-'")
    return f"{_export_stem(step, attempt, kind, digest)}/{try_}"


def export_manifest(step: int, attempt: int, kind: str, digest: str) -> str:
    """Return the name of an export's manifest, which names the published try.

    It is beside the folder of tries.
    """
    return f"{_export_stem(step, attempt, kind, digest)}.json"


def export_manifests(step: int, attempt: int) -> str:
    """Return the folder with the manifests of all exports of a step."""
    return f"exports/{_stem(step, attempt)}"


def _export_stem(step: int, attempt: int, kind: str, digest: str) -> str:
    _check(_KIND, kind, "export kind", "a lower-case letter, then letters, digits or '_'")
    _check(_DIGEST, digest, "export digest", "8 to 64 lower-case hexadecimal digits")
    return f"{export_manifests(step, attempt)}/{kind}-{digest}"


def _stem(step: int, attempt: int) -> str:
    return f"{check_step(step)}.{check_attempt(attempt)}"


def parse_attempt_file(name: str) -> int | None:
    """Return the attempt in a name of `attempt_file`; None for other names."""
    match = _ATTEMPT_FILE.fullmatch(name)
    return int(match.group(1)) if match else None


def parse_manifest_file(name: str) -> tuple[int, int] | None:
    """Return (step, attempt) in a name of `manifest_file`; None for other names."""
    return _parse_stem(name, MANIFESTS)


def parse_annotation_file(name: str) -> tuple[int, int] | None:
    """Return (step, attempt) in a name of `annotation_file`; None for other names."""
    return _parse_stem(name, ANNOTATIONS)


def parse_trash_file(name: str) -> tuple[int, int] | None:
    """Return (step, attempt) in a name of `trash_file`; None for other names."""
    return _parse_stem(name, TRASH)


def parse_lifted_file(name: str) -> tuple[int, int] | None:
    """Return (step, attempt) in a name of `lifted_file`; None for other names."""
    stem = name.removesuffix(".lifted")
    return None if stem == name else _parse_stem(f"{stem}.json", TRASH)


def parse_intent_file(name: str) -> tuple[int, int] | None:
    """Return (step, attempt) in a name of `intent_file`; None for other names."""
    stem = name.removesuffix(".intent.json")
    return None if stem == name else _parse_stem(f"{stem}.json", TRASH)


def parse_hold_file(name: str) -> tuple[int, int] | None:
    """Return (step, attempt) in a name of `hold_file`; None for other names."""
    match = _HOLD_FILE.fullmatch(name)
    return (int(match.group(1)), int(match.group(2))) if match else None


def _parse_stem(name: str, folder: str) -> tuple[int, int] | None:
    match = _STEP_ATTEMPT.fullmatch(name[len(folder) :]) if name.startswith(folder) else None
    return (int(match.group(1)), int(match.group(2))) if match else None


def parse_step_folder(name: str) -> StepFolder | None:
    """Return the parsed name of a folder below `attempts/<n>/`; None if it is no step's."""
    match = _STEP_FOLDER.fullmatch(name)
    return StepFolder(int(match.group(1)), match.group(2) is not None) if match else None


def parse_alias_file(name: str) -> str | None:
    """Return the alias in a name of `alias_file`; None for other names."""
    alias = name.removeprefix(ALIASES).removesuffix(".json")
    is_alias = alias != "latest" and _ALIAS.fullmatch(alias) is not None
    return alias if is_alias and name == f"{ALIASES}{alias}.json" else None


def parse_export_manifest(name: str) -> ExportManifestName | None:
    """Return the arguments of `export_manifest` for this name; None for other names."""
    match = _EXPORT_MANIFEST.fullmatch(name)
    if match is None:
        return None
    step, attempt, kind, digest = match.groups()
    return ExportManifestName(int(step), int(attempt), kind, digest)


_STEP = re.compile(r"^(?:0|[1-9][0-9]{0,17})\Z")


@dataclass(frozen=True)
class CheckpointRef:
    """Reference to a step of a run: by alias, by number, the best by a metric, or the latest.

    Attributes:
        run: the run's folder.
        alias: alias name, or None.
        step: step number, or None.
        best: None, or the metric by which to rank the steps. ":min" or ":max" may follow; without
            it, the direction is the one that the steps' annotations have.

    Raises:
        InvalidURIError: `step` is not a step number.
    """

    run: StoreURI
    alias: str | None = None
    step: int | None = None
    best: str | None = None

    def __post_init__(self) -> None:
        if self.step is not None:
            object.__setattr__(self, "step", check_step(self.step))

    def __str__(self) -> str:
        if self.best is not None:
            return f"{self.run}@{BEST}{self.best}"
        if self.alias is not None:
            return f"{self.run}@{self.alias}"
        return str(self.run) if self.step is None else f"{self.run}/steps/{self.step}"


def parse_ref(text: StoreURI | str | os.PathLike[str]) -> CheckpointRef:
    """Return the parsed "run", "run@alias", "run@latest", "run/steps/N" or "run@best:METRIC".

    ":min" or ":max" may follow the metric.

    Raises:
        InvalidURIError: the URI or the alias is malformed, or there are both an alias and a step.
    """
    address = str(text) if isinstance(text, StoreURI) else os.fspath(text)
    head, at, best = address.partition(f"@{BEST}")
    if at:
        return CheckpointRef(_run_alone(head, address), best=_metric(best, within=address))
    head, at, alias = address.rpartition("@")
    if at and "/" not in alias:
        return CheckpointRef(
            _run_alone(head, address),
            alias=None if alias == "latest" else check_alias(alias, within=address),
        )
    uri = parse_uri(address)
    step = step_of(uri)
    return CheckpointRef(uri) if step is None else CheckpointRef(uri.parent.parent, step=step)


def _run_alone(head: str, address: str) -> StoreURI:
    uri = parse_uri(head)
    if step_of(uri) is not None:
        raise InvalidURIError(
            "ambiguous checkpoint",
            path=repr(address),
            expected="an alias or a step",
            found="both",
            next_step="Leave one of them out.",
        )
    return uri


def _metric(text: str, *, within: str) -> str:
    if not text.removesuffix(":min").removesuffix(":max"):
        raise InvalidURIError(
            "no metric",
            path=repr(within),
            expected=f"run@{BEST}METRIC, such as run@{BEST}eval/loss",
            found="none",
            next_step="Name the metric that it should be the best by.",
        )
    return text


def step_of(uri: StoreURI) -> int | None:
    """Return N of ".../steps/N", or None for any other address.

    Raises:
        InvalidURIError: after "steps/" there is no plain number, as in "steps/007", which is
            refused as a mistake.
    """
    segments = uri.path.split("/")
    if len(segments) < 3 or segments[-2] != "steps":
        return None
    if not _STEP.match(segments[-1]):
        raise InvalidURIError(
            "invalid step",
            path=uri,
            expected="…/run/steps/N, N a plain number",
            found=repr(segments[-1]),
            next_step="Give the step's number, or the run alone for its latest step.",
        )
    return int(segments[-1])
