"""Policies that the stores of roots hold, as this process has read them last.

A store's content is input: a record that is no valid policy of its root has no effect, and is named
as a problem.
"""

import threading
import time
from dataclasses import dataclass, field
from typing import Final

from pydantic import ValidationError

from cairn.service.policies import KINDS, POLICY, Policy, PolicyProblem, root_problems
from cairn.storage.runs.policies import POLICIES, Policies, PolicyRecord
from cairn.storage.store.uri import StoreURI

CACHE_SECONDS: Final = 15.0
"""Age up to which a process uses the policies that it has read: by then a change is in force."""

_SHOWN: Final = 3


@dataclass(frozen=True)
class StoredPolicy:
    """Policy of a root, with its record."""

    root: str
    policy: Policy
    record: PolicyRecord

    @property
    def key(self) -> str:
        """Name of its row among the positions of automations; no other policy ever has it."""
        return f"{self.root}/{self.record.id}"


@dataclass(frozen=True)
class RootPolicies:
    """Policies of a root, and its records that are none."""

    policies: tuple[StoredPolicy, ...] = ()
    problems: tuple[PolicyProblem, ...] = ()


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    read: float = float("-inf")  # monotonic clock
    changes: int = 0  # made by this process
    policies: RootPolicies = RootPolicies()


class PolicyCache:
    """Policies of the roots, by root. Safe for use by many threads; one of them reads at a time."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._entries: dict[tuple[str, StoreURI], _Entry] = {}

    def get(
        self, root: str, uri: StoreURI, *, max_age: float | None = CACHE_SECONDS
    ) -> RootPolicies:
        """Return the policies of a root, read from its store if they are older than `max_age`.

        Args:
            root: Name of the root.
            uri: Address of the root.
            max_age: Age in seconds; None: the store is not read, and it has none until it was.

        Raises:
            StoreUnavailableError: The store is needed, and does not answer.
        """
        entry = self._entry(root, uri)
        if max_age is None:
            return entry.policies
        if entry.read < (oldest := time.monotonic() - max_age):
            with entry.lock:
                if entry.read < oldest:
                    began, changes = time.monotonic(), entry.changes
                    entry.policies = read_policies(root, uri)
                    if entry.changes == changes:  # else it may be older than the change
                        entry.read = began
        return entry.policies

    def expire(self, root: str, uri: StoreURI) -> None:
        """Have the next call read: this process has changed a policy of the root."""
        entry = self._entry(root, uri)
        entry.changes += 1
        entry.read = float("-inf")

    def _entry(self, root: str, uri: StoreURI) -> _Entry:
        with self._guard:
            return self._entries.setdefault((root, uri), _Entry())


def read_policies(root: str, uri: StoreURI) -> RootPolicies:
    """Read the policies of a root from its store.

    Raises:
        StoreUnavailableError: The store does not answer.
    """
    records, errors = Policies(uri).judge()
    policies, problems = [], []
    for name, error in errors.items():
        kind, _, rest = name.removeprefix(POLICIES).partition(".")
        problems.append((kind, rest.removesuffix(".json"), str(error)))
    for record in records:
        parsed = parse_policy(record)
        if isinstance(parsed, str):
            problems.append((record.kind, record.name, parsed))
        else:
            policies.append(StoredPolicy(root, parsed, record))
    return RootPolicies(
        tuple(policies),
        tuple(
            PolicyProblem(root=root, kind=kind, name=name, detail=detail)
            for kind, name, detail in sorted(problems)
        ),
    )


def parse_policy(record: PolicyRecord) -> Policy | str:
    """Return the policy in a record, or the reason why it is none that a root may have."""
    if record.kind not in KINDS:
        return f"unknown kind {record.kind!r}: expected {', '.join(KINDS)}"
    try:
        policy = POLICY.validate_python(record.fields | {"kind": record.kind, "name": record.name})
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_input=False, include_context=False)
        return "; ".join(
            f"{'.'.join(map(str, error['loc'][1:]))[:100]}: {error['msg']}"
            for error in errors[:_SHOWN]
        )
    return "; ".join(f"{name}: {detail}" for name, detail in root_problems(policy)) or policy
