"""A trainer's own config file, where it lies near the folder of an adopted step."""

from typing import Any, Final

from cairn.interop.trainers.maxtext_settings import FILE, flat_yaml, is_maxtext
from cairn.storage.errors import NotFoundError, SourceRefusedError
from cairn.storage.runs.records.manifest import Manifest
from cairn.storage.runs.run import Run
from cairn.storage.store.disk.confinement import source_folder
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import parse_uri

_LEVELS_ABOVE: Final = 2
"""MaxText writes `<run>/config.yml`, and steps to `<run>/checkpoints/<step>`."""

_MOST_BYTES: Final = 1 << 20


def settings_beside(run: Run, manifest: Manifest) -> tuple[dict[str, Any] | None, str]:
    """Return a trainer's settings near an adopted step, or None; and where they were looked for.

    Args:
        run: The run.
        manifest: Manifest of the step.
    """
    if manifest.source is None:
        return None, ""
    folder, looked_at = parse_uri(manifest.source), []
    for _ in range(_LEVELS_ABOVE):
        folder = folder.parent
        try:
            files = open_files(source_folder(run.uri, str(folder)))
        except SourceRefusedError:
            looked_at.append(f"{folder} (which this server may not open)")
            continue
        looked_at.append(f"{folder / FILE}")
        try:
            size = files.stat(FILE).size
        except NotFoundError:
            continue
        if size > _MOST_BYTES:
            continue
        text = files.read_range(FILE, 0, size).decode(errors="replace")
        settings = flat_yaml(text)
        if is_maxtext(settings):
            return settings, looked_at[-1]
    return None, " and ".join(looked_at)
