"""`cairn tensors` and `cairn diff`: leaves of a checkpoint, and differences between two."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import typer

from cairn.service.client.client import Client
from cairn.service.command.addresses import is_in_store
from cairn.service.command.options import CheckpointArgument, RootOption, UrlOption, console
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import Cell, print_table
from cairn.service.command.served_steps import ServedStep
from cairn.service.schemas import (
    LeafDifference,
    StepDiff,
    Tensor,
    TensorList,
    TensorStatistics,
    TensorValues,
)
from cairn.service.sizes import Size
from cairn.storage.arrays.leaf_paths import keys_of

if TYPE_CHECKING:
    from cairn.service.command.stored_steps import StoredStep

app: Final = typer.Typer()

ItemOption = Annotated[
    str | None, typer.Option("--item", metavar="NAME", help="Such as model or optimizer.")
]
PrefixOption = Annotated[
    str, typer.Option("--prefix", metavar="TEXT", help="Leaves whose path begins so.")
]

Step: TypeAlias = "ServedStep | StoredStep"

_CHANGES: Final = {"only_this": "missing", "only_other": "new"}
"""Words for the change of a leaf that only one of the two steps has."""
_COUNTED: Final = _CHANGES | {
    "values": "with other values",
    "shape": "of another shape",
    "dtype": "of another dtype",
    "undigested": "not compared",
}

_BAR: Final = 40  # width in characters


@app.command()
def tensors(
    checkpoint: CheckpointArgument,
    leaf: Annotated[
        str | None, typer.Argument(metavar="[LEAF]", help="Path of one leaf: show its values.")
    ] = None,
    item: ItemOption = None,
    prefix: PrefixOption = "",
    part: Annotated[
        str, typer.Option("--slice", metavar="SLICE", help="As NumPy writes it: 0:10,:,3.")
    ] = "",
    stats: Annotated[
        bool, typer.Option("--stats", help="Range, mean, deviation, histogram of the values.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the values there: .npy or .safetensors."),
    ] = None,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List the leaves of a checkpoint, or show the values of one.

    For a leaf, the command reads only the chunks that hold the requested values, and checks each
    against its digest. It reads a store URI, or a path with ./ or / in front, in the store itself.
    """
    if leaf is None and (part or stats or out is not None):
        raise typer.BadParameter("--slice, --stats and --out are of a LEAF: name one")
    if leaf is not None and prefix:
        raise typer.BadParameter("--prefix is for the list of leaves: leave LEAF out")
    if stats and out is not None:
        raise typer.BadParameter("--stats or --out, not both")
    kind = None if out is None else _kind(out)
    with Client(url) as client:
        step = opened(client, checkpoint, root)
        if leaf is None:
            _list(step.tensors(item, prefix), json)
            return
        selection = leaf, item, part
        if out is not None and kind is not None:
            step.save(*selection, kind, out)
            print(out)
        elif stats:
            _print_statistics(step.statistics(*selection), json)
        else:
            _print_values(step.values(*selection), json)


def opened(client: Client, checkpoint: str, root: str | None) -> "Step":
    """Open the step that a `CheckpointArgument` names."""
    if not is_in_store(checkpoint):
        return ServedStep(client, checkpoint, root)
    from cairn.service.command.stored_steps import StoredStep  # imports TensorStore

    return StoredStep(checkpoint)


