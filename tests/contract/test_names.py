"""The contract's list: every row has a test, the test exists, and it speaks of what it tests."""

import ast
import inspect
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import cairn
from cairn import SaveHandle
from cairn.state.states.load_options import LoadOptions

HERE = Path(__file__).parent
TESTS = HERE.parent


@dataclass(frozen=True)
class Row:
    """One name of the contract.

    `section` is A (EasyDeLState), B (TrainState), C (EDPretrainedModel) or D (EasyDeLBaseModule).
    """

    section: str
    owner: str
    kind: str
    name: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.section} {self.owner} {self.kind}: {self.name}"

    @property
    def word(self) -> str:
        """What a test of this row must mention: `enable` for `enable=False`."""
        return self.name if self.name.startswith('"') else self.name.partition("=")[0]


def read_rows() -> list[Row]:
    data = tomllib.loads((HERE / "names.toml").read_text())
    rows = []
    for section, owners in data.items():
        for owner, kinds in owners.items():
            for kind, names in kinds.items():
                for name, tests in names.items():
                    listed = (tests,) if isinstance(tests, str) else tuple(tests)
                    rows.append(Row(section, owner, kind, name, listed))
    return rows


ROWS = read_rows()


@cache
def collected_from(file: str) -> dict[str, str]:
    """The tests that pytest collects from a file, and their source with their decorators."""
    path = TESTS / file
    if not (path.is_file() and path.name.startswith("test_")):
        return {}
    text = path.read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def problem_of(row: Row) -> str | None:
    """Why a row does not count as tested; None if it does."""
    if not row.tests:
        return f"{row}: has no test"
    word = re.compile(rf"(?<!\w){re.escape(row.word)}(?!\w)")
    for test in row.tests:
        file, _, name = test.partition("::")
        source = collected_from(file).get(name)
        if source is None:
            return f"{row}: {test} does not exist"
        if not word.search(source):
            return f"{row}: {test} does not mention {row.word}"
    return None


def test_every_row_has_a_test_that_exists_and_mentions_it():
    problems = [problem for row in ROWS if (problem := problem_of(row)) is not None]
    print(f"contract rows: {len(ROWS)}, tested: {len(ROWS) - len(problems)}")
    assert not problems, "\n".join(problems)


def test_no_row_is_listed_twice():
    keys = [(row.section, row.owner, row.name) for row in ROWS if row.kind != "returns"]
    assert len(keys) == len(set(keys))


LISTED_ONCE = test_no_row_is_listed_twice.__name__


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (Row("A", "EasyDeLState", "fields", "step", ()), "has no test"),
        (Row("A", "EasyDeLState", "fields", "step", ("contract/test_no.py::test_a",)), "not exist"),
        (
            Row("A", "E", "fields", "no_such", (f"contract/{Path(__file__).name}::{LISTED_ONCE}",)),
            "does not mention no_such",
        ),
    ],
)
def test_a_row_without_a_proper_test_is_found_out(broken, why):
    assert why in problem_of(broken)


def owner_of(row: Row) -> Any:
    """The callable or class that a row's owner names."""
    if row.owner == "SaveHandle":
        return SaveHandle
    found: Any = cairn
    for part in row.owner.split("."):
        found = getattr(found, part)
    return found


ARGUMENTS = [row for row in ROWS if row.kind == "arguments"]
RENAMED = {"dir": "save_directory"}


@pytest.mark.parametrize("row", ARGUMENTS, ids=str)
def test_an_argument_of_the_contract_is_one_of_the_signature(row):
    parameters = inspect.signature(owner_of(row)).parameters
    name = RENAMED.get(row.name, row.name)
    if row.owner == "EasyDeLState.load_state" and name not in parameters:
        assert name in inspect.signature(LoadOptions).parameters
    else:
        assert name in parameters
