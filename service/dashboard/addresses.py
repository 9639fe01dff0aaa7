"""Where pages are."""

from collections.abc import Mapping
from urllib.parse import quote, urlencode

from cairn.service.schemas import Checkpoint


def run(root: str, name: str, part: str = "") -> str:
    """Of a run, or of a part of its page."""
    return f"/ui/{root}/{name}" + (f"/{part}" if part else "")


def step(root: str, name: str, number: int, part: str = "") -> str:
    """Of a step, or of a part of its page."""
    return f"/ui/{root}/{name}/steps/{number}" + (f"/{part}" if part else "")


def of(checkpoint: Checkpoint, part: str = "") -> str:
    """Of a step that is known."""
    return step(checkpoint.root, checkpoint.run, checkpoint.step, part)


def tensor(checkpoint: Checkpoint, item: str, path: str) -> str:
    """Of a tensor of a step."""
    return f"{of(checkpoint, 'tensor')}?{urlencode({'item': item, 'path': path})}"


def compare(root: str, name: str, number: int, other: tuple[str, str, int] | None = None) -> str:
    """Of a step beside another; without one, where it is chosen."""
    asked: dict[str, object] = {"root": root, "run": name, "step": number}
    if other is not None:
        asked |= {"other_root": other[0], "other_run": other[1], "other": other[2]}
    return f"/compare?{urlencode(asked)}"


def operation(number: str) -> str:
    """Of an operation."""
    return f"/operations/{number}"


def artifact(number: str) -> str:
    """Of what an export made."""
    return f"/artifacts/{number}"


def file(artifact_id: str, name: str) -> str:
    """Where a file of an artifact is downloaded."""
    return f"/v1/artifacts/{artifact_id}/files/{quote(name, safe='')}"


def step_file(checkpoint: Checkpoint, name: str) -> str:
    """Where a file of a step is downloaded."""
    place = f"/v1/roots/{checkpoint.root}/runs/{checkpoint.run}/checkpoints/{checkpoint.step}"
    return f"{place}/files/{quote(name)}"


def leaf(root: str, name: str, number: int, path: str) -> str:
    """Where the values of a leaf of a step are downloaded."""
    return f"/v1/roots/{root}/runs/{name}/checkpoints/{number}/tensors/{quote(path, safe='')}"


def with_query(path: str, query: Mapping[str, str], **changes: object) -> str:
    """The same page, asked otherwise: parameters that are None or empty are left out."""
    asked = {**query, **changes}
    kept = {name: value for name, value in asked.items() if value not in (None, "")}
    return path + (f"?{urlencode(kept)}" if kept else "")
