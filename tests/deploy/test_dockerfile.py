"""What the Dockerfile says, and what would be installed by it; `test_image.py` carries it out."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import dockerfile
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.repository import ROOT

DOCKERFILE = ROOT / "Dockerfile"
TRAINING = ("jax", "jaxlib", "flax", "optax", "orbax", "torch", "transformers")
LINES = dockerfile.parse_file(str(DOCKERFILE))


def test_the_base_is_an_exact_version_of_the_python_that_the_constraints_are_for():
    (base,) = [line.value[0] for line in LINES if line.cmd == "ARG" and "PYTHON" in line.original]
    _, _, tag = base.partition("=python:")
    version, *variant = tag.split("-")
    assert len(version.split(".")) == 3
    assert variant[0] == "slim"
    first = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[0]
    assert f"(Python {version.rpartition('.')[0]})" in first
    assert {line.value[0] for line in LINES if line.cmd == "FROM"} == {"${PYTHON_IMAGE}", "runtime"}


def test_programs_are_started_without_a_shell_that_would_keep_signals_to_itself():
    for line in LINES:
        if line.cmd in ("CMD", "ENTRYPOINT", "HEALTHCHECK"):
            assert line.json, line.original


def test_the_last_stage_is_the_server_so_that_a_build_without_a_target_makes_it():
    stages = [line.value[-1] for line in LINES if line.cmd == "FROM"]
    assert stages == ["build", "runtime", "worker", "server"]


def test_the_image_installs_what_make_installs_but_for_the_extras():
    (install,) = [line for line in LINES if line.cmd == "RUN" and " install -c" in line.original]
    assert install.value[0].endswith("install -c constraints.txt '.[server,postgres,s3]'")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "install --quiet -c constraints.txt -e '.[all]'" in makefile


def test_hadolint_has_nothing_to_say():
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([program, DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def closure(name, extras):
    """The packages that one brings with these extras, itself included, as they are installed."""
    found, left = set(), [(canonicalize_name(name), frozenset(extras))]
    while left:
        one = left.pop()
        if one in found:
            continue
        found.add(one)
        for text in metadata.requires(one[0]) or []:
            wanted = Requirement(text)
            asked = [{"extra": extra} for extra in one[1]] or [{"extra": ""}]
            if wanted.marker is None or any(map(wanted.marker.evaluate, asked)):
                left.append((canonicalize_name(wanted.name), frozenset(wanted.extras)))
    return {one for one, _ in found}


def test_all_that_the_image_would_install_is_pinned_and_none_of_it_trains():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    installed = closure("cairn-checkpoints", ["server", "postgres", "s3"]) - {"cairn-checkpoints"}
    assert installed - pinned == set()
    assert {"botocore", "dbos", "fastapi", "psycopg", "tensorstore"} <= installed
    assert not set(TRAINING) & installed


def test_what_is_copied_is_there_and_admitted_to_the_build():
    admitted = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    names = [
        name
        for line in LINES
        if line.cmd == "COPY" and not any(flag.startswith("--from=") for flag in line.flags)
        for name in line.value[:-1]
    ]
    assert {"cairn", "interop", "service", "state", "storage", "pyproject.toml"} <= set(names)
    assert [name for name in names if not (ROOT / name).exists()] == []
    assert [name for name in names if f"!{name}" not in admitted] == []
