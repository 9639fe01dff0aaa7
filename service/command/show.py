"""`cairn show`: metadata, leaves and sharding of a checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from json import dumps
from typing import Annotated, Any, Final

import typer
from rich.text import Text
from rich.tree import Tree

from cairn.counts import count_text
from cairn.service.client.client import Client
from cairn.service.command.options import CheckpointArgument, RootOption, UrlOption, console, errors
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import Cell, print_table, readable
from cairn.service.command.tensors import (
    ItemOption,
    PrefixOption,
    Step,
    opened,
    shape_text,
    spec_text,
)
from cairn.service.errors import DownloadError, ProblemResponseError
from cairn.service.glossary import state_label
from cairn.service.schemas import Checkpoint, Damage, Tensor, TensorStatistics
from cairn.service.sizes import Size
from cairn.storage.errors import UnsupportedLeafError

app: Final = typer.Typer()

_METRICS: Final = "metrics"  # Orbax's item of metrics, which are shown as such
_JSON_SHOWN: Final = 300  # characters
_REFUSED: Final = (413, 422)
_TITLES: Final = ("item", "path", "dtype", "shape", "size", "sharding")
_STATISTICS: Final = ("min", "max", "mean", "std", "zeros", "nan", "infinite")

Statistics = Mapping[tuple[str, str], TensorStatistics]
"""Statistics of leaves, by item and path."""


@dataclass(frozen=True)
class Branch:
    """Node of the tree of leaves."""

    leaves: dict[str, Tensor] = field(default_factory=dict)
    branches: dict[str, "Branch"] = field(default_factory=dict)

    @property
    def everything(self) -> Iterator[Tensor]:
        """All leaves below the branch, at any depth."""
        yield from self.leaves.values()
        for branch in self.branches.values():
            yield from branch.everything

    @property
    def kind(self) -> object:
        """Key that is equal for branches with equal leaves below them."""
        leaves = ((name, *_shown(leaf)) for name, leaf in self.leaves.items())
        return tuple(leaves), tuple((name, branch.kind) for name, branch in self.branches.items())

    def title(self, name: str) -> Text:
        """Build the branch's label: its name, its number of leaves and their size."""
        sizes = [leaf.bytes for leaf in self.everything]
        summary = f"{count_text(len(sizes), 'leaf')}, {Size(sum(sizes))}"
        return Text.assemble((readable(name) or "(no name)", "bold"), (f"  {summary}", "dim"))


@app.command()
def show(
    checkpoint: CheckpointArgument,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read all values: their range, mean, deviation.")
    ] = False,
    item: ItemOption = None,
    prefix: PrefixOption = "",
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show one checkpoint: labels, metrics, leaves, sharding.

    On a terminal, numbered layers that are alike share one branch. The command reads only the
    index and JSON items, unless --stats asks for values. It reads a store URI or path in the store
    itself.
    """
    with Client(url) as client:
        step = opened(client, checkpoint, root)
        noted = step.noted()
        tensors = list(step.tensors(item, prefix))
        statistics = _statistics(step, tensors) if stats else {}
        json_items = {} if prefix else _json_items(step, noted, tensors, item)
    if json:
        print_document(
            {
                "checkpoint": noted.model_dump(mode="json"),
                "tensors": [tensor.model_dump(mode="json") for tensor in tensors],
                "statistics": [tensor.model_dump(mode="json") for tensor in statistics.values()],
                "json": json_items,
            }
        )
        return
    for name, value in (*_lines(noted), *_json_lines(json_items)):
        console.print(f"{name}: {readable(value)}", soft_wrap=True)
    if console.is_terminal:
        for tree in _trees(tensors, statistics):
            console.print(tree, soft_wrap=True)
    else:
        titles = _TITLES + (_STATISTICS if stats else ())
        print_table(console, titles, (_row(tensor, statistics, stats) for tensor in tensors))


def _json_items(
    step: Step, noted: Checkpoint, tensors: list[Tensor], item: str | None
) -> dict[str, Any]:
    """Return the step's JSON items that hold something, by name; print an error for a large one."""
    names = {*noted.items} - {tensor.item for tensor in tensors} - {_METRICS}
    json_items = {}
    for name in sorted(names if item is None else names & {item}):
        try:
            content = step.json_item(name)
        except DownloadError as error:
            errors.print(str(error), soft_wrap=True, markup=False)
            continue
        if content:
            json_items[name] = content
    return json_items


