"""The documentation is complete, and its code runs as it stands."""

import importlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

import cairn
from cairn import Settings
from cairn.service.dashboard.routers import ROUTERS as PAGES
from cairn.service.routes import health, metrics
from tests.devices import xla_flags
from tests.programs.commands import commands
from tests.programs.program import run as run_program
from tests.service.commands import MEANINGS, whole_command
from tests.service.seams import ROUTERS

DOCS = Path(__file__).parents[1] / "docs"
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r'^```python title="([\w.]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
OWN_TESTS = {"howto/back-up.md": "tests/service/test_backup.py"}  # what it backs up is there only
NOTEBOOKS = {"tutorial/first-run.md"}  # tests/documentation/test_notebook_cells.py
RUNNABLE = re.compile(r'^```(sh|python|python title="[\w.]+")$', re.MULTILINE)
RUN = sorted(
    name
    for path in DOCS.rglob("*.md")
    if (name := path.relative_to(DOCS).as_posix()) not in {*OWN_TESTS, *NOTEBOOKS}
    and RUNNABLE.search(path.read_text(encoding="utf-8"))
)
LONG = {
    "howto/disaster-recovery.md": "tests/service/command/test_cli.py",
    "howto/export-to-pytorch.md": "tests/test_main_job.py",
    "howto/find-checkpoints.md": "tests/service/command/test_lists_cli.py",
    "howto/lora-and-qlora.md": "tests/state/adapters/test_lora.py",
    "howto/look-inside.md": "tests/service/command/test_tensors_cli.py",
    "howto/many-processes.md": "tests/multi_process/test_restore_elsewhere.py",
    "howto/observe.md": "tests/service/observability/test_tracing.py",
    "howto/plan-a-mesh.md": "tests/service/command/test_plan_cli.py",
    "howto/policies.md": "tests/service/test_policies.py",
    "howto/promote.md": "tests/service/command/test_cli.py",
    "howto/python-client.md": "tests/service/client/test_client.py",
    "howto/quantize.md": "tests/state/adapters/test_quantization.py",
    "howto/restore-on-other-devices.md": "tests/state/states/test_load_placement.py",
    "howto/retention-and-cost.md": "tests/service/command/test_retention_cli.py",
    "howto/roots-and-runs.md": "tests/service/command/test_roots_cli.py",
    "howto/use-linen-or-equinox.md": "tests/examples/test_examples.py",  # linen_train_state
    "howto/webhooks.md": "tests/service/command/test_webhooks_cli.py",
    "howto/your-own-loop.md": "tests/examples/test_examples.py",  # own_module
    "migration/easydel.md": "tests/state/hub/test_easydel_folder.py",
    "migration/flax-checkpoints.md": "tests/storage/orbax_import/test_adopt.py",
    "migration/plain-orbax.md": "tests/storage/orbax_import/test_adopt.py",
}
"""Pages that take seconds of processor, which `make proofs` runs (`test_long_pages.py`), and what
calls the same in `make test`, where of each kind of page one is left: with servers, commands,
files."""


def documented():
    """The objects that the reference describes."""
    names = [
        name
        for page in sorted((DOCS / "reference").rglob("*.md"))
        for name in DIRECTIVE.findall(page.read_text(encoding="utf-8"))
    ]
    found = {}
    for name in names:
        module, _, attribute = name.rpartition(".")
        found[name] = getattr(importlib.import_module(module), attribute)
    return found


def test_every_public_name_is_in_the_reference_as_users_import_it():
    assert [name for name in cairn.__all__ if f"cairn.{name}" not in documented()] == []


def test_no_name_is_in_the_reference_twice():
    names = [name.rpartition(".")[2] for name in documented()]
    assert len(names) == len(set(names))


@pytest.fixture(scope="module")
def generated():
    hooks = str(DOCS / "hooks")
    sys.path.insert(0, hooks)
    try:
        return importlib.import_module("generated_pages").generated_pages()
    finally:
        sys.path.remove(hooks)


