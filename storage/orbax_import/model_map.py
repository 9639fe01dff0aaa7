"""Which leaves of somebody else's tree are the leaves of a model of ours. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cairn.storage.arrays.dtypes import is_floating
from cairn.storage.errors import PolicyError, TreeMismatchError
from cairn.storage.reading.item_arrays import LeafInfo
from cairn.storage.runs.records.manifest import ModelInfo

__all__ = ["Match", "ModelLeaf", "ModelMap", "match_rules"]

Shape = tuple[int, ...]

Match = Callable[[Mapping[str, str], Sequence[str]], list[str | None]]
"""Gives what rules call each of some whole paths; None: none matches. Refuses what is no rule."""


class ModelLeaf(NamedTuple):
    """Where a leaf of the model lies.

    Attributes:
        item: the item of its tree.
        path: its path in that.
    """

    item: str
    path: str


def match_rules(rules: Mapping[str, str], paths: Sequence[str]) -> list[str | None]:
    """Match rules here, however long that takes: they are of who runs this.

    Args:
        rules: as `ModelMap` has them.
        paths: whole paths.

    Raises:
        PolicyError: a rule that is no regular expression.
    """
    for pattern, name in rules.items():
        try:
            whole = re.match(f"|(?:{pattern})", "")
            assert whole is not None, "an alternative is empty"
            whole.expand(name)
        except (re.error, IndexError, TypeError) as exc:
            raise PolicyError(
                "not a rule",
                path=f"{pattern!r}: {name!r}",
                expected=r"a regular expression, and a path with its groups, such as \1",
                found=str(exc),
                next_step="Correct it.",
            ) from exc
    return [_name(rules, path) for path in paths]


def _name(rules: Mapping[str, str], path: str) -> str | None:
    for pattern, name in rules.items():
        match = re.fullmatch(pattern, path)
        if match is not None:
            return match.expand(name)
    return None


@dataclass(frozen=True)
class ModelMap:
    """A model, and rules that say where its leaves are in a tree of others.

    Attributes:
        info: the model, as the manifest is to describe it.
        shapes: of every leaf of the model, by path.
        rules: regular expressions of whole paths, "item/path", and what the model calls such a
            leaf, with groups as in `re.Match.expand`. The first that matches counts. Leaves that
            none matches are not the model's.

        match: what matches them.

    Raises:
        PolicyError: a rule that is no regular expression.
    """

    info: ModelInfo
    shapes: Mapping[str, Shape]
    rules: Mapping[str, str]
    match: Match = match_rules

    def __post_init__(self) -> None:
        self.match(self.rules, [])

    def places(self, stored: Mapping[str, Mapping[str, LeafInfo]]) -> dict[str, ModelLeaf]:
        """Return the stored leaf of every leaf of the model, by the model's path.

        Args:
            stored: the leaves of each item, by path.

        Raises:
            TreeMismatchError: leaves are missing, unexpected, twice there, of another shape, or not
                floating; all are listed.
        """
        leaves_by_name: dict[str, ModelLeaf] = {}
        problems: list[str] = []
        leaves = [ModelLeaf(item, path) for item, infos in stored.items() for path in infos]
        for leaf, name in self.names(leaves).items():
            if name is None:
                continue
            info = stored[leaf.item][leaf.path]
            problem = f"{leaf.item}/{leaf.path}: mapped to {name}"
            if name not in self.shapes:
                problems.append(f"{problem}, no leaf of the model")
            elif name in leaves_by_name:
                problems.append(f"{problem}, as {'/'.join(leaves_by_name[name])} is")
            elif info.shape != self.shapes[name]:
                problems.append(
                    f"{problem} of shape {list(self.shapes[name])}, stored {list(info.shape)}"
                )
            elif not is_floating(info.dtype):
                problems.append(f"{problem}, which is floating, stored {info.dtype}")
            leaves_by_name.setdefault(name, leaf)
        missing = sorted(self.shapes.keys() - leaves_by_name.keys())
        problems += [f"{name}: no leaf is mapped to it" for name in missing]
        if problems:
            raise TreeMismatchError(
                "the map does not make the model of this tree",
                path=self.info.model_type or "",
                expected=f"each of its {len(self.shapes)} leaves once, in its shape",
                found=f"{len(problems)} problems",
                next_step="Correct the map or the config.",
                problems=problems,
            )
        return leaves_by_name

    def names(self, leaves: Iterable[ModelLeaf]) -> dict[ModelLeaf, str | None]:
        """Return the model's names of leaves; None: a leaf is not the model's."""
        paths = list(leaves)
        matches = self.match(self.rules, ["/".join(leaf) for leaf in paths])
        return dict(zip(paths, matches, strict=True))
