"""Policies: what a control plane does to runs by itself, and which promotions it refuses.

There are four kinds. All are the same JSON wherever they are: in the setting `CAIRN_POLICIES`, in a
record of a root, in a request, and in a file for `cairn policies set`.
"""

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    field_validator,
    model_validator,
)

from cairn.service.schemas import (
    NAME_PATTERN,
    ConvertRequest,
    Named,
    OperationState,
    Request,
    Response,
    RetentionPolicy,
    example_of,
)
from cairn.storage.errors import UnsupportedFormatError
from cairn.storage.safetensors.sizes import parse_size

KIND_PATTERN: Final = r"^[a-z]{1,32}$"
WEBHOOK_PATTERN: Final = r"^https?://[^\s@]+$"

_CRON_FIELDS: Final = 5
_KEEPS: Final = frozenset(RetentionPolicy.model_fields)

Pattern = Annotated[str, Field(min_length=1, max_length=128)]


class _ForRuns(Request):
    """Policy for some runs, selected by shell patterns."""

    name: str = Field(pattern=NAME_PATTERN)
    root: Pattern = Field(
        default="*",
        description="Roots that it is for: a pattern. In the environment only: a policy in a root "
        "is for that root.",
    )
    run: Pattern = Field(default="*", description="Runs that it is for: a shell pattern.")

    def is_for(self, root: str, run: str) -> bool:
        """Return whether the policy applies to a run."""
        return fnmatchcase(root, self.root) and fnmatchcase(run, self.run)


class _ForAliases(_ForRuns):
    """Policy for some aliases of some runs."""

    alias: Pattern = Field(description="Aliases that it is for: a shell pattern.")

    def is_for_alias(self, root: str, run: str, alias: str) -> bool:
        """Return whether the policy applies to an alias."""
        return self.is_for(root, run) and fnmatchcase(alias, self.alias)


class _Timed(_ForRuns):
    """Policy that acts at set times."""

    cron: str = Field(
        max_length=100,
        description="When it acts, in UTC: minute, hour, day, month, day of the week. A policy of "
        "a root acts once an hour at most: its minute is one number.",
    )

    @field_validator("cron")
    @classmethod
    def _is_cron(cls, value: str) -> str:
        from croniter import CroniterBadDateError, croniter  # loaded only if a policy needs it

        if len(value.split()) != _CRON_FIELDS or not croniter.is_valid(value):
            raise ValueError("expected five fields as cron has them, such as '0 3 * * *'")
        if any(field.lower().startswith("r") for field in value.split()):
            raise ValueError("expected moments that are the same for all servers, not R (random)")
        try:
            croniter(value).get_next()
        except CroniterBadDateError as exc:
            raise ValueError("expected a day that there is, such as '0 3 28 2 *'") from exc
        return value

    def due(self, now: datetime, *, ahead: bool = False) -> datetime:
        """Return the last due moment before `now` or, with `ahead`, the next after it."""
        from croniter import croniter

        moments = croniter(self.cron, now.astimezone(UTC), ret_type=datetime)
        due: datetime = moments.get_next() if ahead else moments.get_prev()
        return due


class Schedule(_Timed):
    """Policy that verifies runs, or collects their garbage, at set times."""

    kind: Literal["schedule"]
    action: Literal["verify", "collect_garbage"]
    steps: Literal["all", "latest", "none"] = Field(
        default="latest", description="Steps whose bytes the action `verify` reads."
    )

    @model_validator(mode="after")
    def _has_its_own(self) -> Self:
        if self.steps != "latest" and self.action != "verify":
            raise ValueError("expected steps for verify, and for nothing else")
        return self


class Retention(_Timed, RetentionPolicy):
    """Policy that deletes steps at set times; a step stays if any rule keeps it."""

    kind: Literal["retention"]

    @model_validator(mode="after")
    def _keeps_something(self) -> Self:
        if not any(getattr(self, name) for name in _KEEPS):
            raise ValueError(f"expected a rule of what to keep: {', '.join(sorted(_KEEPS))}")
        return self

    @property
    def policy(self) -> RetentionPolicy:
        """The rules alone."""
        return RetentionPolicy(**{name: getattr(self, name) for name in _KEEPS})


def _possible(options: ConvertRequest) -> ConvertRequest:
    """Return the options of an export; raise if no step could be exported so."""
    try:
        parse_size(options.max_shard_size)
        if options.memory is not None:
            parse_size(options.memory)
    except UnsupportedFormatError as exc:
        raise ValueError(str(exc)) from exc
    if options.format == "gguf":
        if options.dtype == "float64" or options.lora == "keep" or options.check_logits:
            raise ValueError("expected no float64, no kept adapters and no logits check for a GGUF")
    elif options.dtype == "q8_0" or (options.lora == "keep" and options.check_logits):
        raise ValueError("expected q8_0 for a GGUF alone, and no logits check of kept adapters")
    return options


