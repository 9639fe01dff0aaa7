"""Whoever asks for something, and how far their permission reaches. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from cairn.service.errors import ForbiddenError
from cairn.service.schemas import Scope as Scope

T = TypeVar("T")


@dataclass(frozen=True)
class Caller:
    """Whoever asks.

    Attributes:
        name: Kept in the audit trail and in what is written to the store.
        scope: What they may do.
        roots: Names of the roots where they may; None: in all.
        request_id: Of the request with which they ask, if it has one.
    """

    name: str
    scope: Scope
    roots: frozenset[str] | None = None
    request_id: str = ""

    def require(self, scope: Scope, root: str | None = None) -> None:
        """Refuse what they may not do.

        Args:
            scope: What it takes.
            root: Name of the root that it is about; None: none in particular.

        Raises:
            ForbiddenError: They may not.
        """
        if not self.scope.includes(scope):
            raise ForbiddenError(
                f"expected a caller who may {scope.value}, found {self.name!r}, who may "
                f"{self.scope.value} only. Ask an administrator for a key with that scope."
            )
        if root is not None and not self.sees(root):
            raise ForbiddenError(
                f"root {root!r}: expected a caller who may use it, found {self.name!r}, who may "
                f"use {', '.join(sorted(self.roots or ())) or 'none'}."
            )

    def require_everywhere(self, scope: Scope) -> None:
        """Refuse what concerns all roots to who may not use all of them.

        Raises:
            ForbiddenError: They may not.
        """
        self.require(scope)
        if self.roots is not None:
            raise ForbiddenError(
                f"expected a caller who may {scope.value} in all roots, found {self.name!r}, who "
                f"may in {', '.join(sorted(self.roots)) or 'none'}."
            )

    def sees(self, root: str) -> bool:
        """Whether they may use a root."""
        return self.roots is None or root in self.roots

    def visible(self, roots: Mapping[str, T]) -> dict[str, T]:
        """Those of some roots, by name, that they may use."""
        return {name: value for name, value in roots.items() if self.sees(name)}


@dataclass(frozen=True)
class Identity:
    """A caller who is known, and by what.

    Attributes:
        caller: Who.
        key: Id of their key; None: they have shown a token of the issuer's.
        csrf: Of a browser's session, what a page of ours says with each change that it asks for,
            and no other page knows; None: they have shown the key itself.
    """

    caller: Caller
    key: str | None = None
    csrf: str | None = None
