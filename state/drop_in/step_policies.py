"""Orbax's options as decisions: when to save, and which steps to keep.

Orbax's own policies decide; its older options are translated to policies. Options that a run can't
follow are refused when the manager is created. Options about how Orbax writes or deletes files have
no effect, and a warning names them.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint.checkpoint_managers import CheckpointManagerOptions

from cairn.storage.errors import PolicyError

__all__ = ["PolicyStep", "check_options", "metric_rank", "preservation_policy", "save_policy"]

logger = logging.getLogger("cairn.save")

_WITHOUT_MEANING: Final = (
    "step_prefix",
    "step_format_fixed_length",
    "step_name_format",
    "cleanup_tmp_directories",
    "single_host_load_and_broadcast",
    "enable_background_delete",
    "num_deletion_threads",
    "atomicity_options",
    "temporary_path_class",
    "save_root_metadata",
    "enable_per_process_directory_creation",
    "lightweight_initialize",
)
"""Options about Orbax's folders, commits and deletions; they have no effect on a run."""


_RULES: Final = ("max_to_keep", "keep_period", "keep_time_interval")


@dataclass(frozen=True)
class PolicyStep:
    """Step, as Orbax's policies see it.

    Attributes:
        step: the step's number.
        time: time of the save.
        metrics: the step's metrics, by name; None if it has none.
        attempt: the attempt that the step was written in; 0 if it is not written yet.
        damage: damage that the last verification found, in a line; empty if none.
    """

    step: int
    time: datetime
    metrics: dict[str, Any] | None
    attempt: int = 0
    damage: str = ""


def check_options(options: CheckpointManagerOptions) -> None:
    """Check the manager's options; log a warning of those that have no effect.

    Raises:
        PolicyError: a run can't follow some of the options; all of these are listed.
    """
    processes, files = options.multiprocessing_options, options.file_options
    others = [name for name in _RULES if getattr(options, name)]
    decided = options.read_only or options.should_save_fn or options.save_decision_policy
    problems = [
        f"{name}: {why}"
        for name, is_set, why in [
            ("todelete_subdir", options.todelete_subdir, "give grace_seconds= instead"),
            ("todelete_full_path", options.todelete_full_path, "give grace_seconds= instead"),
            (
                "multiprocessing_options.primary_host",
                processes.primary_host != 0,
                "process 0 is the one that commits",
            ),
            (
                "multiprocessing_options.active_processes",
                processes.active_processes is not None,
                "all processes of the job save together",
            ),
            (
                "file_options.path_permission_mode",
                files is not None and files.path_permission_mode is not None,
                "files get the permissions that the process's umask leaves",
            ),
            (
                "preservation_policy",
                options.preservation_policy is not None and others,
                f"it alone says what to keep, not also {', '.join(others)}",
            ),
            (
                "save_interval_steps",
                options.save_interval_steps == 0 and not decided,
                "no step is a multiple of 0; None saves the first step only",
            ),
        ]
        if is_set
    ]
    if problems:
        raise PolicyError(
            "options that a Cairn run can't honour",
            path="options",
            expected="options about when to save and what to keep",
            found="; ".join(problems),
            next_step="Leave these out, or correct them.",
        )
    default = CheckpointManagerOptions()
    unused = [name for name in _WITHOUT_MEANING if getattr(options, name) != getattr(default, name)]
    if unused:
        logger.warning("options without a meaning for a Cairn run: %s", ", ".join(unused))


def save_policy(options: CheckpointManagerOptions) -> policies.SaveDecisionPolicy:
    """Return the policy that decides when to save; older options are translated."""
    if options.save_decision_policy is not None:
        return options.save_decision_policy
    if options.should_save_fn is not None:
        rules: list[Any] = [_AsFunction(options.should_save_fn)]
    else:
        rules = [policies.SpecificStepsPolicy(options.save_on_steps or ())]
        if options.save_interval_steps:
            rules.append(policies.FixedIntervalPolicy(options.save_interval_steps))
        rules.append(policies.InitialSavePolicy())
    return policies.AnySavePolicy([*rules, policies.PreemptionCheckpointingPolicy()])


def preservation_policy(
    options: CheckpointManagerOptions,
) -> policies.PreservationPolicy | None:
    """Return the policy that decides which steps to keep; None: the options keep all steps.

    Older options are translated.
    """
    if options.preservation_policy is not None:
        return options.preservation_policy
    if options.max_to_keep is None:
        return None
    rules: list[Any] = []
    if options.keep_period is not None:
        rules.append(policies.EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        rules.append(policies.EveryNSeconds(int(options.keep_time_interval.total_seconds())))
    if options.best_fn is not None:
        rules.append(
            policies.BestN(
                get_metric_fn=metric_rank(options),
                reverse=options.best_mode == "min",
                n=options.max_to_keep,
                keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
            )
        )
    else:
        rules.append(policies.LatestN(options.max_to_keep))
    return policies.AnyPreservationPolicy(rules)


def metric_rank(options: CheckpointManagerOptions) -> Callable[[Any], float]:
    """Return a function like `best_fn` that returns the worst value in place of NaN.

    NaN has no order: a sort would put it anywhere.
    """
    best_fn = options.best_fn
    assert best_fn is not None
    worst = math.inf if options.best_mode == "min" else -math.inf

    def rank(metrics: Any) -> float:
        value = best_fn(metrics)
        return worst if math.isnan(value) else value

    return rank


class _AsFunction:
    """Policy that calls the caller's `should_save_fn`."""

    def __init__(self, decide: Any) -> None:
        self._decide = decide

    def should_save(
        self, step: PolicyStep, previous_steps: Sequence[PolicyStep], *, context: Any
    ) -> bool:
        """Return what the function returns for this step and the latest before it (or None)."""
        return bool(self._decide(step.step, previous_steps[-1].step if previous_steps else None))
