"""Caller of a request, and the limits of its permission. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from cairn.service.errors import ForbiddenError
from cairn.service.schemas import Scope as Scope

T = TypeVar("T")


@dataclass(frozen=True)
class Caller:
    """Caller of a request.

    Attributes:
        name: Name in the audit trail and in records that are written to the store.
        scope: Highest scope that the caller has.
        roots: Names of the roots that the caller may use; None: all roots.
        request_id: Id of the current request, if it has one.
    """

    name: str
    scope: Scope
    roots: frozenset[str] | None = None
    request_id: str = ""

    def require(self, scope: Scope, root: str | None = None) -> None:
        """Raise unless the caller has a scope, and may use a root.

        Args:
            scope: Scope that the request needs.
            root: Name of the root that the request is about; None: no particular root.

        Raises:
            ForbiddenError: The caller lacks the scope or the root.
        """
        if not self.scope.includes(scope):
            only = "is read-only" if self.scope is Scope.READ else f"has {self.scope.value} only"
            raise ForbiddenError(
                f'You need the "{scope.value}" scope; your key "{self.name}" {only}. Ask an '
                "administrator for a key with that scope."
            )
        if root is not None and not self.sees(root):
            raise ForbiddenError(
                f'Your key "{self.name}" gives no access to root "{root}", only to '
                f"{', '.join(sorted(self.roots or ())) or 'none'}."
            )

    def require_everywhere(self, scope: Scope) -> None:
        """Raise unless the caller has a scope in all roots.

        Raises:
            ForbiddenError: The caller lacks the scope, or is limited to some roots.
        """
        self.require(scope)
        if self.roots is not None:
            raise ForbiddenError(
                f'You need the "{scope.value}" scope in all roots; your key "{self.name}" '
                f"has it in {', '.join(sorted(self.roots)) or 'none'}."
            )

    def sees(self, root: str) -> bool:
        """Return whether the caller may use a root."""
        return self.roots is None or root in self.roots

    def visible(self, roots: Mapping[str, T]) -> dict[str, T]:
        """Return the entries whose root, by name, the caller may use."""
        return {name: value for name, value in roots.items() if self.sees(name)}


@dataclass(frozen=True)
class Identity:
    """Authenticated caller, and the credential that proved it.

    Attributes:
        caller: The caller.
        key: Id of the caller's key; None: an issuer vouches for the caller.
        csrf: CSRF token of a browser session. Only pages of this server know it, and they send it
            with each change. None: the request has the key itself.
    """

    caller: Caller
    key: str | None = None
    csrf: str | None = None
