"""The metrics that servers and workers have, and what a query asks for."""

import re
from collections.abc import Iterator
from typing import Any, Final

import promql_parser

HISTOGRAMS: Final = {
    "cairn_http_request_seconds": {"method", "route"},
    "cairn_store_request_seconds": {"operation"},
    "cairn_job_seconds": {"kind", "outcome"},
}
OTHERS: Final = {
    "cairn_http_requests_total": {"method", "route", "status"},
    "cairn_http_requests_in_progress": set(),
    "cairn_event_streams": set(),
    "cairn_announcements_total": {"root", "outcome"},
    "cairn_index_lag_seconds": {"root"},
    "cairn_index_scan_seconds": {"root"},
    "cairn_index_problem": {"root"},
    "cairn_index_runs": {"root"},
    "cairn_index_checkpoints": {"root"},
    "cairn_index_damaged_checkpoints": {"root"},
    "cairn_jobs": {"kind", "state"},
    "cairn_workers": {"alive"},
    "cairn_external_changes_total": {"root", "kind"},
    "cairn_webhook_dead": set(),
    "cairn_webhook_wait_seconds": set(),
    "cairn_build_info": {"version"},
    "cairn_store_requests_total": {"operation", "outcome"},
    "cairn_jobs_running": {"kind"},
    "cairn_job_bytes_total": {"kind"},
}
FAMILIES: Final = {*HISTOGRAMS, *OTHERS}
"""Of a server, as `# TYPE` names them."""

WORKER_FAMILIES: Final = {
    *("cairn_build_info", "cairn_store_requests_total", "cairn_store_request_seconds"),
    *("cairn_job_seconds", "cairn_jobs_running", "cairn_job_bytes_total"),
}
"""Of a worker."""

SERIES: Final[dict[str, set[str]]] = {
    "up": set(),
    **OTHERS,
    **{f"{name}_bucket": {*labels, "le"} for name, labels in HISTOGRAMS.items()},
    **{
        f"{name}_{part}": labels for name, labels in HISTOGRAMS.items() for part in ("sum", "count")
    },
}
"""Every series by its name, with its labels; all have those that Prometheus adds."""

ADDED: Final = {"job", "instance"}


def families(text: str) -> set[str]:
    """What `/metrics` has, with or without numbers."""
    return set(re.findall(r"^# TYPE (cairn_\w+) ", text, re.MULTILINE))


def asked(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The series that a query names, each with the labels that are asked of it.

    Labels of an aggregation are asked of everything inside.

    Raises:
        ValueError: It is no PromQL.
    """
    text = expression.replace("$__rate_interval", "5m")
    return _asked(promql_parser.parse(text), set())


def _asked(node: Any, labels: set[str]) -> Iterator[tuple[str, set[str]]]:
    match type(node).__name__:
        case "VectorSelector":
            assert not node.matchers.or_matchers
            yield node.name, labels | {one.name for one in node.matchers.matchers}
        case "MatrixSelector":
            yield from _asked(node.vector_selector, labels)
        case "AggregateExpr":
            within = set(node.modifier.labels) if node.modifier else set()
            yield from _asked(node.expr, labels | within)
        case "BinaryExpr":
            matching = node.modifier.matching if node.modifier else None
            within = set(matching.labels) if matching else set()
            for side in (node.lhs, node.rhs):
                yield from _asked(side, labels | within)
        case "Call":
            for argument in node.args:
                yield from _asked(argument, labels)
        case "ParenExpr" | "UnaryExpr":
            yield from _asked(node.expr, labels)
        case "NumberLiteral":
            return
        case other:
            raise NotImplementedError(other)
