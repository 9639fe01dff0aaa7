"""Every command that takes a run or a step takes it in every form, and reaches the same one."""

import itertools
import json
import shutil

import pytest

from cairn import Run, Settings, annotate_step, create_app, promote_step
from tests.service.commands import cairn_here, whole_command
from tests.service.servers import serve
from tests.service.stores import make_run
from tests.service.tiny_run import copy_tiny_run

MESH = ("--mesh", "fsdp=1")
STEPS = {
    "annotate": ("{}", "--label", "a=b"),
    "artifacts": ("{}", "--json"),
    "convert": ("{}",),
    "diff": ("{}", "tiny/steps/1"),
    "download": ("{}", "{folder}"),
    "fork": ("{}", "forked"),
    "gather": ("{}",),
    "path": ("{}",),
    "plan": ("{}", *MESH),
    "promote": ("{}", "candidate"),
    "pull": ("{}", "{folder}"),
    "rollback": ("{}",),
    "show": ("{}",),
    "tensors": ("{}",),
    "verify": ("{}",),
}
"""Arguments of the commands that take a step."""
NUMBERED = {"delete": ("{}",), "undelete": ("{}",)}
"""Commands that take a step by its number alone: a name that moves must not decide."""
RUNS = {
    "aliases": ("{}",),
    "checkpoints": ("{}",),
    "gc": ("{}",),
    "prune": ("{}", "--keep-last", "1"),
    "repair": ("{}",),
    "take-over": ("{}", "--attempt", "1"),
    "top": ("{}", "--json"),
    "usage": ("{}",),
    "writer": ("{}",),
}
NEW_RUNS = {"create"}
IN_STORE = {"annotate", "checkpoints", "diff", "path", "plan", "show", "tensors", "usage", "gc"}
"""Commands that read a URI in the store itself."""


