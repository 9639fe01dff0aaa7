"""Which partition rule takes which leaf: a caller's regular expressions, in their own process.

An expression can take longer than the universe has to match a short text, and nothing in Python can
stop it but the end of its process. That process gets neither time nor memory beyond its limits.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from cairn.service.errors import InvalidRequestError

MATCH_SECONDS: Final = 5.0
"""How long all rules may take for all leaves."""

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
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        errors[number] = str(error) or type(error).__name__
found = []
for path in asked["paths"] if not errors else ():
    found.append(next((n for n, one in enumerate(compiled) if one.search(path)), None))
catch_all = [one.search("") is not None for one in compiled]
json.dump({"errors": errors, "found": found, "catch_all": catch_all}, sys.stdout)
"""


class Matches(NamedTuple):
    """What rules match.

    Attributes:
        first: by path, the number of the first rule that matches it; None if none does.
        catch_all: for each rule, whether it matches any path.
    """

    first: dict[str, int | None]
    catch_all: list[bool]


def match_rules(patterns: Sequence[str], paths: Sequence[str]) -> Matches:
    """Search patterns in paths.

    Raises:
        InvalidRequestError: Some are no regular expressions, all of which are named; or all
            together take too long, or too much memory.
    """
    found = _answer(json.dumps({"patterns": list(patterns), "paths": list(paths)}))
    if found["errors"]:
        numbers = [int(number) for number in found["errors"]]
        problems = [
            {"field": f"body.rules.{number}", "detail": f"{patterns[number]!r}: {text}"}
            for number, text in zip(numbers, found["errors"].values(), strict=True)
        ]
        told = "; ".join(one["detail"] for one in problems)
        raise InvalidRequestError(f"rules: expected regular expressions: {told}", errors=problems)
    return Matches(dict(zip(paths, found["found"], strict=True)), found["catch_all"])


def _answer(asked: str) -> dict[str, Any]:
    limits = (str(int(MATCH_SECONDS) + 1), str(_MEMORY_BYTES))
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *limits],
            input=asked.encode(),
            capture_output=True,
            timeout=MATCH_SECONDS,
            check=True,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError, ValueError) as exc:
        raise InvalidRequestError(
            f"rules: expected regular expressions that are matched within {MATCH_SECONDS:g} "
            "seconds, found some that take longer, or too much memory; avoid repetitions within "
            "repetitions, such as (a+)+"
        ) from exc
    return answer
