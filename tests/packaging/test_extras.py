"""Each extra brings what its part needs; where it is missing, one error says which to install."""

import json
import subprocess
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cairn import Client, Settings, create_app
from tests.packaging.conftest import ROOT
from tests.packaging.refusing import EVERY_EXTRA, MODULES, TRAIN, run, variables, without
from tests.service.servers import serve
from tests.service.stores import make_run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("extra", MODULES)
def test_the_modules_of_an_extra_are_those_of_its_requirements(extra):
    names = {Requirement(one).name for one in PROJECT["optional-dependencies"][extra]}
    wanted = {canonicalize_name(name) for name in names - {"cairn-checkpoints"}}
    owners = metadata.packages_distributions()
    brought = {canonicalize_name(name) for module in MODULES[extra] for name in owners[module]}
    assert wanted - brought == set()
    assert [module for module in MODULES[extra] if not owns(wanted, owners[module])] == []


def owns(wanted, owners):
    return bool(wanted & {canonicalize_name(owner) for owner in owners})


def test_every_extra_is_in_all():
    named = PROJECT["optional-dependencies"]
    (everything,) = map(Requirement, named["all"])
    assert everything.extras == set(named) - {"all", "dev", "store"}


@pytest.fixture
def control_plane(tmp_path):
    """The URL of one that has a run with a step."""
    make_run(tmp_path / "store" / "llama", [3])
    settings = Settings(root=str(tmp_path / "store"), data_dir=tmp_path / "data")
    with serve(create_app(settings, jobs=False)) as url:
        yield url


def test_the_client_needs_no_extra(control_plane):
    program = (
        "from cairn import Client, ServiceError, StorageError, parse_uri\n"
        "with Client() as client:\n"
        "    print([(run.name, run.latest_step) for run in client.runs()])\n"
    )
    done = run(without(EVERY_EXTRA, program), CAIRN_URL=control_plane)
    assert done.stdout == "[('llama', 3)]\n", done.stderr


def test_the_command_needs_no_extra(control_plane):
    done = run(without(EVERY_EXTRA), "checkpoints", "llama", "--url", control_plane)
    assert done.returncode == 0, done.stderr
    assert "3" in done.stdout


def test_doctor_of_a_client_looks_at_no_store_and_no_database(control_plane):
    done = run(without(EVERY_EXTRA), "doctor", "--json", "--url", control_plane)
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert "not installed here" in findings["control plane"]["found"]
    assert "pip install" not in findings["control plane"]["found"]
    assert "Of the store" not in done.stderr
    assert not {"catalog", "keys", "root default"} & findings.keys()
    failed = [name for name, finding in findings.items() if finding["outcome"] == "fail"]
    assert failed == ["server"]  # this one has no jobs


HELP = """
from cairn.service.command.cli import main
for words in ([], ["serve"], ["gc"], ["verify"], ["index", "rebuild"]):
    sys.argv[1:] = [*words, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
    print("\f", *words)
"""


def test_help_needs_no_extra():
    done = run(without(EVERY_EXTRA, HELP))
    assert done.returncode == 0, done.stderr
    *texts, rest = done.stdout.split("\f")
    assert len(texts) == 5
    assert [text for text in texts if "--help" not in text] == []
    assert rest == " index rebuild\n"


def test_the_control_plane_serves_without_the_packages_of_training(tmp_path):
    make_run(tmp_path / "store" / "llama", [3])
    command = [*without(TRAIN), "serve", "--root", str(tmp_path / "store"), "--port", "0"]
    environment = variables(CAIRN_DATA_DIR=str(tmp_path / "data"))
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        url = next(line.split()[1] for line in server.stdout if line.startswith("cairn: http"))
        with Client(url) as client:
            assert client.ready()
            assert [run.name for run in client.runs()] == ["llama"]
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0


NAMES = {
    "EasyDeLState": "train",
    "TrainState": "train",
    "DecoderForCausalLM": "train",
    "Checkpointer": "train",
    "create_app": "server",
    "Run": "store",
    "CheckpointReader": "store",
}
IMPORTS = """
import traceback
for name in sys.argv[1:]:
    try:
        exec(f"from cairn import {name}")
    except Exception:
        print(traceback.format_exc(), end="\f")
"""


def test_a_name_that_needs_an_extra_says_which():
    done = run(without(EVERY_EXTRA, IMPORTS), *NAMES)
    assert done.returncode == 0, done.stderr
    *traces, rest = done.stdout.split("\f")
    assert rest == ""
    for (name, extra), trace in zip(NAMES.items(), traces, strict=True):
        (error,) = [line for line in trace.splitlines() if "Error: " in line]
        told = f"cairn.installation.InstallationError: cairn.{name}: expected the "
        assert error.startswith(told)
        assert error.endswith(f"Install it: pip install 'cairn-checkpoints[{extra}]'")
        assert trace.count("Traceback") == 1


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["serve"], "server"),
        (["path", "./runs/llama"], "store"),
    ],
)
def test_a_command_that_needs_an_extra_says_which_in_a_line(arguments, extra, tmp_path):
    done = run(without(EVERY_EXTRA), *arguments, CAIRN_DATA_DIR=str(tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"cairn: cairn {arguments[0]}: expected the extra `{extra}`")
    assert line.endswith(f"Install it: pip install 'cairn-checkpoints[{extra}]'")


def test_a_run_in_s3_without_its_extra_says_so_before_any_request():
    done = run(without(["botocore"], "from cairn import Run\nRun.create('s3://bucket/run')\n"))
    assert done.stderr.splitlines()[-1].endswith("Install it: pip install 'cairn-checkpoints[s3]'.")


def test_a_module_that_no_extra_brings_is_reported_as_python_does():
    done = run(without(["scipy", "google_auth", "pydantic"], "from cairn import Run\n"))
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'pydantic'"