Export = Annotated[ConvertRequest, AfterValidator(_possible)]


class Automation(_ForAliases):
    """Policy that acts on a step once an alias has moved to it."""

    kind: Literal["automation"]
    action: Literal["convert", "verify"]
    convert: Export | None = Field(default=None, description="Options of the action `convert`.")

    @model_validator(mode="after")
    def _has_its_own(self) -> Self:
        if self.convert is not None and self.action != "convert":
            raise ValueError("expected convert for the action convert, and for nothing else")
        return self


class Bound(Request):
    """Bounds of a metric, both inclusive; NaN and infinities are always outside."""

    min: float | None = Field(default=None, allow_inf_nan=False)
    max: float | None = Field(default=None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if (self.min is None and self.max is None) or self._least > self._most:
            raise ValueError("expected min, max or both, and min not above max")
        return self

    @property
    def _least(self) -> float:
        return -math.inf if self.min is None else self.min

    @property
    def _most(self) -> float:
        return math.inf if self.max is None else self.max

    def holds(self, value: float) -> bool:
        """Return whether a value is within the bounds."""
        return math.isfinite(value) and self._least <= value <= self._most

    def __str__(self) -> str:
        """Return the bounds in words: `at least 1 and at most 2`."""
        sides = (("at least", self.min), ("at most", self.max))
        return " and ".join(f"{side} {limit:g}" for side, limit in sides if limit is not None)


class Gate(_ForAliases):
    """Policy of what a step must be like before an alias may move to it."""

    kind: Literal["gate"]
    verified: bool = Field(
        default=False,
        description="Every byte must have been compared with what was saved, without damage since.",
    )
    exported: bool | Export = Field(
        default=False,
        description="The store must have an export of the step with these options, with checked "
        "files; true: with those of `cairn convert` without options.",
    )
    labels: Named[Annotated[str, Field(max_length=2000)]] = Field(
        default_factory=dict, description="Required texts by label; `*` is any text."
    )
    metrics: Named[Bound] = Field(
        default_factory=dict, description="Bounds by metric. NaN is outside all bounds."
    )
    webhook: str | None = Field(
        default=None,
        max_length=2000,
        pattern=WEBHOOK_PATTERN,
        description='URL that gets a POST, and answers `{"allow": true}`, or false and a '
        "`reason`. In the environment only.",
    )


Policy = Annotated[Schedule | Retention | Automation | Gate, Field(discriminator="kind")]
PolicyKind = Literal["schedule", "retention", "automation", "gate"]
KINDS: Final[tuple[str, ...]] = get_args(PolicyKind)

POLICY: Final[TypeAdapter[Policy]] = TypeAdapter(Policy)
"""Parser of a policy of any kind."""


def root_problems(policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield the field and the problem of whatever only the environment may set.

    Who writes a root may reach nothing else: no other root, no URL, and no more than a fair share
    of the workers.
    """
    if policy.root != "*":
        yield "root", "expected none: a policy in a root is for that root"
    if isinstance(policy, Gate) and policy.webhook is not None:
        yield "webhook", "expected none: only CAIRN_POLICIES may have webhooks called"
    if isinstance(policy, _Timed) and not policy.cron.split()[0].isdigit():
        yield "cron", "expected one number as the minute: a policy of a root acts hourly at most"


def fields_of(policy: Policy) -> dict[str, Any]:
    """Return the JSON of a policy's fields, without its kind, its name and defaults."""
    return policy.model_dump(mode="json", exclude_defaults=True, exclude={"kind", "name", "root"})


def document_of(policy: Policy) -> dict[str, Any]:
    """Return the JSON of a policy without defaults, as a file for `cairn policies set` has it."""
    document = policy.model_dump(mode="json", exclude_defaults=True)
    return {"kind": policy.kind, "name": policy.name, **document}


def sentence(policy: Policy) -> str:
    """Return what a policy does, in one sentence."""
    runs = "" if policy.run == "*" else f" of {policy.run}"
    if isinstance(policy, Gate):
        return f"Moves {policy.alias}{runs} only to steps that are {_requirements(policy)}."
    if isinstance(policy, Automation):
        verb = "Exports" if policy.action == "convert" else "Verifies"
        return f"{verb} each step that {policy.alias}{runs} moves to."
    when = f"at {policy.cron} (UTC)"
    of_runs = "of every run" if policy.run == "*" else f"of {policy.run}"
    if isinstance(policy, Retention):
        return f"Deletes the steps {of_runs} except {_kept(policy)}, {when}."
    if policy.action == "collect_garbage":
        return f"Removes the garbage {of_runs} {when}."
    steps = {"all": "every step", "latest": "the latest step", "none": "the records"}
    return f"Verifies {steps[policy.steps]} {of_runs} {when}."


def _kept(policy: Retention) -> str:
    rules = []
    if policy.keep_last:
        rules.append(f"the last {policy.keep_last}")
    if policy.keep_every:
        rules.append(f"every {policy.keep_every}th")
    if policy.keep_within_seconds:
        rules.append(f"those of the last {policy.keep_within_seconds / 3600:g} hours")
    for best in policy.keep_best:
        way = "lowest" if best.mode == "min" else "highest"
        rules.append(f"the {best.count} with the {way} {best.metric}")
    if policy.keep_labelled:
        rules.append(f"those labelled {' or '.join(policy.keep_labelled)}")
    return ", ".join(rules)


def _requirements(gate: Gate) -> str:
    rules = []
    if gate.verified:
        rules.append("verified")
    for name, text in gate.labels.items():
        rules.append(f"labelled {name}" if text == "*" else f'labelled {name}="{text}"')
    rules += [f"{bound} in {name}" for name, bound in gate.metrics.items()]
    if gate.exported:
        rules.append("exported")
    if gate.webhook is not None:
        rules.append(f"allowed by {gate.webhook}")
    return ", ".join(rules) or "not damaged"


def _example(**members: Any) -> ConfigDict:
    """Return a model's config with an example of its JSON, for the OpenAPI document."""
    return ConfigDict(json_schema_extra={"examples": [members]})


class PolicyRun(Response):
    """Last time that a policy acted."""

    at: datetime | None
    operation: str | None = Field(description="Operation that it started.")
    state: OperationState | None
    problem: str | None = Field(description="Why it started none, if it was so.")


class PolicyState(Response):
    """Policy, where it comes from, and what it did and will do."""

    model_config = _example(
        kind="schedule",
        name="nightly",
        policy={
            "kind": "schedule",
            "name": "nightly",
            "run": "llama*",
            "cron": "0 3 * * *",
            "action": "verify",
        },
        root="default",
        source="root",
        overridden=False,
        sentence="Verifies the latest step of llama* at 0 3 * * * (UTC).",
        sequence=1,
        set_by="ana",
        set_at="2026-03-02T10:30:00Z",
        next_due="2026-03-03T03:00:00Z",
        last=None,
    )

    kind: PolicyKind | str = Field(union_mode="left_to_right")
    name: str
    policy: dict[str, Any] = Field(
        description="Its JSON without defaults, as a request or a file for `cairn policies set` "
        "has it."
    )
    root: str = Field(description="Its root; of a policy of the environment: a pattern of roots.")
    source: Literal["environment", "root"] = Field(
        description="`environment`: CAIRN_POLICIES of the servers; it is read only."
    )
    overridden: bool = Field(
        description="The environment has a policy of this kind and name for the root, which counts "
        "instead."
    )
    sentence: str = Field(description="What it does, in one sentence.")
    sequence: int | None = Field(description="Its ETag; null: it is of the environment.")
    set_by: str | None
    set_at: datetime | None
    next_due: datetime | None = Field(description="When it acts next; null: it has no set times.")
    last: PolicyRun | None = Field(description="When it acted last, as far as the trail goes back.")


class PolicyProblem(Response):
    """Record of a root that is no valid policy; it has no effect, but a gate refuses."""

    root: str
    kind: str
    name: str
    detail: str


class PolicyList(Response):
    """Policies of the environment and of the roots."""

    model_config = _example(policies=[example_of(PolicyState)], problems=[])

    policies: list[PolicyState]
    problems: list[PolicyProblem] = Field(
        description="Records that can't be read, and roots that do not answer. Delete such a "
        'record with `If-Match: "0"`.'
    )


class PutPolicyRequest(Request):
    """Request to create or change a policy of a root."""

    model_config = _example(
        policy={"kind": "retention", "name": "weekly", "cron": "0 4 * * 0", "keep_last": 3}
    )

    policy: Policy


class PolicyEffect(Response):
    """One thing that a policy would do or refuse now."""

    run: str
    step: int | None = Field(description="null: nothing can be said of the run's steps.")
    alias: str | None
    detail: str


class PolicyTrial(Response):
    """What a policy would do now; nothing was changed."""

    model_config = _example(
        sentence="Would delete 1 step, 447.5 kB, of 1 run.",
        runs=1,
        whole=True,
        due=["2026-03-08T04:00:00Z", "2026-03-15T04:00:00Z", "2026-03-22T04:00:00Z"],
        delete_count=1,
        delete_bytes=447518,
        effects=[
            {"run": "llama-sft", "step": 500, "alias": None, "detail": "delete, 447.5 kB"},
        ],
    )

    sentence: str = Field(description="What it would do now, in one sentence.")
    runs: int = Field(description="Runs that it is for, of those that were looked at.")
    whole: bool = Field(description="False: there are more runs or effects than are listed here.")
    due: list[datetime] = Field(description="The next three times that it acts.")
    delete_count: int
    delete_bytes: int
    effects: list[PolicyEffect]
