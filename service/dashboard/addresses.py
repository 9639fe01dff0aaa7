"""Addresses of pages and downloads."""

from collections.abc import Mapping
from urllib.parse import quote, urlencode

from cairn.service.schemas import Checkpoint


def run(root: str, name: str, part: str = "") -> str:
    """Return the address of a run's page, or of a part of it."""
    return f"/ui/{root}/{name}" + (f"/{part}" if part else "")


def step(root: str, name: str, number: int, part: str = "") -> str:
    """Return the address of a step's page, or of a part of it."""
    return f"/ui/{root}/{name}/steps/{number}" + (f"/{part}" if part else "")


def of(checkpoint: Checkpoint, part: str = "") -> str:
    """Return the address of a checkpoint's page, or of a part of it."""
    return step(checkpoint.root, checkpoint.run, checkpoint.step, part)


def tensor(checkpoint: Checkpoint, item: str, path: str) -> str:
    """Return the address of a tensor's page."""
    return f"{of(checkpoint, 'tensor')}?{urlencode({'item': item, 'path': path})}"


def compare(root: str, name: str, number: int, other: tuple[str, str, int] | None = None) -> str:
    """Return the address of the comparison of two steps; without `other`, of the form for it."""
    query: dict[str, object] = {"root": root, "run": name, "step": number}
    if other is not None:
        query |= {"other_root": other[0], "other_run": other[1], "other": other[2]}
    return f"/compare?{urlencode(query)}"


def operation(number: str) -> str:
    """Return the address of an operation's page."""
    return f"/operations/{number}"


def artifact(number: str) -> str:
    """Return the address of an artifact's page."""
    return f"/artifacts/{number}"


def file(artifact_id: str, name: str) -> str:
    """Return the download address of an artifact's file."""
    return f"/v1/artifacts/{artifact_id}/files/{quote(name, safe='')}"


def step_file(checkpoint: Checkpoint, name: str) -> str:
    """Return the download address of a step's file."""
    place = f"/v1/roots/{checkpoint.root}/runs/{checkpoint.run}/checkpoints/{checkpoint.step}"
    return f"{place}/files/{quote(name)}"


def leaf(root: str, name: str, number: int, path: str) -> str:
    """Return the download address of a leaf's values."""
    return f"/v1/roots/{root}/runs/{name}/checkpoints/{number}/tensors/{quote(path, safe='')}"


def with_query(path: str, query: Mapping[str, str], **changes: object) -> str:
    """Return the address of a page with changed query parameters, leaving out empty ones."""
    parameters = {**query, **changes}
    kept = {name: value for name, value in parameters.items() if value not in (None, "")}
    return path + (f"?{urlencode(kept)}" if kept else "")
