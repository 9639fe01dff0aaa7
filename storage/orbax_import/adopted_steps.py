"""Check of imported steps: their owner may have changed or removed them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from cairn.storage.arrays.ocdbt import is_data_file
from cairn.storage.errors import (
    CorruptionError,
    PreconditionFailedError,
    UnsupportedFormatError,
)
from cairn.storage.orbax_import.layouts import plain_items
from cairn.storage.orbax_import.model_map import ModelMap
from cairn.storage.orbax_import.step_reading import is_as_mapped
from cairn.storage.runs.records.manifest import Manifest
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_files import (
    FilePlace,
    file_places,
    file_problem,
    is_kept,
    listed_problems,
)
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.store.file_checksums import read_files
from cairn.storage.store.files import FileEntry
from cairn.storage.store.open_files import open_files

__all__ = ["AdoptedSteps", "look_again"]

_NAMED: Final = 5


@dataclass
class AdoptedSteps:
    """State of a run's imported steps.

    Attributes:
        kept: steps that are unchanged since the import.
        gone: steps that their owner has removed.
        changed: a line for each changed step, which says what has changed.
        added: a line for each step with files that were added since the import.
    """

    kept: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)


def look_again(run: Run, listed: Iterable[StepInfo], model: ModelMap | None) -> AdoptedSteps:
    """Compare a run's imported steps with their folders, and return their state.

    Files are read only if their modification time has changed; a bucket returns checksums.

    Args:
        run: the run.
        listed: the steps that the run lists; steps that are not imported are skipped.
        model: the model with which the steps must have been imported; None: without a model.

    Raises:
        PreconditionFailedError: a step was imported with another model, or only one of the two has
            a model.
        StoreUnavailableError: a store gives no answer.
    """
    checked = AdoptedSteps()
    for info in listed:
        if info.source is None:
            continue
        manifest = run.manifest(info)
        if manifest.model != (None if model is None else model.info):
            raise _another(run, info, model, manifest)
        place, *_ = file_places(run.step_uri(info), manifest.inline_objects, info.source)
        walked = open_files(place.folder).walk()
        entries = {entry.name: entry for entry in walked if not is_kept(entry.name)}
        if not entries:
            checked.gone.append(info.step)
            continue
        problems = _problems(place, entries)
        if problems:
            text = "; ".join(problems[name] for name in sorted(problems))
            checked.changed.append(f"{place.folder.name}: changed since it was adopted: {text}")
            continue
        assert manifest.plain is not None, "it was adopted"
        try:
            same = model is None or is_as_mapped(
                place.folder, plain_items(place.folder).plain, manifest.plain, model
            )
        except (CorruptionError, UnsupportedFormatError) as exc:  # because of added files
            checked.changed.append(f"{place.folder.name}: {exc}")
            continue
        if not same:
            raise _another(run, info, model, manifest)
        checked.kept.append(info.step)
        added = sorted(entries.keys() - {record.name for record in place.records})
        if added:
            more = ", …" if len(added) > _NAMED else ""
            names = f"{', '.join(added[:_NAMED])}{more}"
            checked.added.append(f"{place.folder.name}: added since it was adopted: {names}")
    return checked


def _problems(place: FilePlace, entries: dict[str, FileEntry]) -> dict[str, str]:
    """Return one line for each file that was changed, removed or added since the import, by name.

    Of the added files, only data files count.

    Args:
        place: the step's folder, with the records of its files at the import.
        entries: the files that the folder has now, by name.
    """
    problems = listed_problems(entries, place.records)
    records = {
        record.name: record
        for record in place.records
        if record.name not in problems and record.modified_ns != entries[record.name].modified_ns
    }
    for read in read_files(place.folder, records):
        problem = file_problem(records[read.name], read)
        if problem is not None:
            problems[read.name] = problem
    names = {record.name for record in place.records}
    # A new data file may hold a chunk that was absent at the import and was read as zeros.
    new = (name for name in entries if name not in names and is_data_file(name))
    return problems | {name: f"{name}: values that were not there" for name in new}


def _another(
    run: Run, info: StepInfo, model: ModelMap | None, manifest: Manifest
) -> PreconditionFailedError:
    return PreconditionFailedError(
        "adopted with another model",
        path=run.uri,
        expected=f"the config and the map that step {info.step} was adopted with"
        if manifest.model is not None
        else f"no config and no map, as for step {info.step}",
        found="none" if model is None else f"others, of a {model.info.model_type}",
        next_step="Give the same, or adopt the folder into another run.",
    )
