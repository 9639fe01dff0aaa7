"""Looking into a checkpoint: which leaves it has, and any part of their values."""

import hashlib

from cairn.service.actions.open_steps import OpenStep
from cairn.service.actions.plane import ControlPlane
from cairn.service.schemas import Tensor, TensorValues
from cairn.storage.errors import LeafNotFoundError
from cairn.storage.reading import TensorPart
from cairn.storage.runs import LeafRecord


def open_step(plane: ControlPlane, root: str, run: str, step: int) -> OpenStep:
    """A listed step, with what it holds.

    Raises:
        RunNotFoundError, StepNotFoundError, StepInFlightError: There is no such listed step.
        CorruptionError: Its manifest or its index can't be read.
        StoreUnavailableError: The store does not answer.
    """
    found = plane.run(root, run)
    return plane.steps.open(found, found.step(step))


def list_tensors(
    step: OpenStep, *, item: str | None, prefix: str, after: int, limit: int
) -> tuple[list[Tensor], bool]:
    """The next leaves of a step, by item and path; whether there are more.

    Args:
        step: Whose.
        item: Only those of this item.
        prefix: Only those whose path begins so.
        after: How many of these are known already.
        limit: At most so many.

    Raises:
        LeafNotFoundError: The step has no such item.
    """
    found = step.leaves
    if item is not None:
        items = {*step.manifest.items, *(leaf.item for leaf in found)}
        if item not in items:
            raise LeafNotFoundError(
                "no such item",
                path=step.uri,
                expected=f"one of {sorted(items)}",
                found=repr(item),
                next_step="Ask for one of these.",
            )
        found = [leaf for leaf in found if leaf.item == item]
    if prefix:
        found = [leaf for leaf in found if leaf.path.startswith(prefix)]
    page = [_tensor(leaf) for leaf in found[after : after + limit]]
    return page, len(found) > after + limit


def version_of(step: OpenStep, *asked: str) -> str:
    """What is another for every other content of the answer to a question about a saved step.

    A saved step never changes; its manifest's digest is no other step's.
    """
    text = "\0".join([str(step.uri), str(step.manifest_digest), *asked])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def tensor_values(part: TensorPart) -> TensorValues:
    """A part of a leaf, read now.

    Raises:
        InvalidSliceError, UnsupportedLeafError: JSON does not hold it.
        CorruptionError: Stored bytes are not what was saved.
        StoreUnavailableError: The store does not answer.
    """
    return TensorValues(
        item=part.item,
        path=part.path,
        dtype=part.dtype.name,
        shape=list(part.shape),
        values=part.plain(),
    )


def _tensor(leaf: LeafRecord) -> Tensor:
    spec = [list(one) if isinstance(one, tuple) else one for one in leaf.spec or ()]
    return Tensor(
        item=leaf.item,
        path=leaf.path,
        shape=list(leaf.shape),
        dtype=leaf.dtype,
        bytes=leaf.nbytes,
        spec=None if leaf.spec is None else spec,
        digest=leaf.digest,
    )
