"""What is used of libraries that is private: three files, and what they rely on (ADR 16)."""

import ast
import atexit
import concurrent.futures.thread
import functools
import inspect
import threading
from pathlib import Path

import jax
import pytest

from cairn.state.checkpointing import exit_guard
from tests.state.seams import coordination

ROOT = Path(__file__).parents[3]
SOURCES = [
    path
    for folder in ("interop", "service", "state", "storage")
    for path in (ROOT / folder).rglob("*.py")
]
PUBLIC = {"os._exit"}
ALLOWED = {
    # And `dbos._background_jobs_stop_event`: ADR 26, and `tests/service/test_waker.py`.
    "service/jobs/dbos_engine/waker.py": {"event.__class__ = _Wakeable"},
    "state/checkpointing/processes/coordination.py": {"orbax.checkpoint._src.futures"},
    "state/checkpointing/exit_guard.py": {"threading._register_atexit", "atexit._run_exitfuncs"},
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def imported(tree):
    """The name of each module that is imported, and of what it stands for in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", alias.asname or alias.name


def parsed(text):
    """CPython 3.11 loses count of its depth if another thread parses meanwhile: then once more."""
    try:
        return ast.parse(text)
    except SystemError:
        return ast.parse(text)


def private_uses(path):
    """Underscored modules and attributes of modules that are not ours."""
    tree = parsed(path.read_text())
    foreign = {}
    for module, name in imported(tree):
        if module.startswith("cairn."):
            continue
        foreign[name] = module
        parts = module.split(".")
        if any(map(is_private, parts)):
            yield ".".join(parts[:-1]) if not is_private(parts[-1]) else module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            text = ast.unparse(node)
            if isinstance(owner, ast.Name) and owner.id in foreign and text not in PUBLIC:
                yield text
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr == "__class__":
                    yield ast.unparse(node)


def test_three_files_use_what_is_private_and_no_other():
    found = {
        path.relative_to(ROOT).as_posix(): uses
        for path in SOURCES
        if (uses := set(private_uses(path)))
    }
    assert found == ALLOWED


def test_the_scan_finds_what_it_looks_for(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(
        "import jax\nfrom orbax.checkpoint._src.path import async_path\nimport torch._C\n"
        "jax._src.core.thing()\nx.__class__ = int\nself._own = 1\n"
    )
    assert set(private_uses(path)) == {
        "orbax.checkpoint._src.path",
        "torch._C",
        "jax._src",
        "x.__class__ = int",
    }


def test_the_coordination_of_one_process_keeps_keys_and_values():
    shared = coordination()
    shared.key_value_set("cairn/test/a/1", "one")
    shared.key_value_set("cairn/test/a/2", "two")
    assert shared.key_value_try_get("cairn/test/a/1") == "one"
    assert shared.key_value_try_get("cairn/test/b") is None
    assert shared.blocking_key_value_get("cairn/test/a/2", 1) == "two"
    assert sorted(value for _, value in shared.key_value_dir_get("cairn/test/a/")) == ["one", "two"]
    shared.key_value_delete("cairn/test/a/")
    assert shared.key_value_try_get("cairn/test/a/1") is None
    assert jax.process_count() == 1


@pytest.mark.parametrize("owner", [(threading, "_register_atexit"), (atexit, "_run_exitfuncs")])
def test_the_interpreter_has_the_hooks_that_the_exit_guard_uses(owner):
    assert callable(getattr(*owner))


def registered(call):
    """What was registered: Python 3.11 keeps a `partial` of it, later ones a function around it."""
    if isinstance(call, functools.partial):
        return call.func
    return inspect.getclosurevars(call).nonlocals["func"]


def test_executors_are_shut_down_by_the_same_hook():
    """Ours, registered later, runs before theirs; see test_save_process.py for whole programs."""
    calls = [registered(call) for call in threading._threading_atexits]
    executors = calls.index(concurrent.futures.thread._python_exit)
    assert executors < calls.index(exit_guard._close_all)  # the last one runs first
