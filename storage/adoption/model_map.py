"""Which leaves of somebody else's tree are the leaves of a model of ours. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cairn.storage.arrays import is_floating
from cairn.storage.errors import PolicyError, TreeMismatchError
from cairn.storage.reading import LeafInfo
from cairn.storage.runs import ModelInfo

__all__ = ["ModelLeaf", "ModelMap"]

Shape = tuple[int, ...]


class ModelLeaf(NamedTuple):
    """Where a leaf of the model lies.

    Attributes:
        item: the item of its tree.
        path: its path in that.
    """

    item: str
    path: str


@dataclass(frozen=True)
class ModelMap:
    """A model, and rules that say where its leaves are in a tree of others.

    Attributes:
        info: the model, as the manifest is to describe it.
        shapes: of every leaf of the model, by path.
        rules: regular expressions of whole paths, "item/path", and what the model calls such a
            leaf, with groups as in `re.Match.expand`. The first that matches counts. Leaves that
            none matches are not the model's.

    Raises:
        PolicyError: a rule that is no regular expression.
    """

    info: ModelInfo
    shapes: Mapping[str, Shape]
    rules: Mapping[str, str]

    def __post_init__(self) -> None:
        for pattern, name in self.rules.items():
            try:
                whole = re.match(f"(?:{pattern})|", "")
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

    def places(self, stored: Mapping[str, Mapping[str, LeafInfo]]) -> dict[str, ModelLeaf]:
        """Where every leaf of the model lies, by the model's path.

        Args:
            stored: the leaves of each item, by path.

        Raises:
            TreeMismatchError: leaves are missing, unexpected, twice there, of another shape, or not
                floating; all are listed.
        """
        found: dict[str, ModelLeaf] = {}
        problems: list[str] = []
        for item, leaves in stored.items():
            for path, info in leaves.items():
                name = self.name(ModelLeaf(item, path))
                if name is None:
                    continue
                if name not in self.shapes:
                    problems.append(f"{item}/{path}: mapped to {name}, no leaf of the model")
                elif name in found:
                    first = "/".join(found[name])
                    problems.append(f"{item}/{path}: mapped to {name}, as {first} is")
                elif info.shape != self.shapes[name]:
                    problems.append(
                        f"{item}/{path}: mapped to {name} of shape {list(self.shapes[name])}, "
                        f"stored {list(info.shape)}"
                    )
                elif not is_floating(info.dtype):
                    problems.append(
                        f"{item}/{path}: mapped to {name}, which is floating, stored {info.dtype}"
                    )
                found.setdefault(name, ModelLeaf(item, path))
        missing = sorted(self.shapes.keys() - found.keys())
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
        return found

    def name(self, leaf: ModelLeaf) -> str | None:
        """What the model calls a leaf; None if it is not the model's."""
        for pattern, name in self.rules.items():
            match = re.fullmatch(pattern, "/".join(leaf))
            if match is not None:
                return match.expand(name)
        return None