def _json_lines(json_items: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, content in json_items.items():
        text = dumps(content, ensure_ascii=False)
        rest = f"… ({len(text)} characters; --json prints all)" if len(text) > _JSON_SHOWN else ""
        yield f"{readable(name)} (JSON)", text[:_JSON_SHOWN] + rest


def _statistics(step: Step, tensors: list[Tensor]) -> Statistics:
    """Compute the statistics of each leaf; print an error for a leaf that has none, and go on."""
    statistics = {}
    for tensor in tensors:
        try:
            statistics[tensor.item, tensor.path] = step.statistics(tensor.path, tensor.item, "")
        except UnsupportedLeafError as error:
            errors.print(f"{tensor.item}/{tensor.path}: {error}", soft_wrap=True)
        except ProblemResponseError as error:
            if error.status not in _REFUSED:
                raise
            errors.print(f"{tensor.item}/{tensor.path}: {error}", soft_wrap=True)
    return statistics


def _lines(noted: Checkpoint) -> Iterator[tuple[str, str]]:
    yield "checkpoint", f"{noted.run}/steps/{noted.step}"
    yield "state", f"{state_label(noted.state.value)}, attempt {noted.attempt}"
    if noted.created is not None:
        yield "created", f"{noted.created:%Y-%m-%d %H:%M:%S} UTC"
    if noted.bytes is not None:
        yield "size", f"{Size(noted.bytes)} ({noted.bytes} bytes)"
    if noted.leaves is not None:
        yield "leaves", f"{noted.leaves} in {', '.join(noted.items)}"
    if noted.model_type is not None:
        yield "model", noted.model_type
    for name, entries in (
        ("aliases", noted.aliases),
        ("labels", [f"{name}={text}" for name, text in noted.labels.items()]),
        ("metrics", [_metric(noted, name) for name in noted.metrics]),
        ("iterators", list(noted.iterators)),
    ):
        if entries:
            yield name, ", ".join(entries)
    if noted.damaged is None:
        verified = f"{noted.verified:%Y-%m-%d %H:%M:%S} UTC" if noted.verified else "never"
        yield "verified", verified
    else:
        yield from _damage(noted.damaged)
    if noted.manifest_digest is not None:
        yield "digest", noted.manifest_digest
    yield "folder", noted.uri


def _damage(damage: Damage) -> Iterator[tuple[str, str]]:
    whose = f" (operation {damage.job})" if damage.job else ""
    yield "verified", f"verification failed {damage.at:%Y-%m-%d %H:%M:%S} UTC{whose}"
    named = ", ".join(damage.leaves)
    if damage.leaf_count > len(damage.leaves):
        named += f" and {damage.leaf_count - len(damage.leaves)} more"
    if named:
        yield "damaged leaves", named
    loads = ", every value loads as it was saved" if damage.loads else ""
    yield "problems", f"{damage.problem_count}{loads}"


def _metric(noted: Checkpoint, name: str) -> str:
    better = noted.better.get(name)
    return f"{name}={noted.metrics[name]:g}" + (f" ({better} is better)" if better else "")


def _row(tensor: Tensor, statistics: Statistics, stats: bool) -> tuple[Cell, ...]:
    leaf = tensor.item, tensor.path, *_shown(tensor)
    if not stats:
        return leaf
    like = statistics.get((tensor.item, tensor.path))
    if like is None:
        return *leaf, *(None for _ in _STATISTICS)
    numbers = (like.min, like.max, like.mean, like.std)
    infinite = like.positive_infinity + like.negative_infinity
    return *leaf, *map(_number, numbers), like.zeros, like.nan, infinite


def _shown(tensor: Tensor) -> tuple[str, str, Size, str | None]:
    """Return dtype, shape, size and sharding."""
    spec = None if tensor.spec is None else spec_text(tensor.spec)
    return tensor.dtype, shape_text(tensor.shape), Size(tensor.bytes), spec


def _number(value: float | int | str | None) -> str | None:
    return value if value is None or isinstance(value, str) else f"{value:.6g}"


def _trees(tensors: list[Tensor], statistics: Statistics) -> Iterator[Tree]:
    """Yield a tree for each item."""
    for item, leaves in groupby(tensors, lambda tensor: tensor.item):
        branch = Branch()
        for leaf in leaves:
            *folders, last = leaf.path.split("/")
            inner = branch
            for name in folders:
                inner = inner.branches.setdefault(name, Branch())
            inner.leaves[last] = leaf
        tree = Tree(branch.title(item))
        _grow(tree, branch, statistics)
        yield tree


def _grow(tree: Tree, branch: Branch, statistics: Statistics) -> None:
    for name, leaf in branch.leaves.items():
        tree.add(Text(f"{readable(name)}  {_leaf(leaf, statistics)}"))

    def kind(name: str) -> object:
        return name if statistics or not name.isdecimal() else branch.branches[name].kind

    numbered = sorted(filter(str.isdecimal, branch.branches), key=int)
    others = [name for name in branch.branches if not name.isdecimal()]
    for _, group in groupby([*numbered, *others], kind):
        alike = list(group)
        names = f"{alike[0]} to {alike[-1]}, {len(alike)} alike" if alike[1:] else alike[0]
        inner = branch.branches[alike[0]]
        _grow(tree.add(inner.title(names)), inner, statistics)


def _leaf(tensor: Tensor, statistics: Statistics) -> str:
    dtype, shape, size, spec = _shown(tensor)
    parts = [f"{dtype}[{shape}]", str(size)]
    if tensor.spec is not None:
        parts.append(f"sharded ({spec})" if any(tensor.spec) else "not sharded")
    like = statistics.get((tensor.item, tensor.path))
    if like is not None:
        parts.append(f"{_number(like.min)} to {_number(like.max)}")
        parts.append(f"mean {_number(like.mean)}, std {_number(like.std)}")
        infinite = like.positive_infinity + like.negative_infinity
        parts += [f"{n} {what}" for n, what in ((like.nan, "NaN"), (infinite, "infinite")) if n]
    return "  ".join(parts)
