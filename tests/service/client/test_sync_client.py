"""The client that waits is what the one that is awaited gives."""

import importlib.util
import inspect
import re
import shutil
import subprocess
import sys

import pytest

import cairn
from cairn import AsyncClient, Client
from tests.packaging.conftest import ROOT


def script():
    spec = importlib.util.spec_from_file_location("sync_client", ROOT / "scripts/sync_client.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sync_client = script()


def test_the_files_are_what_their_source_gives_as_the_exit_status_says(capsys):
    assert (sync_client.main(["--check"]), *capsys.readouterr()) == (0, "", "")


@pytest.fixture
def copied(tmp_path):
    """The source and what is made of it, somewhere else."""
    shutil.copytree(sync_client.SOURCE.parent, tmp_path / "client")
    return tmp_path / "client" / "asynchronous"


def test_a_file_that_was_changed_or_lost_or_has_no_source_is_found(copied):
    folder = copied.parent
    changed = (folder / "changes.py").read_text().replace("labels", "marks")
    (folder / "changes.py").write_text(changed)
    (folder / "events.py").unlink()
    (copied / "tensors.py").unlink()
    assert sync_client.differences(copied) == [
        f"{folder}/changes.py: expected what asynchronous/changes.py gives, found another",
        f"{folder}/events.py: expected what asynchronous/events.py gives, found another",
        f"{folder}/tensors.py: expected its source, found none",
    ]


def test_a_change_of_the_source_is_one_of_both(copied):
    source = copied / "connection.py"
    source.write_text(source.read_text().replace("AT_ONCE: Final = 100", "AT_ONCE: Final = 7"))
    made = sync_client.made(copied)
    changed = [path for path, text in made.items() if text != path.read_text()]
    assert changed == [copied.parent / "connection.py"]
    assert "AT_ONCE: Final = 7" in made[changed[0]]


def test_nothing_that_is_awaited_is_left():
    paths = [sync_client.SOURCE.parent / one.name for one in sync_client.SOURCE.glob("*.py")]
    made = [path for path in paths if path.name not in sync_client.BY_HAND]
    assert len(made) > 5
    for path in made:
        text = path.read_text()
        assert text.startswith(f"# Made of asynchronous/{path.name} by `python scripts/")
        left = re.findall(r"\b(?:async|await|anyio|aclose|Async\w+|a(?:iter|next)\w*)\b", text)
        assert left == [], path
        assert "event loop" not in text, path


def test_each_says_who_may_share_it():
    assert "between the tasks of one event loop." in AsyncClient.__doc__
    assert "between threads." in Client.__doc__


def methods(kind):
    return {
        name: found
        for name, found in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def signature(function):
    """As the client that waits has it."""
    text = str(inspect.signature(function))
    text = re.sub(r"collections\.abc\.AsyncGenerator\[(\S+), None\]", r"Iterator[\1]", text)
    return text.replace("collections.abc.Iterator", "Iterator").replace(
        "asynchronous.client.AsyncClient", "client.Client"
    )


def test_both_have_the_same_methods_with_the_same_signatures():
    names = {"aclose" if name == "close" else name for name in methods(Client)}
    assert set(methods(AsyncClient)) == names
    for name, awaited in methods(AsyncClient).items():
        waiting = methods(Client)["close" if name == "aclose" else name]
        assert signature(awaited) == signature(waiting), name
        assert inspect.iscoroutinefunction(awaited) or "AsyncGenerator" in str(
            inspect.signature(awaited)
        ), name
    assert (
        inspect.signature(AsyncClient).parameters.keys()
        == inspect.signature(Client).parameters.keys()
    )


def test_both_are_public():
    assert {"AsyncClient", "Client"} <= set(cairn.__all__)


def test_the_client_that_waits_loads_nothing_of_the_other():
    program = (
        "import sys, cairn.service.client.client, cairn.service.client.lookup\n"
        "found = {'anyio', 'asyncio', 'trio', 'cairn.service.client.asynchronous'}\n"
        "print(sorted(found & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
