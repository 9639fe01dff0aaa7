"""Problems as plain sentences, for the command line and for pages.

A problem's `detail` says what was expected and what was found, for programs and logs. The most
usual problems have a sentence of their own for people.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

PAGE_NOT_FOUND: Final = "Page not found."
_NO_ROUTE: Final = "urn:cairn:problem:not-found"

# Addresses of the API, `/v1/roots/ROOT/runs/RUN/checkpoints/STEP`, and of pages.
_ADDRESS: Final = re.compile(
    r"^(?:/v1/roots/(?P<root>[^/:]+)(?:/runs/(?P<run>[^/:]+))?"
    r"|/ui/(?P<page_root>[^/]+)(?:/(?P<page_run>[^/]+))?)"
)
_COMPARED: Final = re.compile(
    r"^(?P<message>.*?): (?P<path>\S+): expected (?P<expected>.*?), found (?P<found>.*?)"
    r"(?:\. (?P<advice>[A-Z`].*))?$",
    re.DOTALL,
)


def sentence_of(problem: Mapping[str, Any]) -> str:
    """Return what a problem says, in plain sentences.

    Args:
        problem: Members of a problem, as in RFC 9457.
    """
    detail = str(problem.get("detail") or problem.get("title") or "")
    if problem.get("type") == _NO_ROUTE and "/openapi.json" in detail:
        return PAGE_NOT_FOUND
    compared = _COMPARED.match(detail)
    if compared is None or compared["message"] not in _SENTENCES:
        return detail
    address = _ADDRESS.match(str(problem.get("instance", "")))
    root = address and (address["root"] or address["page_root"])
    run = address and (address["run"] or address["page_run"])
    path = compared["path"]
    subject = f'run "{run or path.rsplit("/", 1)[-1]}"'
    place = f' in root "{root}"' if root and run else f" at {path}"
    found = compared["found"].rstrip(".").replace("without it", "without run.json")
    sentence = _SENTENCES[compared["message"]].format(
        subject=subject,
        place=place,
        expected=compared["expected"].removeprefix("an "),
        found="" if found == "nothing" else f" ({found})",
    )
    return f"{sentence} {compared['advice']}" if compared["advice"] else sentence


_SENTENCES: Final[Mapping[str, str]] = {
    "no such run": "There is no {subject}{place}{found}.",
    "no such step": "There is no {expected} in {subject}{found}.",
    "no such alias": "There is no {expected} in {subject}{found}.",
}