def _list(tensors: Iterator[Tensor], json: bool) -> None:
    if json:
        print_document(TensorList(tensors=list(tensors)))
        return
    titles = ("item", "path", "dtype", "shape", "size", "sharding", "digest")
    rows = (
        (
            tensor.item,
            tensor.path,
            tensor.dtype,
            shape_text(tensor.shape),
            Size(tensor.bytes),
            None if tensor.spec is None else spec_text(tensor.spec),
            tensor.digest,
        )
        for tensor in tensors
    )
    print_table(console, titles, rows)


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape: `2x3`."""
    return "x".join(map(str, shape)) or "()"


def spec_text(spec: Sequence[str | list[str] | None]) -> str:
    """Format a partition spec: the mesh axes of each dimension."""
    axes = [
        "-" if entry is None else entry if isinstance(entry, str) else "+".join(entry)
        for entry in spec
    ]
    return ", ".join(axes) or "()"


def _kind(out: Path) -> Literal["npy", "safetensors"]:
    if out.suffix == ".npy":
        return "npy"
    if out.suffix == ".safetensors":
        return "safetensors"
    raise typer.BadParameter(f"--out: expected a file .npy or .safetensors, found {out.name!r}")


def _print_values(tensor: TensorValues, json: bool) -> None:
    if json:
        print_document(tensor)
        return
    import numpy as np

    values = np.asarray(tensor.values, object).reshape(tensor.shape)
    print(np.array2string(values, formatter={"object": str}, separator=", ", threshold=1000))


def _print_statistics(statistics: TensorStatistics, json: bool) -> None:
    if json:
        print_document(statistics)
        return
    fields = statistics.model_dump(mode="json", exclude={"histogram", "item", "path"})
    for name, value in fields.items():
        shown = shape_text(value) if isinstance(value, list) else value
        print(f"{name.replace('_', ' ')}: {'none' if shown is None else shown}")
    if statistics.histogram is None:
        return
    start, width = float(statistics.histogram.start), statistics.histogram.width
    counts = statistics.histogram.counts
    for number, count in enumerate(counts):
        bar = "#" * -(-count * _BAR // max(counts))
        print(f"{start + number * width:>12g} {bar:<{_BAR}} {count}".rstrip())


@app.command()
def diff(
    checkpoint: CheckpointArgument,
    other: Annotated[
        str,
        typer.Argument(metavar="OTHER", help="The checkpoint that it is compared with."),
    ],
    values: Annotated[
        bool, typer.Option("--values", help="Read values that differ: how far apart are they?")
    ] = False,
    item: ItemOption = None,
    prefix: PrefixOption = "",
    root: RootOption = None,
    other_root: Annotated[
        str | None, typer.Option(metavar="NAME", help="Root of OTHER; default: that of CHECKPOINT.")
    ] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show what differs between two checkpoints.

    They may belong to two runs. The command compares leaves by their digests, whatever their
    sharding. First come leaves that only one checkpoint has, then leaves with another shape or
    dtype, then the others; with --values, those with the largest relative change first. Two URIs or
    paths are read in the store itself, without a control plane.
    """
    if is_in_store(checkpoint) and is_in_store(other):
        from cairn.service.command.stored_steps import StoredStep  # imports TensorStore

        difference = StoredStep(checkpoint).diff(StoredStep(other), values, item, prefix)
    else:
        with Client(url) as client:
            that = ServedStep(client, other, other_root or root)
            difference = ServedStep(client, checkpoint, root).diff(that, values, item, prefix)
    if json:
        print_document(difference)
        return
    _print_diff(difference)


def _print_diff(diff: StepDiff) -> None:
    counts = diff.leaves.model_dump()
    changes = ", ".join(f"{n} {_COUNTED.get(name, name)}" for name, n in counts.items() if n)
    print(f"leaves: {changes or 'none'}")
    for title, entries in (
        ("config", diff.config),
        ("metric", diff.metrics),
        ("label", diff.labels),
    ):
        for entry in entries:
            before = "(none)" if entry.change == "only_other" else entry.this
            after = "(none)" if entry.change == "only_this" else entry.other
            print(f"{title} {'/'.join(keys_of(entry.path))}: {before} -> {after}")
    if diff.differences:
        titles = ("change", "item", "path", "this", "other", "differing", "max abs", "relative")
        print_table(console, titles, map(_difference, sorted(diff.differences, key=_rank)))


def _rank(leaf: LeafDifference) -> tuple[int, float]:
    """Return a sort key: leaves of one step first, then other shapes or dtypes, then changes.

    Large relative changes come before small ones.
    """
    place = 0 if leaf.change in _CHANGES else 1 if leaf.change in ("shape", "dtype") else 2
    if leaf.values is None or not leaf.values.differing:
        return place, 0.0
    change = leaf.values.relative  # None (from zeros, or not finite) sorts first
    return place, -math.inf if change is None or math.isnan(change) else -change


def _difference(leaf: LeafDifference) -> tuple[Cell, ...]:
    values = leaf.values
    return (
        _CHANGES.get(leaf.change, leaf.change),
        leaf.item,
        leaf.path,
        _kind_of(leaf.this),
        _kind_of(leaf.other),
        leaf.not_compared if values is None else f"{values.differing} of {values.elements}",
        None if values is None or values.max_absolute is None else f"{values.max_absolute:g}",
        None if values is None or values.relative is None else f"{values.relative:.3g}",
    )


def _kind_of(tensor: Tensor | None) -> str | None:
    if tensor is None:
        return None
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
