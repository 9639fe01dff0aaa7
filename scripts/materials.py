"""What an installation brings: a bill of materials (CycloneDX), and a list of licences.

Of the packages that are installed here, those count that an extra of Cairn asks for, directly or
not. Versions are those that the tests run with, if this environment was made of constraints.txt.

    python scripts/materials.py dist                  # all extras
    python scripts/materials.py dist --extra server --extra postgres
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[1]
OURS: Final = "cairn-checkpoints"
BILL: Final = "sbom.cdx.json"
LICENCES: Final = "licences.md"
UNTOLD: Final = "not told"
_SHOWN: Final = 60  # characters; some packages have the whole text where the name should be


def brought_by(extras: Iterable[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that extras of Cairn ask for, by canonical name; without Cairn.

    Args:
        extras: as pyproject.toml names them.

    Raises:
        metadata.PackageNotFoundError: one of them is not installed.
    """
    found: dict[str, metadata.Distribution] = {}
    waiting = [(OURS, extra) for extra in ("", *extras)]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        distribution = found.get(name) or metadata.distribution(name)
        found[name] = distribution
        for requirement in map(Requirement, distribution.requires or ()):
            marker = requirement.marker
            if marker is not None and not marker.evaluate({"extra": extra}):
                continue
            asked = canonicalize_name(requirement.name)
            more = {(asked, one) for one in ("", *requirement.extras)} - seen
            seen |= more
            waiting += sorted(more)
    del found[OURS]
    return dict(sorted(found.items()))


def licence(distribution: metadata.Distribution) -> str:
    """What a distribution says its licence is: an SPDX expression, a classifier, or a text."""
    told = distribution.metadata
    if expression := told.get("License-Expression"):
        return str(expression)
    classifiers = [
        value.rsplit(" :: ", 1)[-1]
        for value in told.get_all("Classifier") or ()
        if value.startswith("License :: ") and not value.endswith("OSI Approved")
    ]
    text = (told.get("License") or "").strip().splitlines()
    name = text[0].strip() if text and len(text[0]) <= _SHOWN else ""
    return " and ".join(classifiers) or name or UNTOLD


def bill(names: Iterable[str], *, validate: bool = True) -> dict[str, Any]:
    """The bill of materials of these packages, as cyclonedx-bom tells it of this environment.

    Args:
        names: canonical ones.
        validate: compare what cyclonedx-bom made with CycloneDX's schema; takes some 20 s.
    """
    command = [sys.executable, "-m", "cyclonedx_py", "environment", sys.executable]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library"]
    command += ["--output-reproducible", "--of", "JSON", "--output-file", "-"]
    command += ["--validate" if validate else "--no-validate"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    made: dict[str, Any] = json.loads(done.stdout)
    wanted = set(names)
    made["components"] = [
        component
        for component in made["components"]
        if canonicalize_name(component["name"]) in wanted
    ]
    root = made["metadata"]["component"]["bom-ref"]
    kept = {component["bom-ref"] for component in made["components"]} | {root}
    made["dependencies"] = [
        one | ({"dependsOn": sorted(kept & set(one["dependsOn"]))} if "dependsOn" in one else {})
        for one in made["dependencies"]
        if one["ref"] in kept
    ]
    return made


def table(distributions: Iterable[metadata.Distribution]) -> Iterator[str]:
    """The list of licences, as the lines of a Markdown table."""
    yield "| package | version | licence |"
    yield "|---|---|---|"
    for one in distributions:
        yield f"| {one.metadata['Name']} | {one.version} | {licence(one)} |"


def main() -> int:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extra", action="append", default=[])
    arguments = parser.parse_args()
    found = brought_by(arguments.extra or ["all"])
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / BILL).write_text(json.dumps(bill(found), indent=2) + "\n", "utf-8")
    (arguments.folder / LICENCES).write_text("\n".join(table(found.values())) + "\n", "utf-8")
    print(f"{len(found)} packages: {arguments.folder / BILL}, {arguments.folder / LICENCES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
