"""Map from a model's leaves to the leaves of an imported tree. No I/O."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cairn.counts import count_text
from cairn.storage.arrays.dtypes import is_floating
from cairn.storage.errors import PolicyError, TreeMismatchError
from cairn.storage.reading.item_arrays import LeafInfo
from cairn.storage.runs.records.manifest import ModelInfo

__all__ = ["Match", "ModelLeaf", "ModelMap", "match_rules"]

Shape = tuple[int, ...]

Match = Callable[[Mapping[str, str], Sequence[str]], list[str | None]]
"""Function (rules, whole paths) -> the name that the rules give each path; None: none matches.

It raises PolicyError for a rule that is no regular expression.
"""


class ModelLeaf(NamedTuple):
    """Location of a model's leaf in a step.

    Attributes:
        item: item with the tree that holds the leaf.
        path: path of the leaf in that tree.
    """

    item: str
    path: str


def match_rules(rules: Mapping[str, str], paths: Sequence[str]) -> list[str | None]:
    """Return the name that the rules give each path; None for paths that no rule matches.

    The time is not limited, so the rules must be trusted.

    Args:
        rules: as in `ModelMap`.
        paths: whole paths, "item/path".

    Raises:
        PolicyError: a rule is no regular expression.
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
    """A model, and rules that map the leaves of an imported step to its leaves.

    Attributes:
        info: description of the model for the manifest.
        shapes: shape of every leaf of the model, by the model's path.
        rules: regular expression of whole stored paths, "item/path", -> the model's path, with
            groups as in `re.Match.expand`. The first match counts. Leaves without a match are not
            the model's.

        match: function that applies the rules, such as `match_rules`.

    Raises:
        PolicyError: a rule is no regular expression.
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
            stored: item -> path -> description of each stored leaf.

        Raises:
            TreeMismatchError: leaves are missing, unexpected, ambiguous, of another shape, or not
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
                expected=f"each of its {count_text(len(self.shapes), 'leaf')} once, in its shape",
                found=count_text(len(problems), "problem"),
                next_step="Correct the map or the config.",
                problems=problems,
            )
        return leaves_by_name

    def names(self, leaves: Iterable[ModelLeaf]) -> dict[ModelLeaf, str | None]:
        """Return the model's path of each leaf; None for leaves that are not the model's."""
        paths = list(leaves)
        matches = self.match(self.rules, ["/".join(leaf) for leaf in paths])
        return dict(zip(paths, matches, strict=True))
