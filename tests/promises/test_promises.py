"""Every promise has a test that holds it, and every entry names a promise and a test that exist.

The promises are counted where they are made: names of the contract, classes of errors, refusals of
the run protocol, routes and pages of the application, commands. `promises.toml`, and for the
contract `contract/names.toml`, say which test fails when one is broken. Tests are found by reading
their files, not by importing them.
"""

import ast
import dataclasses
import importlib
import inspect
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import cairn

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PROMISES = tomllib.loads(Path(__file__).with_name("promises.toml").read_text(encoding="utf-8"))
CONTRACT = tomllib.loads((TESTS / "contract/names.toml").read_text(encoding="utf-8"))
PACKAGES = ("storage", "interop", "state", "service")

Entries = Mapping[str, tuple[str, ...]]
"""Name of a promise, or a pattern of names -> the ids of the tests that hold it."""


def entries(kind: str) -> Entries:
    section = PROMISES[kind]
    if kind == "guards":
        section = {name: guard["tests"] for name, guard in section.items()}
    listed = {key: (ids,) if isinstance(ids, str) else tuple(ids) for key, ids in section.items()}
    if kind == "contract":
        listed |= {f"{row.owner}.{row.name}": row.tests for row in contract_rows()}
    return listed


# ---- What is promised -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ContractRow:
    """One line of `contract/names.toml`."""

    owner: str
    kind: str
    name: str
    tests: tuple[str, ...]


@cache
def contract_rows() -> list[ContractRow]:
    return [
        ContractRow(owner, kind, name, (ids,) if isinstance(ids, str) else tuple(ids))
        for owners in CONTRACT.values()
        for owner, kinds in owners.items()
        for kind, names in kinds.items()
        for name, ids in names.items()
    ]


CONTRACT_CLASSES = (
    *("EasyDeLState", "TrainState", "TrainStep", "EDPretrainedModel", "EDPretrainedConfig"),
    *("AutoEasyDeLConfig", "EasyDeLBaseModule", "LossConfig", "SaveHandle"),
)
"""Classes of the contract whose public members, and the arguments of these, are promises."""


def contract() -> set[str]:
    """Public members of the contract's classes, and the arguments of its functions."""
    promised = set()
    for name in CONTRACT_CLASSES:
        cls = getattr(cairn, name)
        promised |= {f"{name}.{member}" for member in members(cls)}
    for owner in {row.owner for row in contract_rows() if "." in row.owner}:
        name, _, member = owner.partition(".")
        signature = inspect.signature(getattr(getattr(cairn, name), member))
        promised |= {f"{owner}.{argument}" for argument in signature.parameters}
    return {name for name in promised if not name.endswith((".self", ".cls"))}


