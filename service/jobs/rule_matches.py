"""Matching of leaf paths by a caller's regular expressions, in a process of its own.

A regular expression can need exponential time for a short text, and in Python only the end of its
process stops it. The process has limits of time and memory.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from cairn.service.errors import InvalidRequestError

MATCH_SECONDS: Final = 5.0
"""Time limit for all rules and all leaves together."""

_MEMORY_BYTES: Final = 1 << 30
_PROGRAM: Final = """
import json, re, sys, warnings
try:
    import resource
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
except ImportError:
    pass
warnings.simplefilter("ignore")
asked = json.load(sys.stdin)
compiled, errors = [], {}
for number, pattern in enumerate(asked["patterns"]):
    try:
        compiled.append(re.compile(pattern))
        if asked["names"]:
            re.match(f"|(?:{pattern})", "").expand(asked["names"][number])
    except (re.error, RecursionError, OverflowError, ValueError, IndexError) as error:
        errors[number] = str(error) or type(error).__name__
found, answer = [], {"errors": errors}
for path in asked["paths"] if not errors else ():
    if asked["names"]:
        whole = ((n, one.fullmatch(path)) for n, one in enumerate(compiled))
        first = next(((n, match) for n, match in whole if match), None)
        found.append(first and first[1].expand(asked["names"][first[0]]))
    else:
        found.append(next((n for n, one in enumerate(compiled) if one.search(path)), None))
if not asked["names"]:
    answer["catch_all"] = [one.search("") is not None for one in compiled]
json.dump({**answer, "found": found}, sys.stdout)
"""


class Matches(NamedTuple):
    """Matches of rules.

    Attributes:
        first: Number of the first rule that matches, by path; None: no rule matches.
        catch_all: For each rule, whether it matches every path.
    """

    first: dict[str, int | None]
    catch_all: list[bool]


def match_rules(patterns: Sequence[str], paths: Sequence[str]) -> Matches:
    """Search patterns in paths, and return the first match of each path.

    Args:
        patterns: Regular expressions of rules, in order.
        paths: Paths to search in.

    Raises:
        InvalidRequestError: Patterns are invalid, and the error names all of them; or all together
            need too much time or memory.
    """
    answer = _answer("rules", patterns, (), paths)
    _refuse(
        "rules: expected regular expressions",
        {f"body.rules.{n}": f"{patterns[n]!r}: {text}" for n, text in answer["errors"].items()},
    )
    return Matches(dict(zip(paths, answer["found"], strict=True)), answer["catch_all"])


def rename(rules: Mapping[str, str], paths: Sequence[str]) -> list[str | None]:
    r"""Rename each path by the first rule that matches all of it; None: no rule does.

    Args:
        rules: New paths by regular expression; a new path may use the expression's groups as `\1`.
        paths: Paths to rename.

    Raises:
        InvalidRequestError: Rules are invalid, and the error names all of them; or all together
            need too much time.
    """
    patterns, names = list(rules), list(rules.values())
    if not patterns:
        return [None] * len(paths)
    answer = _answer("model.map", patterns, names, paths)
    _refuse(
        r"model.map: expected regular expressions, and paths with their groups, such as \1",
        {
            f"body.model.map.{patterns[n]}": f"{patterns[n]!r}: {names[n]!r}: {text}"
            for n, text in answer["errors"].items()
        },
    )
    names_found: list[str | None] = answer["found"]
    return names_found


def _refuse(expected: str, problems: Mapping[str, str]) -> None:
    if problems:
        raise InvalidRequestError(
            f"{expected}: {'; '.join(problems.values())}",
            errors=[{"field": field, "detail": text} for field, text in problems.items()],
        )


def _answer(
    field: str, patterns: Sequence[str], names: Sequence[str], paths: Sequence[str]
) -> dict[str, Any]:
    request = json.dumps({"patterns": list(patterns), "names": list(names), "paths": list(paths)})
    limits = (str(int(MATCH_SECONDS) + 1), str(_MEMORY_BYTES))
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *limits],
            input=request.encode(),
            capture_output=True,
            timeout=MATCH_SECONDS,
            check=True,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError, ValueError) as exc:
        raise InvalidRequestError(
            f"{field}: expected regular expressions that are matched within {MATCH_SECONDS:g} "
            "seconds, found some that take longer, or too much memory; avoid repetitions within "
            "repetitions, such as (a+)+"
        ) from exc
    answer["errors"] = {int(number): text for number, text in answer["errors"].items()}
    return answer