class Recorder:
    """An application that records its requests, and refuses changes."""

    def __init__(self, app):
        self.app, self.requests = app, []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.requests.append((scope["method"], scope["path"]))
        if scope["method"] == "GET":
            await self.app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/problem+json")]
        await send({"type": "http.response.start", "status": 409, "headers": headers})
        body = json.dumps({"type": "about:blank", "title": "Refused", "status": 409}).encode()
        await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The root `lab`, whose run `tiny` has the steps 1 and 2; 2 is best and in production."""
    root = tmp_path_factory.mktemp("lab")
    copy_tiny_run(root)
    run = Run.open(root / "tiny")
    annotate_step(run, 2, metrics={"loss": 0.5}, better={"loss": "min"})
    annotate_step(run, 1, metrics={"loss": 1.5})
    promote_step(run, 2, "production", by="me", reason="", expect=None)
    shutil.copytree(root / "tiny", root / "both")
    return root


@pytest.fixture(scope="module")
def served(lab, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    make_run(other / "other", [1])
    make_run(other / "both", [1])
    roots = {"default": str(other), "lab": str(lab)}
    app = create_app(Settings(roots=roots, data_dir=tmp_path_factory.mktemp("data")))
    recorder = Recorder(app)
    with serve(recorder) as url:
        yield url, recorder.requests


@pytest.fixture
def reach(served, tmp_path):
    """Run a command with an address; its last request, its status and its standard output."""
    url, requests = served
    numbers = itertools.count()

    def run(command, arguments, address):
        requests.clear()
        words = [word.format(address, folder=tmp_path / f"{next(numbers)}") for word in arguments]
        done = cairn_here(command, *words, url=url)
        assert "Traceback" not in done.stderr
        return (requests[-1] if requests else None), done

    return run


def commands():
    for name, command in whole_command().commands.items():
        first = next((p for p in command.params if p.param_type_name == "argument"), None)
        if first is not None and first.name in ("run", "runs", "checkpoint", "step"):
            yield name


def test_every_command_that_takes_a_run_or_a_step_is_walked():
    assert {*commands()} == {*STEPS, *NUMBERED, *RUNS, *NEW_RUNS}


@pytest.mark.parametrize("command", sorted({**STEPS, **NUMBERED}))
def test_each_form_of_a_step_reaches_the_same_step(command, lab, reach):
    arguments = {**STEPS, **NUMBERED}[command]
    expected, _ = reach(command, arguments, "lab/tiny/steps/2")
    assert "/roots/lab/runs/tiny/checkpoints/2" in expected[1] or command == "pull"
    forms = ["tiny/steps/2", f"{lab}/tiny/steps/2"]
    if command not in NUMBERED:
        forms += ["lab/tiny@production", "tiny@best:loss:min", f"file://{lab}/tiny@production"]
    local = set()
    for form in forms:
        request, done = reach(command, arguments, form)
        if ("://" not in form and form[0] != "/") or command not in IN_STORE or command == "diff":
            assert request == expected, form
        else:
            assert (request, done.returncode) == (None, 0), done.stderr
            local.add(done.stdout)
    assert len(local) == (1 if command in IN_STORE - {"diff"} else 0)


@pytest.mark.parametrize("command", sorted(RUNS))
def test_each_form_of_a_run_reaches_the_same_run(command, lab, reach):
    expected, named = reach(command, RUNS[command], "lab/tiny")
    assert "/roots/lab/runs/tiny" in expected[1] or command == "top"
    for form in ("tiny", f"file://{lab}/tiny", f"{lab}/tiny"):
        request, done = reach(command, RUNS[command], form)
        assert done.stdout == named.stdout
        assert request == (None if command in IN_STORE and form != "tiny" else expected)
    for step in ("tiny@production", "tiny/steps/2", f"{lab}/tiny/steps/2"):
        _, done = reach(command, RUNS[command], step)
        assert (done.returncode, "a RUN alone" in done.stderr) == (2, True), done.stderr


def test_a_path_without_a_dot_is_told_how_to_write_it(lab, reach, monkeypatch):
    monkeypatch.chdir(lab.parent)
    _, done = reach("checkpoints", ("{}",), f"{lab.name}/tiny")
    assert done.returncode == 3
    assert done.stderr.endswith(f" For a path, write ./{lab.name}/tiny.\n")
    _, done = reach("checkpoints", ("{}",), f"{lab.name}/nothing")
    assert (done.returncode, "For a path" in done.stderr) == (3, False)
    request, done = reach("checkpoints", ("{}",), f"./{lab.name}/tiny")
    assert (request, done.returncode) == (None, 0)
    monkeypatch.chdir(lab)
    done = cairn_here("show", "tiny", url="http://127.0.0.1:9")
    assert (done.returncode, done.stderr.endswith("For a path, write ./tiny.\n")) == (6, True)


def test_a_new_run_is_made_in_the_root_before_its_name(reach):
    assert reach("create", ("{}",), "lab/new")[0] == ("POST", "/v1/roots/lab/runs")
    assert reach("create", ("{}",), "new")[0] == ("POST", "/v1/roots/default/runs")
    _, done = reach("create", ("{}", "--root", "default"), "lab/new")
    assert (done.returncode, "leave out --root default" in done.stderr) == (2, True)


def test_run_of_several_roots_and_of_none_is_told_by_their_names(reach):
    _, done = reach("path", ("{}",), "both")
    assert (done.returncode, "default/both, lab/both" in done.stderr) == (2, True)
    _, done = reach("path", ("{}",), "lab/both")
    assert done.returncode == 0
    _, done = reach("path", ("{}",), "nowhere")
    assert (done.returncode, "'nowhere' in the roots default, lab" in done.stderr) == (3, True)
    _, done = reach("convert", ("{}",), "gs://bucket/runs/tiny")
    assert (done.returncode, "cairn roots add" in done.stderr) == (3, True)
    _, done = reach("path", ("{}", "--root", "default"), "lab/both")
    assert (done.returncode, "Leave out --root default" in done.stderr) == (2, True)
