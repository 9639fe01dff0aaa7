"""`--json`: what each command prints for programs, in the shapes of the API."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from cairn import Run, delete_step
from cairn.storage.runs.records.layout import alias_file
from tests.plain_orbax import manager
from tests.programs.program import Program
from tests.service.commands import CAIRN, cairn_here, environment, whole_command
from tests.service.planes import running_plane
from tests.service.seams import schemas
from tests.service.stores import make_run, publish
from tests.service.tiny_run import copy_tiny_run


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("store")
    copy_tiny_run(root)
    make_run(root / "other", [1, 2, 3])
    return root


@pytest.fixture(scope="module")
def url(root, tmp_path_factory):
    with running_plane(root, tmp_path_factory.mktemp("plane")) as (url, _):
        yield url


def document(done: subprocess.CompletedProcess[str], status: int = 0) -> dict:
    assert (done.returncode, done.stderr) == (status, "")
    return json.loads(done.stdout)


def of(kind: type, done: subprocess.CompletedProcess[str]):
    """The document as a body of the API, which it is to the last member."""
    found = document(done)
    body = kind.model_validate(found)
    assert body.model_dump(mode="json") == found
    return body


def states(done: subprocess.CompletedProcess[str]) -> list[schemas.Operation]:
    return [schemas.Operation.model_validate_json(line) for line in done.stdout.splitlines()]


def test_every_command_prints_json_if_asked_to():
    def walk(group, words):
        if getattr(group, "invoke_without_command", True) and words != ["cairn"]:
            yield " ".join(words), {one.name for one in group.params}
        for name, found in getattr(group, "commands", {}).items():
            yield from walk(found, [*words, name])

    commands = dict(walk(whole_command(), ["cairn"]))
    assert len(commands) > 20
    assert [name for name, parameters in commands.items() if "json" not in parameters] == []


def test_lists_are_the_lists_of_the_api(url):
    runs = of(schemas.RunList, cairn_here("runs", "--json", url=url)).runs
    assert [run.name for run in runs] == ["other", "tiny"]
    found = document(cairn_here("checkpoints", "other", "--json", url=url))
    assert found.pop("problems") == []
    listed = schemas.CheckpointList.model_validate(found)
    assert listed.model_dump(mode="json") == found
    assert [one.step for one in listed.checkpoints] == [3, 2, 1]
    workers = of(schemas.WorkerList, cairn_here("workers", "--json", url=url)).workers
    assert [worker.alive for worker in workers] == [True]


def test_damaged_records_of_a_run_are_in_the_list_of_its_checkpoints(url, root):
    run = make_run(root / "amiss", [1, 2])
    (root / "amiss" / "manifests" / "1.1.json").write_text("{")
    found = document(cairn_here("checkpoints", "amiss", "--json", url=url))
    assert [one["step"] for one in found["checkpoints"]] == [2]
    assert "manifests/1.1.json" in found["problems"][0]
    repairs = document(cairn_here("repair", "amiss", "--json", url=url), status=7)
    assert repairs["repairs"][0]["name"] == "manifests/1.1.json"
    assert document(cairn_here("verify", "amiss", "--records", "--json", url=url), status=7) == {
        "steps": [],
        "records": repairs_of(run),
    }


def test_an_alias_that_went_back_is_named_with_the_command_that_puts_it_right(url, root):
    run = make_run(root / "back", [1, 2])
    cairn_here("checkpoints", "back", url=url)
    cairn_here("promote", "back", "1", "production", url=url)
    before = run.objects.read(alias_file("production"))
    cairn_here("promote", "back", "2", "production", url=url)
    run.objects.write(alias_file("production"), before.value)
    told = cairn_here("checkpoints", "back", url=url).stderr
    back, keep = re.findall("`cairn ([^`]+)`", told)
    assert (back, keep) == ("promote back 2 production", "promote back 1 production")
    done = cairn_here(*back.split(), url=url)
    assert done.stdout == "back@production is step 2 (sequence 3)\n"
    assert cairn_here("checkpoints", "back", url=url).stderr == ""


def repairs_of(run: Run) -> dict:
    from cairn.storage.runs.run_check import check_run

    report = check_run(run)
    return {
        "sound": False,
        "count": report.records,
        "problem_count": len(report.problems),
        "problems": list(report.problems),
        "unlisted": list(report.unlisted),
    }


def test_changes_print_what_they_made(url, root):
    make_run(root / "changed", [1, 2, 3])
    alias = of(schemas.Alias, cairn_here("promote", "changed", "1", "good", "--json", url=url))
    assert (alias.alias, alias.step, alias.sequence) == ("good", 1, 1)
    gone = of(schemas.Checkpoint, cairn_here("delete", "changed/steps/2", "--json", url=url))
    assert gone.state is schemas.CheckpointState.TRASHED
    back = of(schemas.Checkpoint, cairn_here("undelete", "changed/steps/2", "--json", url=url))
    assert back.state is schemas.CheckpointState.LISTED
    plan = cairn_here("prune", "changed", "--keep-last", "1", "--json", url=url)
    assert of(schemas.RetentionPlan, plan).delete_count == 1
    folder = document(cairn_here("path", "changed@good", "--json", url=url))
    assert folder == {"path": f"{root}/changed/attempts/1/1"}


def test_a_job_is_its_operation_and_watched_a_line_for_each_state(url):
    started = of(schemas.Operation, cairn_here("gather", "tiny", "--json", url=url))
    done = cairn_here("watch", started.id, "--json", url=url)
    assert (done.returncode, done.stderr) == (0, "")
    last = states(done)[-1]
    assert (last.id, last.state) == (started.id, schemas.OperationState.SUCCEEDED)
    assert Path(last.result["folder"]).is_dir()
    done = cairn_here("fork", "tiny", "again", "--watch", "--json", url=url)
    assert states(done)[-1].result["run"] == "again"
    listed = of(schemas.OperationList, cairn_here("operations", "--json", url=url))
    assert {one.kind.value for one in listed.operations} >= {"gather", "restore"}


def test_what_verify_finds_is_its_document(url):
    found = document(cairn_here("verify", "tiny/steps/1", "--json", url=url))
    assert [(one["step"], one["sound"]) for one in found["steps"]] == [(1, True)]


def test_what_asks_the_store_alone_prints_json_too(root, tmp_path, tmp_path_factory):
    run = make_run(tmp_path / "run", [1, 2])
    publish(run, 1, 3)
    delete_step(run, run.step(1), by="me", reason="", grace=0)
    found = document(cairn_here("gc", str(tmp_path / "run"), "--json"))
    assert (found["count"], found["dry_run"], found["run"]) == (1, True, f"file://{tmp_path}/run")
    assert found["entries"][0]["name"] == "attempts/1/1"
    rebuild = ["index", "rebuild", "--root", str(tmp_path), "--json"]
    found = document(cairn_here(*rebuild, "--data-dir", str(tmp_path_factory.mktemp("data"))))
    assert found == {"runs": 1, "checkpoints": 3, "aliases": 0}  # one of them in the trash
    manager(tmp_path / "theirs", steps=(3, 6))
    found = document(cairn_here("adopt", str(tmp_path / "theirs"), "--json"))
    assert (found["adopted"], found["problems"]) == ([3, 6], [])
    assert found["run"] == f"file://{tmp_path}/theirs.cairn"


def test_a_server_announces_itself_in_json(root, tmp_path):
    command = [*CAIRN, "serve", "--root", str(root), "--data-dir", str(tmp_path), "--port", "0"]
    with Program([*command, "--json"], env=environment(), stdout=subprocess.PIPE) as process:
        try:
            told = json.loads(process.stdout.readline())
        finally:
            process.kill()
    assert (told["roots"], told["databases"]) == ({"default": f"file://{root}"}, str(tmp_path))
    assert told["url"].startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("arguments", "status", "kind"),
    [
        (["checkpoints", "nobody"], 3, "run-not-found"),
        (["promote", "tiny", "9", "good"], 3, "step-not-found"),
        (["promote", "other", "1", "good", "--expect", "7"], 4, "precondition-failed"),
        (["path", "tiny@@x"], 2, "invalid-address"),
        (["fork", "tiny", "../x"], 2, "invalid-uri"),
        (["runs", "--refesh"], 2, "usage"),
        (["watch", "op-00000000000000000000000000000000"], 3, "operation-not-found"),
    ],
)
def test_a_failure_is_a_problem_on_standard_error(url, arguments, status, kind):
    done = cairn_here(*arguments, "--json", url=url)
    assert (done.returncode, done.stdout) == (status, "")
    problem = json.loads(done.stderr)
    assert problem["type"] == f"urn:cairn:problem:{kind}"
    assert problem["title"]
    assert problem["detail"]


def test_no_server_is_a_problem_too():
    done = cairn_here("runs", "--json", url="http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (6, "")
    assert json.loads(done.stderr)["type"] == "urn:cairn:problem:unreachable"
