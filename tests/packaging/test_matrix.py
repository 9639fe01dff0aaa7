"""The matrix of versions: its legs, and what it says of an interpreter that is not there."""

import ast
import importlib.util
import sys
import tomllib
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.packaging.conftest import ROOT


@pytest.fixture
def matrix(tmp_path, monkeypatch):
    """The script as a module, with a folder of its own."""
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "scripts" / "matrix.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "matrix")
    monkeypatch.delenv("CAIRN_MATRIX", raising=False)
    return module


def test_the_workflow_runs_every_leg(matrix):
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert [
        (one["leg"], one["python"]) for one in jobs["matrix"]["strategy"]["matrix"]["include"]
    ] == [(leg.name, leg.python) for leg in matrix.LEGS]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    assert {"make check", "make test"} <= set(commands)


def test_the_tests_that_it_runs_are_there(matrix):
    assert [path for path in matrix.TESTS if not (ROOT / path).exists()] == []
    file, _, name = matrix.NEEDS_TORCH.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def imported(file):
    """The names of modules, and of what may be modules, that a file imports at its top."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_what_its_tests_import_is_in_its_environments(matrix):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["store"], *extras["train"], *matrix.TOOLS]
    names = {canonicalize_name(Requirement(one).name) for one in (*needed, project["name"])}
    distributions = metadata.packages_distributions()

    paths = [ROOT / path for path in matrix.TESTS]
    tests = {file for path in paths for file in ([path] if path.suffix else path.rglob("*.py"))}
    tests.remove(ROOT / matrix.NEEDS_DATA_LIBRARIES)
    folders = {folder for file in tests for folder in file.relative_to(ROOT).parents}
    queue = [*tests, *(ROOT / folder / "conftest.py" for folder in folders)]
    files, missing = set(), set()
    while queue:
        file = queue.pop()
        if file in files or not file.is_file():
            continue
        files.add(file)
        for module in imported(file):
            root = module.partition(".")[0]
            if root == "tests":
                queue.append(ROOT / f"{module.replace('.', '/')}.py")
            elif root not in sys.stdlib_module_names and names.isdisjoint(
                map(canonicalize_name, distributions.get(root, ()))
            ):
                missing.add((file.name, root))
    assert missing == set()


def test_every_leg_has_its_constraints(matrix):
    for leg in matrix.LEGS:
        assert leg.constraints is None or (ROOT / leg.constraints).is_file()


@pytest.mark.parametrize(("strictness", "status"), [("", 0), ("strict", 1)])
def test_a_missing_interpreter_is_said_and_fails_only_if_strict(
    strictness, status, matrix, monkeypatch, capsys
):
    monkeypatch.setattr(matrix, "LEGS", (matrix.Leg("future", "3.99", None),))
    monkeypatch.setattr(sys, "argv", ["matrix.py"])
    monkeypatch.setenv("CAIRN_MATRIX", strictness)
    assert matrix.main() == status
    assert (
        "future       missing      0 s  no Python 3.99 on this machine that is supported"
        in capsys.readouterr().out
    )


def test_interpreters_are_found_on_the_path_and_a_shim_that_leads_nowhere_is_not(
    matrix, tmp_path, monkeypatch
):
    shim = tmp_path / "python3.98"
    shim.write_text("#!/bin/sh\nexit 127\n")
    real = tmp_path / "python3.97"
    real.write_text("#!/bin/sh\necho 3.97.1\n")
    for path in (shim, real):
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert matrix.find_python("3.98") is None
    assert matrix.find_python("3.97") == real
    monkeypatch.setattr(matrix, "REFUSED", ("3.97.1",))
    assert matrix.find_python("3.97") is None


def test_interpreters_that_are_refused_are_those_of_the_project(matrix):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    refused = {
        one.version for one in SpecifierSet(project["requires-python"]) if one.operator == "!="
    }
    assert refused == set(matrix.REFUSED)


def test_a_leg_that_is_none_is_refused_with_those_that_are(matrix, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["matrix.py", "latest"])
    with pytest.raises(SystemExit):
        matrix.main()
    assert "expected legs out of oldest, pinned, jax-0.11, newest" in capsys.readouterr().err
