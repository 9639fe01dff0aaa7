"""Training refuses versions that are not supported, and warns of those that were not tested."""

import logging
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from cairn import InstallationError
from cairn.installation import CHECKED, TESTED, check_versions
from tests.packaging.conftest import ROOT
from tests.packaging.refusing import variables

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RANGES = {
    requirement.name: requirement
    for extra in ("store", "train")
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra])
}


def pins(file):
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    found = [line.split("#")[0].split("==") for line in lines]
    return {name.strip(): version.strip() for name, version in (one for one in found if one[1:])}


@pytest.fixture
def versions(monkeypatch):
    """What is installed, as far as the check is told; begins with the pinned versions."""
    known = pins("constraints.txt")
    monkeypatch.setattr(metadata, "requires", lambda name: [str(one) for one in RANGES.values()])
    monkeypatch.setattr(metadata, "version", known.__getitem__)
    known["cairn-checkpoints"] = "0.1.0"
    return known


@pytest.mark.parametrize("name", sorted(CHECKED))
def test_each_range_has_two_ends_and_holds_what_is_pinned_and_the_oldest(name):
    assert (name in TESTED) == ("<" not in {one.operator for one in RANGES[name].specifier})
    specifier = RANGES[name].specifier & SpecifierSet(TESTED.get(name, ""))
    assert sorted(one.operator for one in specifier) == ["<", ">="]
    (oldest,) = [one.version for one in specifier if one.operator == ">="]
    found = pins("constraints-oldest.txt")[name]
    assert specifier.contains(found)
    assert Version(found).release[:2] == Version(oldest).release[:2]
    assert specifier.contains(pins("constraints.txt")[name])


def test_pinned_versions_are_accepted(versions, caplog):
    check_versions()
    assert caplog.records == []


def test_a_local_build_of_a_supported_version_is_accepted(versions, caplog):
    versions["jaxlib"] += "+cuda12"
    check_versions()
    assert caplog.records == []


def test_newer_versions_than_were_tested_are_accepted_with_one_warning(versions, caplog):
    versions.update({"jax": "0.13.0", "optax": "1.0", "flax": "0.13.0rc1"})
    check_versions()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("cairn.installation", logging.WARNING)
    assert record.getMessage() == (
        "cairn 0.1.0 was not tested with versions that are installed here: "
        "expected flax <0.13, found 0.13.0rc1; expected jax <0.13, found 0.13.0; "
        "expected optax <0.3, found 1.0. Try a save and a restore before you rely on them, "
        "or install tested versions: pip install 'flax<0.13' 'jax<0.13' 'optax<0.3'"
    )


def test_what_is_refused_is_not_warned_of_beside(versions, caplog):
    versions.update({"jax": "0.13.0", "tensorstore": "0.2.0"})
    with pytest.raises(InstallationError, match=r"expected tensorstore <0\.2,>=0\.1\.85, found 0"):
        check_versions()
    assert caplog.records == []


def test_every_version_outside_is_named_with_the_command_that_mends_it(versions):
    versions.update({"orbax-checkpoint": "0.13.0", "jax": "0.8.2"})
    with pytest.raises(InstallationError) as caught:
        check_versions()
    text = str(caught.value)
    assert "expected orbax-checkpoint <0.13,>=0.12.3, found 0.13.0" in text
    assert "expected jax >=0.9.0, found 0.8.2" in text
    assert text.endswith(
        "Install supported versions: pip install 'jax>=0.9.0' 'orbax-checkpoint<0.13,>=0.12.3'"
    )


def test_a_release_candidate_of_a_version_outside_is_outside(versions):
    versions["orbax-checkpoint"] = "0.13.0rc1"
    with pytest.raises(InstallationError, match=r"found 0\.13\.0rc1"):
        check_versions()


def test_a_source_tree_without_an_installation_is_not_checked(versions, monkeypatch):
    def nothing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", nothing)
    versions["jax"] = "0.1"
    check_versions()


def test_training_is_refused_before_it_imports_anything():
    program = (
        "import sys\n"
        "from importlib import metadata\n"
        "real = metadata.version\n"
        "metadata.version = lambda name: '0.13.0' if name == 'orbax-checkpoint' else real(name)\n"
        "try:\n"
        "    from cairn import Checkpointer\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error, {'jax', 'orbax'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=variables(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("InstallationError cairn "), done.stderr
    assert "found 0.13.0. Install supported versions: pip install 'orbax-checkpoint" in done.stdout
    assert done.stdout.endswith("set()\n")


def test_a_process_that_trains_warns_once_and_goes_on():
    program = (
        "from importlib import metadata\n"
        "real = metadata.version\n"
        "metadata.version = lambda name: '7.0' if name == 'jax' else real(name)\n"
        "metadata.requires = lambda name: ['jax>=0.9.0']\n"
        "import cairn\n"
        "print(cairn.Checkpointer.__name__, cairn.CheckpointManager.__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=variables(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("expected jax <0.13, found 7.0") == 1


def test_the_documentation_gives_these_ranges():
    page = (ROOT / "docs" / "reference" / "installation.md").read_text(encoding="utf-8")
    rows = []
    for name in sorted(CHECKED):
        specifier = RANGES[name].specifier & SpecifierSet(TESTED.get(name, ""))
        ends = {one.operator: one.version for one in specifier}
        newer = "warns" if name in TESTED else "refuses"
        rows.append(f"| {name} | {ends['>=']} | {ends['<']} | {newer} |")
    table = "\n".join(rows)
    assert f"|---|---|---|---|\n{table}\n" in page