def test_every_route_is_in_the_reference(generated):
    page = generated["reference/service/http.md"]
    prefixed = [("/v1", router) for router in ROUTERS] + [("", health.router), ("", metrics.router)]
    routes = [
        f"{method} {prefix}{route.path_format}"
        for prefix, router in prefixed
        for route in router.routes
        for method in route.methods - {"HEAD"}  # a GET without its body
    ]
    assert len(routes) > 20
    assert [route for route in routes if f"\n{route}\n" not in page] == []
    shown = [route.path for router in PAGES for route in router.routes if "GET" in route.methods]
    assert [path for path in shown if f"`{path}`" not in page] == []


def test_every_command_and_option_is_in_the_reference(generated):
    def walk(group, words):
        for name, found in group.commands.items():
            if hasattr(found, "commands"):
                yield from walk(found, [*words, name])
            if getattr(found, "invoke_without_command", True):
                yield " ".join([*words, name]), found

    page = generated["reference/service/command.md"]
    sections = {part.split("\n", 1)[0]: part for part in page.split("\n## ")}
    commands = dict(walk(whole_command(), ["cairn"]))
    assert {"cairn workers", "cairn workers take-over", "cairn doctor"} <= set(commands)
    sections["cairn"] = page.split("\n## ")[0]
    commands["cairn"] = whole_command()
    missing = []
    for name, found in commands.items():
        for parameter in found.params:
            shown = parameter.metavar if parameter.param_type_name == "argument" else None
            if f"`{shown or parameter.opts[0]}" not in sections.get(name, ""):
                missing.append((name, parameter.name))
    assert missing == []


def test_every_exit_status_is_in_the_reference(generated):
    page = generated["reference/service/command.md"]
    rows = [f"| {status:d} | {text} |" for status, text in MEANINGS.items()]
    assert [row for row in rows if row not in page] == []


def test_every_setting_is_in_the_reference(generated):
    page = generated["reference/service/settings.md"]
    missing = [name for name in Settings.model_fields if f"`CAIRN_{name.upper()}`" not in page]
    assert missing == []


def test_every_page_is_in_the_navigation():
    # The files' own loader knows tags that plain YAML does not; ours uses none of them.
    tree = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))

    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        inner = entry.values() if isinstance(entry, dict) else entry
        return [leaf for one in inner for leaf in leaves(one)]

    entries = leaves(tree["nav"])
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"README.md"}
    made = {f"reference/service/{name}.md" for name in ("command", "http", "settings")}
    patterns = [entry for entry in entries if "*" in entry]
    matched = {path.relative_to(DOCS).as_posix() for one in patterns for path in DOCS.glob(one)}
    assert (set(entries) - set(patterns)) | matched == there | made


def blocks(page):
    """The code of a page: (language, text) in order."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def environment(folder):
    """What the documentation's programs run in: this interpreter's commands, own ports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    return {
        **os.environ,
        "XLA_FLAGS": xla_flags(),  # a page says for itself on which devices it runs
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COORDINATOR": coordinator,
        "CAIRN_PORT": str(port),
        "CAIRN_URL": f"http://127.0.0.1:{port}",
        "CAIRN_DATA_DIR": str(folder / "databases"),
    }


def run(arguments, folder, variables):
    result = subprocess.run(
        arguments, cwd=folder, env=variables, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, f"{arguments[-1]}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.parametrize("name", [name for name in RUN if name not in LONG])
def test_code_of_a_page_runs(name, tmp_path):
    run_page(name, tmp_path)


def test_pages_that_take_long_have_code_whose_parts_are_tested_elsewhere():
    assert {*LONG} <= {*RUN}
    assert [test for test in LONG.values() if not (DOCS.parent / test).is_file()] == []


def run_page(name, tmp_path):
    """Named blocks are files; commands use them; the other Python blocks are one program."""
    page = DOCS / name
    files = FILE.findall(page.read_text(encoding="utf-8"))
    found = blocks(page)
    assert found
    for file, text in files:
        (tmp_path / file).write_text(text, encoding="utf-8")
    variables = environment(tmp_path)
    with TemporaryDirectory() as folder, commands(Path(folder)) as forked:
        variables["PATH"] = f"{forked}{os.pathsep}{variables['PATH']}"
        for language, text in found:
            if language == "sh":
                run(["bash", "-euc", text], tmp_path, variables)
    program = "\n".join(text for language, text in found if language == "python")
    done = run_program(["-c", program], cwd=tmp_path, env=variables)
    assert done.returncode == 0, f"{program}\n{done.stdout}\n{done.stderr}"