def members(cls: type) -> set[str]:
    """Public members that the class has from us, with the fields that a dataclass has."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("cairn.")]
    names = {name for base in ours for name in vars(base) if not name.startswith("_")}
    if dataclasses.is_dataclass(cls):
        names |= {field.name for field in dataclasses.fields(cls)}
    return names


def errors() -> set[str]:
    """Classes of the files of errors, and those that `cairn` exports."""
    classes = [getattr(cairn, name) for name in cairn.__all__ if name.endswith("Error")]
    for package in PACKAGES:
        for path in (ROOT / package).rglob("errors.py"):
            name = ".".join(("cairn", *path.relative_to(ROOT).with_suffix("").parts))
            module = importlib.import_module(name)
            classes += [kind for kind in vars(module).values() if inspect.isclass(kind)]
    public = {
        kind
        for kind in classes
        if issubclass(kind, BaseException) and kind.__module__.startswith("cairn.")
    }
    names = {kind.__name__ for kind in public}
    assert len(names) == len(public), "two errors of one name"
    return names


def guards() -> set[str]:
    return set(PROMISES["guards"])


def routes() -> set[str]:
    from cairn.service.app import create_app
    from cairn.service.settings import Settings

    document = create_app(Settings(), jobs=False).openapi()
    return {
        f"{method.upper()} {path}"
        for path, operations in document["paths"].items()
        for method in operations
    }


def pages() -> set[str]:
    from cairn.service.dashboard.routers import OPEN_ROUTERS, ROUTERS

    return {
        f"{method} {route.path}"
        for router in (*ROUTERS, *OPEN_ROUTERS)
        for route in router.routes
        for method in route.methods
    }


def commands() -> set[str]:
    import typer

    from cairn.service.command.cli import app

    def walk(command: Any, words: str) -> Iterator[str]:
        subcommands = getattr(command, "commands", {})
        if not subcommands or command.invoke_without_command:
            yield words
        for name, subcommand in subcommands.items():
            yield from walk(subcommand, f"{words} {name}")

    return set(walk(typer.main.get_command(app), "cairn"))


KINDS = {
    "contract": contract,
    "errors": errors,
    "guards": guards,
    "routes": routes,
    "pages": pages,
    "commands": commands,
}

# ---- What is wrong with the entries -----------------------------------------------------------


def unlisted(promised: Iterable[str], listed: Entries) -> list[str]:
    return sorted(
        name for name in promised if not any(fnmatchcase(name, pattern(key)) for key in listed)
    )


def unpromised(promised: Iterable[str], listed: Entries) -> list[str]:
    names = list(promised)
    return sorted(
        key for key in listed if not any(fnmatchcase(name, pattern(key)) for name in names)
    )


def pattern(key: str) -> str:
    """The key with `*` as its only sign of a pattern."""
    return key.replace("[", "[[]")


@cache
def definitions(path: Path) -> set[str]:
    """Functions and classes of a file, by their names with those around them."""
    names: set[str] = set()

    def walk(node: ast.AST, around: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(f"{around}{child.name}")
                walk(child, f"{around}{child.name}.")
            else:
                walk(child, around)

    if path.is_file():
        walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return names


def missing_tests(ids: Iterable[str]) -> list[str]:
    """Ids of tests that do not exist. Words in brackets, as pytest has them, are of the file."""
    missing = []
    for test in ids:
        path, _, name = test.partition("::")
        name, _, parameters = name.partition("[")
        tests = {key for key in definitions(TESTS / path) if key.startswith("test_")}
        words = [word for word in parameters.rstrip("]").split("-") if word]
        if (
            not Path(path).name.startswith("test_")
            or not (name in tests if name else tests)
            or any(word not in definitions(TESTS / path) for word in words)
        ):
            missing.append(test)
    return missing


# ---- The checks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_promise_has_an_entry_and_every_entry_a_promise(kind):
    promised, listed = KINDS[kind](), entries(kind)
    assert promised
    assert unlisted(promised, listed) == []
    if kind == "contract":  # of its rows: see below
        listed = dict.fromkeys(PROMISES["contract"], ())
    assert unpromised(promised, listed) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_names_tests_that_exist(kind):
    listed = entries(kind)
    assert [key for key, ids in listed.items() if not ids] == []
    assert missing_tests(sorted({test for ids in listed.values() for test in ids})) == []


FOREIGN = {
    *("state.struct", "state.nnx.Module", "state.nnx.bridge", "TrainState.EasyDeLState"),
    *("EasyDeLState.jax.jit", "EasyDeLState.jax.grad", "EasyDeLState.jax.eval_shape"),
    *("EasyDeLState.LoRAParam", "EasyDeLState.ShapeDtypeStruct", "EasyDeLState.to_state"),
    *("EasyDeLState.transformers", "SaveHandle.step", "SaveHandle.uri"),
    *("EasyDeLBaseModule.config", "EasyDeLBaseModule.load_state", "EasyDeLBaseModule.peft"),
    *("EasyDeLBaseModule.labels", "EasyDeLBaseModule.outputs.loss"),
    *("EasyDeLBaseModule.load_state_dict", "EasyDeLBaseModule.strict=True"),
    *("EasyDeLBaseModule.transformers", "EasyDeLBaseModule.HF_ENDPOINT"),
}
"""Rows of the contract that are no member of their class: of other libraries, or of instances."""


def test_every_row_of_the_contract_is_of_something_that_is_there():
    absent = set()
    for row in contract_rows():
        if row.kind in ("arguments", "returns", "values", "added_fields", "calls"):
            continue  # of arguments: `contract/test_names.py`
        owner = cairn if row.owner == "state" else getattr(cairn, row.owner)
        names = members(owner) if inspect.isclass(owner) else set()
        if row.name not in names and not hasattr(owner, row.name):
            absent.add(f"{row.owner}.{row.name}")
    assert absent == FOREIGN


REFUSALS = {
    *("FencedError", "LeaseHeldError", "PreconditionFailedError", "RecordNotLostError"),
    *("StepChangedError", "StepDamagedError", "StepExistsError", "StepInFlightError"),
    "StepInUseError",
}
"""Errors by which the run protocol refuses what would break it."""


def refusals(path: Path) -> set[str]:
    """Functions of a file that make one of these errors, by their names with those around them."""
    names = set()

    def walk(node: ast.AST, around: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                walk(child, f"{around}.{child.name}".lstrip("."))
            else:
                if isinstance(child, ast.Call) and getattr(child.func, "id", "") in REFUSALS:
                    names.add(f"{path.relative_to(ROOT)}::{around}")
                walk(child, around)

    walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return names


def test_every_refusal_of_the_run_protocol_is_a_guard():
    places = {place for guard in PROMISES["guards"].values() for place in guard["at"]}
    files = sorted((ROOT / "storage/runs").rglob("*.py"))
    promised = {place for path in files for place in refusals(path)}
    assert len(promised) > 20
    assert sorted(promised - places) == []


def test_every_guard_stands_where_its_entry_says():
    gone = []
    for name, guard in PROMISES["guards"].items():
        assert guard["rule"].endswith("."), name
        for place in guard["at"]:
            path, _, function = place.partition("::")
            functions = definitions(ROOT / path)
            if not (function in functions if function else functions):
                gone.append(f"{name}: {place}")
    assert gone == []


def test_every_safeguard_that_the_search_takes_away_is_of_a_guard():
    file = "storage/runs/test_protocol.py"
    taken = {name for name in definitions(TESTS / file) if name.startswith("without_")}
    ids = " ".join(test for tests in entries("guards").values() for test in tests)
    assert taken
    assert sorted(name for name in taken if f"[{name}-" not in ids) == []


@pytest.mark.parametrize(
    ("test", "is_there"),
    [
        ("promises/test_promises.py::test_a_test_that_is_not_there_is_seen", True),
        ("promises/test_promises.py", True),
        ("promises/test_promises.py::test_none", False),
        ("promises/test_promises.py::members", False),
        ("promises/test_none.py", False),
        ("promises/__init__.py", False),
        ("storage/runs/test_protocol.py::test_no_interleaving_breaks_a_promise[a_rollback]", True),
        ("storage/runs/test_protocol.py::test_no_interleaving_breaks_a_promise[nothing]", False),
    ],
)
def test_a_test_that_is_not_there_is_seen(test, is_there):
    assert missing_tests([test]) == ([] if is_there else [test])


def test_a_promise_without_an_entry_and_an_entry_without_a_promise_are_seen():
    listed = {"GET /a/*": ("x",), "GET /b[1]": ("x",), "GET /gone": ("x",)}
    promised = ["GET /a/1", "GET /b[1]", "GET /new"]
    assert unlisted(promised, listed) == ["GET /new"]
    assert unpromised(promised, listed) == ["GET /gone"]
