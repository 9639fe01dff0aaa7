"""Addresses of pages and downloads."""

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, urlencode

from cairn.service.export_options import typed_options
from cairn.service.schemas import Artifact, Checkpoint

_MAX_BACK: Final = 20
"""Number of earlier pages that an address remembers, so that it stays short."""

_FIRST: Final = "-"  # no token has it


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


def comparison(this: tuple[str, str, int], other: tuple[str, str, int]) -> str:
    """Return the address of the differences of two steps, each by root, run and number."""
    query = {"other_root": other[0], "other_run": other[1], "other": str(other[2])}
    return with_query(step(*this, "compare"), query)


def operation(number: str) -> str:
    """Return the address of an operation's page."""
    return f"/operations/{number}"


def artifact(number: str) -> str:
    """Return the address of an artifact's page."""
    return f"/artifacts/{number}"


def file(artifact_id: str, name: str) -> str:
    """Return the download address of an artifact's file."""
    return f"/v1/artifacts/{artifact_id}/files/{quote(name, safe='')}"


def export_file(artifact: Artifact, checkpoint: str, name: str) -> str:
    """Return the permanent download address of an export's file, by a step or an alias."""
    exports = f"/v1/roots/{artifact.root}/runs/{artifact.run}/exports"
    path = f"{exports}/{quote(checkpoint, safe='')}/files/{quote(name, safe='')}"
    return with_query(path, typed_options(artifact.options))


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


def first_page(path: str, query: Mapping[str, str]) -> str:
    """Return the address of a list's first page."""
    return with_query(path, query, page_token=None, back=None)


def next_page(path: str, query: Mapping[str, str], token: str) -> str:
    """Return the address of a list's next page, which remembers the pages before it.

    A page token leads forward only. The parameter `back` has the tokens of the earlier pages.
    """
    current = query.get("page_token")
    back = [*_back(query), current] if current else [_FIRST]
    return with_query(path, query, page_token=token, back=".".join(back[-_MAX_BACK:]))


def previous_page(path: str, query: Mapping[str, str]) -> str | None:
    """Return the address of the page before; None on the first page, and if it is not known."""
    back = _back(query)
    if not query.get("page_token") or not back:
        return None
    if back[-1] == _FIRST:
        return first_page(path, query)
    return with_query(path, query, page_token=back[-1], back=".".join(back[:-1]))


def _back(query: Mapping[str, str]) -> list[str]:
    return [token for token in query.get("back", "").split(".") if token][-_MAX_BACK:]
