"""Findings of checks, and a runner that runs all checks at once, with a deadline."""

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from cairn.installation import missing_extra


class Outcome(StrEnum):
    """Urgency of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes:
        check: Name of the check.
        outcome: Urgency.
        found: Description in one line.
        fix: Shell command, or advice; empty if there is nothing to do.
    """

    check: str
    outcome: Outcome
    found: str
    fix: str = ""


Check = Callable[[], Iterable[Finding]]

_PASSWORD: Final = re.compile(r"(://[^/@\s]*?:)\S*@")  # to the last @: a password may contain one
_PARAMETER: Final = re.compile(r"(password=)[^&\s]*", re.IGNORECASE)


def without_passwords(text: str) -> str:
    """Replace the passwords of URLs in a text by `***`."""
    return _PARAMETER.sub(r"\1***", _PASSWORD.sub(r"\1***@", text))


def run_checks(checks: Mapping[str, Check], *, seconds: float) -> list[Finding]:
    """Run all checks at once; return their findings in the order of the checks.

    Args:
        checks: Checks by name.
        seconds: Deadline; a check that misses it is reported as a failure.
    """
    answers = {name: _begin(check) for name, check in checks.items()}
    wait(answers.values(), timeout=seconds)
    return [
        finding
        for name, answer in answers.items()
        for finding in _findings_of(name, answer, seconds)
    ]


def _begin(check: Check) -> Future[list[Finding]]:
    answer: Future[list[Finding]] = Future()

    def ask() -> None:
        try:
            findings = list(check())
        except Exception as exc:
            answer.set_exception(exc)
        else:
            answer.set_result(findings)

    # A daemon thread: a check that hangs must not keep the command from ending.
    threading.Thread(target=ask, name="cairn-doctor", daemon=True).start()
    return answer


def _findings_of(name: str, answer: Future[list[Finding]], seconds: float) -> list[Finding]:
    if not answer.done():
        text = f"expected an answer within {seconds:.3g} s, found none"
        return [Finding(name, Outcome.FAIL, text, "check that it can be reached from this host")]
    error = answer.exception()
    if error is None:
        return [
            replace(finding, found=without_passwords(finding.found)) for finding in answer.result()
        ]
    if isinstance(error, ModuleNotFoundError):
        explained = missing_extra(error, used="looking at it")
        if explained is not None:
            text, _, fix = str(explained).partition("Install it: ")
            return [Finding(name, Outcome.WARN, text.strip(), fix)]
    text = without_passwords(f"{type(error).__name__}: {error}")
    return [Finding(name, Outcome.FAIL, text, "tell the authors of Cairn")]
