"""Runs the tests of saving with the oldest, the pinned and the newest versions that are allowed.

JAX 0.11 has a leg of its own: it needs code that no version before or after it needs.

Each leg has an environment of its own under `.matrix/`, made anew when the lists of versions
change. An interpreter that this machine lacks is said in a line; CAIRN_MATRIX=strict makes it a
failure. torch is in none of them, nor are libraries of training data: what reads them is left out
here, and `make test` has it.

    python scripts/matrix.py             # every leg
    python scripts/matrix.py oldest      # one
    python scripts/matrix.py --list      # what there is
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / ".matrix"
TESTS: Final = (
    "tests/state/checkpointing",
    "tests/storage/reading",
    "tests/state/states/test_save_load.py",
    "tests/contract/test_a_save_state.py",
    "tests/contract/test_a_load_state.py",
)
NEEDS_TORCH: Final = (
    "tests/contract/test_a_load_state.py"
    "::test_to_pytorch_is_the_transformers_model_and_to_torch_its_dict"
)
# XLA of jaxlib 0.9 moves nothing to a CPU's host memory within a program, as this test's step does.
NEEDS_JAX_0_10: Final = (
    "tests/state/checkpointing/saves/test_staging.py"
    "::test_offloaded_arrays_may_be_donated_after_a_save_and_come_back_where_they_were"
)
NEEDS_DATA_LIBRARIES: Final = "tests/state/checkpointing/test_library_iterators.py"
TOOLS: Final = (
    "beartype",
    "equinox",
    "google-cloud-storage",
    "hypothesis",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
)
REFUSED: Final = ("3.12.0", "3.12.1", "3.12.2")  # as in pyproject.toml
SHOWN: Final = (
    "orbax-checkpoint",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "tensorstore",
    "numpy",
    "qwix",
)


class Leg(NamedTuple):
    """One set of versions.

    Attributes:
        name: of the leg, and of its environment.
        python: version of the interpreter, without the patch.
        constraints: file of exact versions; None: the newest that the ranges allow.
    """

    name: str
    python: str
    constraints: str | None


LEGS: Final = (
    Leg("oldest", "3.11", "constraints-oldest.txt"),
    Leg("pinned", "3.11", "constraints.txt"),
    # JAX supports Python 3.11 up to 0.10, which is pinned.
    Leg("jax-0.11", "3.13", "constraints-jax-0.11.txt"),
    Leg("newest-3.12", "3.12", None),
    Leg("newest", "3.13", None),
)


class Outcome(NamedTuple):
    """What became of a leg.

    Attributes:
        leg: which.
        state: `passed`, `failed` or `missing`.
        detail: pytest's last line, or what is missing.
        seconds: for the tests.
    """

    leg: Leg
    state: str
    detail: str
    seconds: float = 0.0


def find_python(version: str) -> Path | None:
    """A supported interpreter of this version: the running one, one on PATH, or one of pyenv's."""
    found = shutil.which(f"python{version}")
    homes = (os.environ.get("PYENV_ROOT"), Path.home() / ".pyenv")
    installed = [
        path
        for home in homes
        if home is not None
        for path in sorted(Path(home).glob(f"versions/{version}.*/bin/python"))
    ]
    for candidate in (
        Path(sys.executable),
        *([Path(found)] if found else []),
        *reversed(installed),
    ):
        whole = _version(candidate)
        if whole.startswith(f"{version}.") and whole not in REFUSED:
            return candidate
    return None


def _version(python: Path) -> str:
    """What an interpreter says it is; nothing from a shim on PATH that leads nowhere."""
    code = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def prepare(leg: Leg, python: Path) -> Path:
    """The interpreter of the leg's environment, which is made unless it is there and up to date."""
    folder = FOLDER / leg.name
    chosen = [ROOT / "pyproject.toml", *([ROOT / leg.constraints] if leg.constraints else [])]
    lists = [path.read_bytes() for path in chosen] + [tool.encode() for tool in TOOLS]
    wanted = hashlib.sha256(b"".join(lists)).hexdigest()
    stamp = folder / "installed"
    inside = folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted:
        return inside
    if folder.exists():
        shutil.rmtree(folder)
    subprocess.run([python, "-m", "venv", folder], check=True)
    limits = ["-c", ROOT / leg.constraints] if leg.constraints else []
    install = [inside, "-m", "pip", "install", "--quiet", *limits]
    subprocess.run([*install, "-e", f"{ROOT}[train]", *TOOLS], check=True)
    stamp.write_text(wanted)
    return inside


def run(leg: Leg) -> Outcome:
    """Test one leg."""
    python = find_python(leg.python)
    if python is None:
        return Outcome(leg, "missing", f"no Python {leg.python} on this machine that is supported")
    try:
        inside = prepare(leg, python)
    except subprocess.CalledProcessError as exc:
        return Outcome(leg, "failed", f"the environment can't be made: {exc}")
    print(f"{leg.name}: Python {leg.python}, {versions(inside)}", flush=True)
    log = FOLDER / f"{leg.name}.log"
    start = time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(
            [
                inside,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "--deselect",
                NEEDS_TORCH,
                *(["--deselect", NEEDS_JAX_0_10] if leg.name == "oldest" else []),
                "--ignore",
                NEEDS_DATA_LIBRARIES,
                *TESTS,
            ],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    seconds = time.monotonic() - start
    text = log.read_text(encoding="utf-8").rstrip()
    detail = re.sub(r" in [\d.]+s.*|=+ | =+", "", text.rpartition("\n")[2])
    if done.returncode:
        print(text)
    return Outcome(leg, "failed" if done.returncode else "passed", detail, seconds)


def versions(python: Path) -> str:
    """The versions that a leg tests, in a line."""
    code = f"from importlib.metadata import version\nfor n in {SHOWN}: print(n, version(n))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return ", ".join(done.stdout.splitlines())


def main() -> int:
    """Test the legs that were asked for; 1 if one fails."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("legs", nargs="*", metavar="LEG", help="default: all")
    parser.add_argument("--list", action="store_true", help="print the legs")
    arguments = parser.parse_args()
    known = {leg.name: leg for leg in LEGS}
    if arguments.list:
        for leg in LEGS:
            print(f"{leg.name}\tPython {leg.python}\t{leg.constraints or 'newest in the ranges'}")
        return 0
    if unknown := set(arguments.legs) - set(known):
        parser.error(f"expected legs out of {', '.join(known)}, found {', '.join(sorted(unknown))}")
    FOLDER.mkdir(exist_ok=True)
    outcomes = [run(known[name]) for name in arguments.legs or known]
    print()
    for outcome in outcomes:
        print(f"{outcome.leg.name:12} {outcome.state:8} {outcome.seconds:5.0f} s  {outcome.detail}")
    strict = os.environ.get("CAIRN_MATRIX") == "strict"
    bad = {"failed", "missing"} if strict else {"failed"}
    return int(any(outcome.state in bad for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
