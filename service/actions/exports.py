"""Exports at stable addresses: by run, checkpoint and options."""

from collections.abc import Mapping
from typing import Any

from cairn.service.actions.artifacts import artifact_of, file_of
from cairn.service.actions.plane import ControlPlane
from cairn.service.export_options import options_text
from cairn.service.http.downloads import StoredFile
from cairn.service.jobs.kinds import convert
from cairn.service.jobs.kinds.export_job import lost_files
from cairn.service.schemas import Artifact, ConvertRequest
from cairn.storage.errors import ArtifactNotFoundError
from cairn.storage.runs.damage import refuse_damaged
from cairn.storage.runs.records.exports import ExportManifest, published_exports
from cairn.storage.runs.records.layout import CheckpointRef
from cairn.storage.runs.resolution import resolve_step
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo

LATEST = "latest"


def find_export(
    plane: ControlPlane, root: str, run: str, checkpoint: str, options: ConvertRequest
) -> Artifact:
    """Return the export of a checkpoint that was made with these options; read from the store.

    Args:
        plane: The control plane.
        root: Name of the run's root.
        run: Name of the run.
        checkpoint: A step, an alias, or `latest`.
        options: Options of the export.

    Raises:
        RunNotFoundError, AliasNotFoundError, StepNotFoundError, StepInFlightError: There is no such
            checkpoint.
        StepDamagedError: The checkpoint is damaged.
        ArtifactNotFoundError: It was not exported with these options, or the export has lost files;
            the text says how to make it, and which exports of the checkpoint there are.
        UnsupportedFormatError: `max_shard_size` is no size, or an export's manifest is unreadable.
    """
    stored_run, info, manifest = _published(plane, root, run, checkpoint, options)
    if lost := lost_files(stored_run, manifest):
        found = f"one that has lost {', '.join(lost[:20])}"
        raise _missing(stored_run, info, root, options, found)
    return artifact_of(root, stored_run, manifest)


def find_export_file(
    plane: ControlPlane,
    root: str,
    run: str,
    checkpoint: str,
    options: ConvertRequest,
    name: str,
) -> tuple[str, StoredFile]:
    """Return the artifact's id and a file of an export, ready for download; see `find_export`.

    Raises:
        ArtifactNotFoundError: Also if the export has no such file.
        CorruptionError: The stored file has another size.
    """
    stored_run, _, manifest = _published(plane, root, run, checkpoint, options)
    return artifact_of(root, stored_run, manifest).id, file_of(stored_run, manifest, name)


def _published(
    plane: ControlPlane, root: str, run: str, checkpoint: str, body: ConvertRequest
) -> tuple[Run, StepInfo, ExportManifest]:
    options = convert.requested_options(body)
    stored_run = plane.run(root, run)
    step = int(checkpoint) if checkpoint.isdigit() else None
    alias = None if step is not None or checkpoint == LATEST else checkpoint
    ref = CheckpointRef(stored_run.uri, alias=alias, step=step)
    info = resolve_step(stored_run, ref, damaged=None)
    refuse_damaged(stored_run, info)
    published = published_exports(stored_run.objects, info.step, info.attempt, convert.KIND)
    of_step = [export for export in published if export.source == info.manifest_digest]
    # Earlier rules may have written other bytes, even wrong ones: their exports are made again.
    present = [export for export in of_step if export.rule_version >= convert.RULE_VERSION]
    exports = [export for export in present if export.options == options]
    if exports:
        return stored_run, info, max(exports, key=lambda export: export.rule_version)
    texts = sorted({options_text(export.options) for export in present})
    listed = f"exports with {'; '.join(texts)}" if texts else "no export of this step"
    if len(of_step) > len(present):
        listed += ", and exports by the rules of an earlier version"
    raise _missing(stored_run, info, root, body, listed)


def _missing(
    run: Run, info: StepInfo, root: str, body: ConvertRequest, found: str
) -> ArtifactNotFoundError:
    name = run.uri.name
    command = export_command(body, f"{root}/{name}/steps/{info.step}")
    return ArtifactNotFoundError(
        "no export with these options",
        path=f"{run.uri}/steps/{info.step}",
        expected=options_text(convert.requested_options(body)),
        found=found,
        next_step=f"Export it: `{command}`, or POST "
        f"/v1/roots/{root}/runs/{name}/checkpoints/{info.step}:convert with these options. Then "
        "ask again.",
    )


def export_command(body: ConvertRequest, step: str) -> str:
    """Return the command that makes an export of a step, whose address it takes."""
    changed: Mapping[str, Any] = body.model_dump(mode="json", exclude_defaults=True)
    words = ["cairn convert", step]
    for name, value in changed.items():
        option = f"--{name.replace('_', '-')}"
        words.append(option if value is True else f"{option} {value}")
    return " ".join([*words, "--watch"])
