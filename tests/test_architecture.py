"""The page that says how Cairn is built says what the contracts hold."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]["contracts"]
BLOCK = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PACKAGES = ("storage", "interop", "state", "service")
LISTS = ("known", "versions")
"""Folders of files that are all of one kind and found by their names: families, migrations."""


def layers(container):
    (found,) = (one["layers"] for one in CONTRACTS if one.get("containers") == [container])
    return found


def drawn():
    """The diagrams: what each line begins with, up to the first gap."""
    return [
        [re.split(r" {2,}", line)[0] for line in block.splitlines() if line.strip(" |")]
        for block in BLOCK.findall(PAGE)
    ]


def test_each_diagram_shows_the_layers_of_a_contract_in_their_order():
    packages = ("cairn", "cairn.storage", "cairn.interop", "cairn.state", "cairn.service")
    assert drawn() == [layers(package) for package in packages]


def rooms():
    return sorted(
        path.parent
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
        if path.parent.name not in LISTS and path.parent != ROOT / package
    )


def test_every_room_says_what_it_is_for():
    for room in rooms():
        purpose = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
        assert purpose, room
        assert purpose.splitlines()[0].endswith("."), room


def test_every_folder_of_a_package_is_in_a_contract_of_layers():
    for package in PACKAGES:
        named = {one for layer in layers(f"cairn.{package}") for one in layer.split(" | ")}
        folders = {room.name for room in rooms() if room.parent == ROOT / package}
        assert folders <= named


def test_the_files_that_the_page_sends_readers_to_are_there():
    paths = re.findall(r"`((?:service|state|interop|storage)/[\w/.]*)`", PAGE)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


BELOW_THE_VERBS = {
    "AliasWriter", "begin_attempt", "counting", "create_attempt", "declare", "lay_tombstone",
    "lift", "publish_manifest", "release", "renew", "withdraw",
}  # fmt: skip
"""Functions of the run protocol for its own verbs alone: they keep no rule by themselves."""


def test_only_the_run_protocol_calls_what_lies_below_its_verbs():
    protocol, files = ROOT / "storage/runs", set()
    defined = {
        node.name
        for path in protocol.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert defined >= BELOW_THE_VERBS
    for package in PACKAGES:
        files |= set((ROOT / package).rglob("*.py"))
    imported = {
        (path.relative_to(ROOT).as_posix(), name.name)
        for path in files
        if protocol not in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cairn.storage.runs")
        for name in node.names
    }
    assert not {(path, name) for path, name in imported if name in BELOW_THE_VERBS}
