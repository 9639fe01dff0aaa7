"""A release: distributions that an index takes, one version, its materials, and workflows."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser

import pytest
import yaml

from tests.conftest import ATTACKS, PROOFS
from tests.packaging.conftest import ROOT, script

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = PROJECT["version"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
COPIES = {
    "Dockerfile": r"^ARG VERSION=(\S+)$|--tag cairn-\w+:(\S+) ",
    "deploy/.env.example": r"^CAIRN_VERSION=(\S+)$",
    "deploy/compose.yaml": r"CAIRN_VERSION:-([^}]+)\}",
    "deploy/kubernetes/overlays/example/common/kustomization.yaml": r"newTag: ([^}]+)\}",
    "docs/howto/deploy.md": r"cairn-(?:server|worker):(\S+)",
    "docs/howto/install.md": r"cairn_checkpoints-(.+?)-py3",
}
"""Files that can't ask pyproject.toml, and where they have the version."""


def test_an_index_would_take_both_distributions(wheel, sdist):
    command = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_wheel_installs_into_an_empty_environment_and_runs(wheel, tmp_path):
    folder = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=120)
    # What it depends on is this environment's; nothing is fetched by a test.
    (packages,) = folder.glob("lib/python3.*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    command = [str(folder / "bin" / "cairn"), "--version"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"cairn {VERSION}\n", done.stderr


def test_the_version_stands_in_one_place_and_copies_are_equal(wheel):
    for name, pattern in COPIES.items():
        found = re.findall(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        told = {part for one in found for part in ([one] if isinstance(one, str) else one) if part}
        assert told == {VERSION}, name
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        assert HeaderParser().parsestr(archive.read(name).decode())["Version"] == VERSION


def test_the_changelog_says_what_is_to_come_first_and_dates_what_came():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *others = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert first == "Unreleased"
    assert [
        one for one in others if not re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", one)
    ] == []


def test_the_bill_of_materials_has_what_an_extra_brings_and_nothing_else():
    materials = script("materials")
    found = materials.brought_by(["server"])
    assert {"fastapi", "dbos", "numpy", "httpx"} <= set(found)
    assert not {"jax", "torch", "pytest", "cairn-checkpoints"} & set(found)
    bill = materials.bill(found, validate=False)
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "cairn-checkpoints"
    assert bill["metadata"]["component"]["version"] == VERSION
    told = {materials.canonicalize_name(one["name"]): one["version"] for one in bill["components"]}
    assert told == {name: one.version for name, one in found.items()}
    references = {one["bom-ref"] for one in bill["components"]}
    for one in bill["dependencies"]:
        assert set(one.get("dependsOn", [])) <= references


def test_every_package_that_an_installation_brings_says_its_licence():
    materials = script("materials")
    told = {name: materials.licence(one) for name, one in materials.brought_by(["all"]).items()}
    assert len(told) > 80
    assert [name for name, one in told.items() if one == materials.UNTOLD] == []
    strong = [name for name, one in told.items() if re.search(r"\bA?GPL", one)]
    assert strong == [], "see whether its terms fit, and say so here"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_no_more_rights_than_it_says(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 120, name
        rights = job.get("permissions", {})
        assert set(rights) <= {"id-token", "contents", "pages", "attestations"}, name
        if "write" in rights.values():
            assert "environment" in job, f"{name}: whoever may write is asked first"


def test_a_release_is_published_by_trust_and_not_by_a_password():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert {"build", "install"} <= set(jobs["publish"]["needs"])
    assert "secrets." not in text
    assert not re.search(r"^\s*(password|user|repository-url):", text, re.MULTILINE)


def test_make_and_hooks_run_the_same_checks():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"] for repo in hooks["repos"] for hook in repo["hooks"]]
    checked = (ROOT / "Makefile").read_text(encoding="utf-8")
    for entry in entries:
        program = entry.removeprefix(".venv/bin/").split()[0]
        assert f"$(BIN)/{program}" in checked, f"{entry}: no part of make"
    assert {repo["repo"] for repo in hooks["repos"]} == {"local"}


def test_what_make_test_leaves_out_is_what_make_proofs_names_and_ci_runs_both():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (named,) = re.findall(r"^PROOFS = (.*)$", makefile, re.MULTILINE)
    assert named.split() == list(PROOFS)
    (attacks,) = re.findall(r"^ATTACKS = (.*)$", makefile, re.MULTILINE)
    assert attacks.split() == list(ATTACKS)
    assert [name for name in (*PROOFS, *ATTACKS) if not (ROOT / name).is_file()] == []
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    commands = [
        step.get("run") for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]
    ]
    assert {"make test", "make proofs"} <= set(commands)
