"""Tensor of a step: `/ui/{root}/{run}/steps/{step}/tensor`."""

import math
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import numpy as np
from fastapi import Query, Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.actions import plans, tensors
from cairn.service.actions.caches import OpenStep
from cairn.service.dashboard import addresses
from cairn.service.dashboard.charts.histogram import bars_of
from cairn.service.dashboard.charts.mesh import mesh_of, mesh_text, parse_mesh, splitting
from cairn.service.dashboard.charts.picture import png_of
from cairn.service.dashboard.charts.tensor_tree import trail
from cairn.service.dashboard.form_fields import body_of
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.rendering import HEADERS
from cairn.service.dashboard.requests import StepRequestDependency
from cairn.service.dashboard.snippets import statistics_command
from cairn.service.errors import InvalidRequestError
from cairn.service.http.value_streams import ValueRead
from cairn.service.schemas import PLAIN_PATTERN, PlanRequest
from cairn.service.sizes import size_text
from cairn.storage.errors import InvalidSliceError, LeafNotFoundError
from cairn.storage.reading.tensor_parts import MOST_READ_BYTES, TensorPart
from cairn.storage.runs.records.manifest import LeafRecord

SIDE: Final = 128
"""Largest height and width of a picture, in elements."""

router: Final = page_router(StorePage)

Text = Annotated[str, Query(max_length=4000, pattern=PLAIN_PATTERN)]
Part = Annotated[str, Query(alias="slice", max_length=1000, pattern=PLAIN_PATTERN)]


@router.get("/ui/{root}/{run}/steps/{step}/tensor")
def tensor_page(
    caller: Reader,
    request: StepRequestDependency,
    item: Text,
    path: Text,
    mesh: Text = "",
    part: Part = "",
) -> HTMLResponse:
    """Show the shape, sharding, statistics and values of a tensor."""
    step = request.open_step()
    leaf = _leaf(step, item, path)
    model = step.manifest.model
    axes = parse_mesh(mesh) if mesh else mesh_of(model.config if model else {})
    named = {"item": item, "path": path}
    shown = part or _corner(leaf)
    drawable = bool(leaf.shape) and math.prod(leaf.shape) > 0 and not leaf.is_key
    part_problem = None
    if drawable and part:
        try:
            _check_part(tensors.open_part(step.reader(), item, path, part))
        except (InvalidRequestError, InvalidSliceError) as exc:
            part_problem = str(exc)
    planned = None
    if axes:
        body = body_of(PlanRequest, mesh={"axes": axes})
        planned = plans.plan_leaf(step, leaf.item, leaf.path, body)
    checkpoint = request.checkpoint()
    return request.render(
        "step/tensor.html",
        checkpoint=checkpoint,
        statistics_command=statistics_command(checkpoint, leaf.item, leaf.path),
        leaf=leaf,
        mesh=mesh_text(axes),
        split=splitting(leaf.shape, planned.spec if planned else leaf.spec, axes) if axes else None,
        planned=planned,
        trail=trail(leaf.path),
        drawable=drawable,
        part=shown,
        part_problem=part_problem,
        statistics_url=f"{addresses.step(*request.names, 'tensor/statistics')}?{urlencode(named)}",
        picture_url=f"{addresses.step(*request.names, 'tensor/picture')}?"
        + urlencode({**named, "slice": shown}),
        values_url=f"{addresses.leaf(*request.names, path)}?{urlencode({'item': item})}",
    )


@router.get("/ui/{root}/{run}/steps/{step}/tensor/statistics")
def statistics_part(
    caller: Reader, request: StepRequestDependency, item: Text, path: Text
) -> Response:
    """Show statistics and a histogram of a tensor's elements."""
    step = request.open_step()
    tensor_part = tensors.open_part(step.reader(), item, path)

    def answer() -> Response:
        statistics = tensors.tensor_statistics(request.plane, step, tensor_part)
        bars = None if statistics.histogram is None else bars_of(statistics.histogram)
        return request.render("step/statistics.html", statistics=statistics, bars=bars)

    return ValueRead(answer, request.http, request.root, tensor_part.held_bytes)


@router.get("/ui/{root}/{run}/steps/{step}/tensor/picture")
def picture(
    caller: Reader, request: StepRequestDependency, item: Text, path: Text, part: Part = ""
) -> Response:
    """Answer with a PNG of a slice of a tensor, one pixel per element."""
    step = request.open_step()
    tensor_part = tensors.open_part(step.reader(), item, path, part)

    def answer() -> Response:
        values = matrix_of(tensor_part)
        return Response(png_of(values), headers=HEADERS, media_type="image/png")

    return ValueRead(answer, request.http, request.root, tensor_part.held_bytes)


def matrix_of(part: TensorPart) -> np.ndarray[Any, Any]:
    """Read a slice of at most two dimensions as a matrix of floats.

    Raises:
        InvalidRequestError: The slice has more dimensions, or is too large to show.
    """
    _check_part(part)
    values = np.asarray(part.values(), np.float64)
    return values.reshape(1, -1) if values.ndim < 2 else values


def _check_part(part: TensorPart) -> None:
    if len(part.shape) > 2 or math.prod(part.shape) > SIDE * SIDE:
        raise InvalidRequestError(
            f"slice: a part of shape {part.shape} is too large to show: two dimensions and "
            f"{SIDE * SIDE} values at most."
        )
    if part.stored_bytes > MOST_READ_BYTES:
        raise InvalidRequestError(
            f"slice: the chunks of this part have {size_text(part.stored_bytes)}, and at most "
            f"{size_text(MOST_READ_BYTES)} are read for a page. Ask for less of it."
        )


def _leaf(step: OpenStep, item: str, path: str) -> LeafRecord:
    leaf = step.leaf(item, path)
    if leaf is None:
        raise LeafNotFoundError(
            "no such leaf",
            path=step.uri,
            expected=f"a leaf of {item!r}",
            found=repr(path)[:200],
            next_step="Search in the step's tensors.",
        )
    return leaf


def _corner(leaf: LeafRecord) -> str:
    """Return the slice that is shown first: the upper left corner of the first matrix.

    Args:
        leaf: Leaf of any number of dimensions.
    """
    if not leaf.shape:
        return ""
    ends = [f"0:{min(size, SIDE)}" for size in leaf.shape[-2:]]
    return ",".join(["0"] * (len(leaf.shape) - len(ends)) + ends)
