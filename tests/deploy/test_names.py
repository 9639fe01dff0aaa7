"""Every variable and command that deploy/ names is one that the code has."""

import re
from functools import cache

import pytest

from cairn import Settings
from tests.deploy.repository import (
    COMMANDS_TO_COME,
    DEPLOY,
    ROOT,
    VARIABLES_TO_COME,
    documents,
)
from tests.service.commands import whole_command

VARIABLE = re.compile(r"\bCAIRN_[A-Z][A-Z_]*\b")
FILES = sorted(
    [
        ROOT / "Dockerfile",
        *(path for path in DEPLOY.rglob("*") if path.is_file()),
    ]
)
PAGES = [ROOT / "docs/howto/deploy.md", ROOT / "docs/reference/service/runbooks.md"]
COMMAND = re.compile(r"(?:^|`|-- |\$ )cairn ([a-z][^`\n]*)|run --rm server ([a-z][^`\n]*)", re.M)
FILE = re.compile(r"\bdeploy/[\w./-]*\w")
OF_COMPOSE = {"CAIRN_VERSION"}
"""Filled in by compose, and given to no program."""


@cache
def read_by_the_code():
    """Settings of the server, and what the client and training read of their environment."""
    named = {f"CAIRN_{name.upper()}" for name in Settings.model_fields}
    for package in ("service/client", "storage", "interop", "state"):
        for path in (ROOT / package).rglob("*.py"):
            for line in path.read_text(encoding="utf-8").splitlines():
                if "environ" in line or re.search(r'= "CAIRN_\w+"', line):
                    named |= set(VARIABLE.findall(line))
    return named


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_variable_is_read_by_the_code(path):
    named = set(VARIABLE.findall(path.read_text(encoding="utf-8"))) - OF_COMPOSE
    assert named - read_by_the_code() - VARIABLES_TO_COME == set()


def test_what_is_listed_as_to_come_is_not_there_yet():
    assert read_by_the_code() & VARIABLES_TO_COME == set(), "delete these from VARIABLES_TO_COME"
    assert set(commands()) & COMMANDS_TO_COME == set(), "delete these from COMMANDS_TO_COME"


def commands():
    """The commands of `cairn`, as words."""

    def walk(group, words):
        for name, found in group.commands.items():
            if hasattr(found, "commands"):
                yield from walk(found, (*words, name))
            if not hasattr(found, "commands") or found.invoke_without_command:
                yield (*words, name)

    return list(walk(whole_command(), ()))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_command_variable_and_file_of_a_page_is_there(page):
    text = page.read_text(encoding="utf-8")
    there = {*commands(), *COMMANDS_TO_COME}
    said = ["".join(found).split() for found in COMMAND.findall(text)]
    assert said
    wrong = [one for one in said if not {tuple(one[:1]), tuple(one[:2])} & there]
    assert wrong == []
    assert set(VARIABLE.findall(text)) - OF_COMPOSE - read_by_the_code() <= VARIABLES_TO_COME
    missing = {name for name in FILE.findall(text) if not (ROOT / name).exists()}
    assert missing <= {"deploy/.env"}


def begun():
    """What the containers run, by where it is said."""
    (compose,) = documents(DEPLOY / "compose.yaml")
    for name, one in compose["services"].items():
        if one["image"].startswith("cairn-") and "command" in one:
            yield f"compose {name}", tuple(one["command"])
    for path in (DEPLOY / "kubernetes").rglob("*.yaml"):
        for found in re.findall(r"^\s+args: \[(.*)\]$", path.read_text(encoding="utf-8"), re.M):
            yield path.name, tuple(word.strip() for word in found.split(","))


def test_every_container_runs_a_command_that_is_there():
    there = {*commands(), *COMMANDS_TO_COME}
    assert len(list(begun())) >= 4
    assert [(place, words) for place, words in begun() if words not in there] == []
