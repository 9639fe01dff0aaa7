"""Names, URIs and folders that lead to no checkpoint, from Python, over HTTP and in a shell."""

import httpx
import pytest

from cairn import Checkpointer, Client, DecoderForCausalLM, EasyDeLState
from cairn.service.errors import ProblemResponseError
from cairn.storage import errors as storage
from tests.bad_input.conftest import raised, says
from tests.service.commands import cairn
from tests.tiny import make_state

pytestmark = pytest.mark.usefixtures("untouched")

LIST = "`cairn runs` lists what exists."
IN_FLIGHT = "Try again once it is done."
NO_PARENTS = r"non-empty segments other than . and .., without \ % ? # :: or controls"
SCHEMES = "gs://bucket/path, s3://bucket/path, file:///path, memory://path or a plain path"
CHECKPOINT = "Give the run that the checkpoint belongs to: RUN, RUN@ALIAS or RUN/steps/N."

# reference, error, path, expected, found, next step; ROOT stands for the store's folder.
LOADS = [
    ("ROOT/nope", "RunNotFoundError", "file://ROOT/nope", "a folder with run.json", "nothing",
     LIST),
    ("ROOT/tiny@nope", "AliasNotFoundError", "file://ROOT/tiny", "alias 'nope'", "aliases: none",
     "Promote a step to it first, or use one of these."),
    ("ROOT/tiny/steps/9", "StepNotFoundError", "file://ROOT/tiny", "step 9", "steps 1, 2",
     "Choose a listed step, or leave the step out for the latest."),
    ("ROOT/busy/steps/7", "StepInFlightError", "file://ROOT/busy/attempts/2/7", "a complete step",
     "a save in flight", IN_FLIGHT),
    ("ROOT/tiny@9", "InvalidURIError", "ROOT/tiny@9", "a letter or digit", "'9'",
     "RUN/steps/N names a step"),
    ("ROOT/tiny/steps/last", "InvalidURIError", "ROOT/tiny/steps/last", "…/run/steps/N", "'last'",
     "Give the step's number"),
    ("ROOT/../tiny", "InvalidURIError", "ROOT/../tiny", "a path without '..'", "'..'",
     "Give the absolute path."),
    ("file://ROOT/../tiny", "InvalidURIError", "file://ROOT/../tiny", NO_PARENTS,
     "the segment '..'", "give another path."),
    ("ftp://host/tiny", "InvalidURIError", "ftp://host/tiny", SCHEMES, "'ftp:'",
     "Use one of these schemes"),
    ("gs://b/tiny", "InvalidURIError", "gs://b/tiny", "a bucket name of 3 or more", "'b'",
     "Check the slashes and the name."),
    ("ROOT/plain", "RunNotFoundError", "file://ROOT/plain", "a folder with run.json",
     "a folder without run.json, with notes.txt", LIST),
    ("ROOT/empty", "RunNotFoundError", "file://ROOT/empty", "a folder with run.json",
     "an empty folder", LIST),
    ("ROOT/file", "RunNotFoundError", "file://ROOT/file", "a folder with run.json", "a file", LIST),
    ("ROOT/tiny/attempts/1/2", "RunNotFoundError", "file://ROOT/tiny/attempts/1/2",
     "a folder with run.json", "one checkpoint's folder", CHECKPOINT),
]  # fmt: skip


@pytest.mark.parametrize("case", LOADS, ids=[case[0] for case in LOADS])
@pytest.mark.parametrize("load", [EasyDeLState.load_state, EasyDeLState.from_pretrained])
def test_a_load_of_what_is_no_checkpoint_is_refused(store, case, load):
    reference, kind, *texts = (part.replace("ROOT", str(store.root)) for part in case)
    error = raised(getattr(storage, kind), lambda: load(reference, verbose=False))
    assert isinstance(error, FileNotFoundError if kind.endswith("NotFoundError") else Exception)
    says(str(error), *texts)


HUB = "a folder, a .gguf file, a store URI or a hub id such as org/name"
FOLDER = "a model's folder, with config.json"
PRETRAINED = [
    ("ROOT/nope", "NotFoundError", "ROOT/nope", HUB, "no such folder", "check the path"),
    ("ROOT/../nope", "NotFoundError", "ROOT/../nope", HUB, "no such folder", "check the path"),
    ("file://ROOT/../tiny", "InvalidURIError", "file://ROOT/../tiny", NO_PARENTS,
     "the segment '..'", "give another path."),
    ("ftp://host/model", "InvalidURIError", "ftp://host/model", SCHEMES, "'ftp:'", "Use one of"),
    ("ROOT/plain", "NotFoundError", "file://ROOT/plain", FOLDER, "notes.txt",
     "give the folder that holds config.json"),
    ("ROOT/empty", "NotFoundError", "file://ROOT/empty", FOLDER, "nothing",
     "give the folder that holds config.json"),
    ("ROOT/tiny/steps/7", "StepNotFoundError", "file://ROOT/tiny", "step 7", "steps", "Choose a"),
    ("org/nope", "NotFoundError", "org/nope", "a folder of this name here, or a repository on the",
     "", "check the name"),
]  # fmt: skip


@pytest.mark.parametrize("case", PRETRAINED, ids=[case[0] for case in PRETRAINED])
def test_what_is_no_pretrained_model_is_refused(store, case):
    reference, kind, *texts = (part.replace("ROOT", str(store.root)) for part in case)
    error = raised(getattr(storage, kind), lambda: DecoderForCausalLM.from_pretrained(reference))
    says(str(error), *texts)


@pytest.fixture(scope="module")
def state():
    return make_state()


SAVES = [
    ("ROOT/../tiny", "InvalidURIError", "ROOT/../tiny", "a path without '..'", "'..'",
     "Give the absolute path."),
    ("ftp://host/tiny", "InvalidURIError", "ftp://host/tiny", SCHEMES, "'ftp:'",
     "Use one of these schemes"),
    ("memory://tiny/x", "InvalidURIError", "memory://tiny/x", "a file://, gs:// or s3:// URI",
     "memory://", "Save to a local disk or to a bucket."),
    ("ROOT/my run", "InvalidURIError", "", "a letter or digit", "'my run'", "another name"),
    ("ROOT/file", "NotFoundError", "file://ROOT/file/run.json", "a folder", "",
     "a file is in the way"),
    ("ROOT/tiny/attempts/1/2", "InvalidURIError", "file://ROOT/tiny/attempts/1/2",
     "a run's folder", "a folder of the run file://ROOT/tiny", "Give the run, file://ROOT/tiny"),
    ("ROOT/tiny/attempts/1/2/model", "InvalidURIError", "ROOT/tiny/attempts/1/2/model",
     "a run's folder", "a folder of the run file://ROOT/tiny", "Give the run, file://ROOT/tiny"),
    ("ROOT/tiny", "StepExistsError", "file://ROOT/tiny", "a step above 2, the latest", "step 1",
     "pass overwrite=True"),
    ("ROOT/busy", "LeaseHeldError", "file://ROOT/busy", "", "", "trainer"),
]  # fmt: skip


@pytest.mark.parametrize("case", SAVES, ids=[case[0] for case in SAVES])
def test_a_save_to_what_is_no_run_is_refused(store, state, case):
    reference, kind, *texts = (part.replace("ROOT", str(store.root)) for part in case)
    step = 9 if reference.endswith("busy") else 1
    error = raised(
        getattr(storage, kind), lambda: state.save_state(reference, step=step, verbose=False)
    )
    says(str(error), *texts)


RUNS = "/v1/roots/default/runs"
PATTERN = "can't be used here: use letters, digits, '.', '_', '=', '+' and '-'"
LINK = "a symbolic link to somewhere else"
UNLINK = "Replace the link by what it leads to"
NO_STEP = "Choose a listed step"
CREATE = {"If-None-Match": "*"}

# request, body, status, type, path, expected, found, next step
REQUESTS = [
    ("GET nope", None, 404, "run-not-found", "ROOT/nope", "a folder with run.json", "nothing",
     LIST),
    ("GET tinny", None, 404, "run-not-found", "ROOT/tinny", "a folder with run.json", "nothing",
     "The nearest name that exists is tiny."),
    ("GET nope/checkpoints", None, 404, "run-not-found", "ROOT/nope", "a folder", "nothing", LIST),
    ("GET plain", None, 404, "run-not-found", "ROOT/plain", "a folder with run.json",
     "a folder without run.json, with notes.txt", LIST),
    ("GET file/checkpoints/1", None, 404, "run-not-found", "ROOT/file", "a folder", "a file", LIST),
    ("GET tiny/aliases/nope", None, 404, "alias-not-found", "ROOT/tiny", "alias 'nope'",
     "aliases: none", "Promote a step to it first"),
    ("GET tiny/checkpoints/9", None, 404, "step-not-found", "ROOT/tiny", "step 9", "steps 1, 2",
     NO_STEP),
    ("GET link", None, 409, "leads-out", "ROOT/link", "a path below", LINK, UNLINK),
    ("GET link/checkpoints", None, 409, "leads-out", "ROOT/link", "a path below", LINK, UNLINK),
    ("POST link/checkpoints/2:convert", {}, 409, "leads-out", "ROOT/link", "a path below", LINK,
     UNLINK),
    *[
        (f"POST {run}/checkpoints/{step}:{verb}", body, status, kind, path, expected, found, after)
        for verb, body in (
            ("convert", {}),
            ("gather", {}),
            ("promote", {"alias": "new"}),
            ("restore", {"mode": "fork", "run": "new"}),
        )
        for run, step, status, kind, path, expected, found, after in (
            ("nope", 1, 404, "run-not-found", "ROOT/nope", "a folder", "nothing", LIST),
            ("tiny", 9, 404, "step-not-found", "ROOT/tiny", "step 9", "steps 1, 2", NO_STEP),
            ("busy", 7, 409, "step-in-flight", "ROOT/busy/attempts/2/7", "a complete step",
             "a save in flight", IN_FLIGHT),
        )
    ],
    ("POST tiny/checkpoints/2:restore", {"mode": "fork", "run": "link"}, 409, "leads-out",
     "ROOT/link", "a path below", LINK, UNLINK),
]  # fmt: skip


@pytest.mark.parametrize("case", REQUESTS, ids=[f"{case[0]} {case[3]}" for case in REQUESTS])
def test_a_request_for_what_is_no_checkpoint_is_a_problem(store, plane, case):
    request, body, status, kind, *texts = case
    method, _, path = request.partition(" ")
    answer = httpx.request(method, f"{plane}{RUNS}/{path}", json=body, headers=CREATE)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == f"urn:cairn:problem:{kind}"
    assert (problem["status"], problem["instance"]) == (status, f"{RUNS}/{path}")
    members = [problem[name] for name in ("path", "expected", "found", "next_step")]
    for text, member in zip(texts, members, strict=True):
        assert text.replace("ROOT", str(store.root)) in member


# A name that is no name never reaches the store.
@pytest.mark.parametrize("name", ["%2e%2e", "a%5Cb", "a%20b", "%2e%2e%5Cetc"])
def test_a_run_name_that_leads_elsewhere_is_a_problem(plane, name):
    answer = httpx.get(f"{plane}{RUNS}/{name}")
    assert answer.status_code == 422, answer.text
    problem = answer.json()
    assert problem["type"] == "urn:cairn:problem:invalid-request"
    assert problem["errors"][0]["field"] == "path.run"
    assert PATTERN in problem["detail"]
    assert problem["detail"].startswith("path.run: '")


@pytest.mark.parametrize("name", ["..", "../tiny", "/etc", "gs://bucket/run", "a/b", ""])
def test_a_fork_to_a_name_that_leads_elsewhere_is_a_problem(plane, name):
    body = {"mode": "fork", "run": name}
    answer = httpx.post(f"{plane}{RUNS}/tiny/checkpoints/2:restore", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"].startswith(f"body.run: {name!r} {PATTERN}")


CALLS = {
    "run": lambda cairn: cairn.run("nope"),
    "alias": lambda cairn: cairn.alias("tiny", "nope"),
    "step": lambda cairn: cairn.checkpoint("tiny", 9),
    "convert": lambda cairn: cairn.convert("busy", 7),
    "gather": lambda cairn: cairn.gather("busy", 7),
    "promote": lambda cairn: cairn.promote("busy", 7, "new", expect=None),
    "restore": lambda cairn: cairn.restore("busy", 7, target="new"),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_client_raises_the_problem_that_it_was_told(plane, call):
    with Client(plane) as client, pytest.raises(ProblemResponseError) as caught:
        CALLS[call](client)
    unknown = call in ("run", "alias", "step")
    assert caught.value.status == caught.value.problem["status"] == (404 if unknown else 409)
    assert caught.value.problem["detail"] in str(caught.value)


COMMANDS = [
    (3, ("checkpoints", "nope"), 'There is no run "nope" in root "default".', LIST),
    (3, ("convert", "tiny@nope"), """no alias 'nope' in run "tiny" (aliases: none).""",
     "Promote a step"),
    (3, ("gather", "tiny/steps/9"), 'There is no step 9 in run "tiny" (steps 1, 2).', NO_STEP),
    (4, ("convert", "busy/steps/7"), "ROOT/busy/attempts/2/7", "a complete step",
     "a save in flight", IN_FLIGHT),
    (4, ("fork", "busy/steps/7", "new"), "ROOT/busy/attempts/2/7", "a complete step",
     "a save in flight", IN_FLIGHT),
    (7, ("checkpoints", "link"), "ROOT/link", "a path below", LINK, UNLINK),
    (2, ("convert", "../tiny"), "'../tiny'", "a path without '..'", "found '..'",
     "Give the absolute path."),
    (2, ("path", "ftp://host/tiny"), "ftp://host/tiny", SCHEMES, "'ftp:'", "Use one of these"),
    (3, ("path", "ROOT/plain"), "There is no run", "at file://ROOT/plain",
     "a folder without run.json", LIST),
]  # fmt: skip


@pytest.mark.parametrize("case", COMMANDS, ids=[" ".join(case[1]) for case in COMMANDS])
def test_a_command_on_what_is_no_checkpoint_fails_with_one_line(store, plane, case):
    status, arguments, *texts = case
    ended = cairn(*(text.replace("ROOT", str(store.root)) for text in arguments), url=plane)
    assert (ended.returncode, ended.stdout) == (status, "")
    assert ended.stderr.startswith("cairn: ")
    assert ended.stderr.count("\n") == 1
    for text in texts:
        assert text.replace("ROOT", str(store.root)) in ended.stderr


def test_a_run_or_a_bucket_that_is_not_there_is_told_from_gs_too(gcs, state):
    for uri in (f"{gcs.bucket_uri}/nope", "gs://no-such-bucket/nope"):
        error = raised(
            storage.RunNotFoundError, lambda uri=uri: EasyDeLState.load_state(uri, verbose=False)
        )
        says(str(error), uri, "a folder with run.json", "nothing", LIST)
    error = raised(
        storage.NotFoundError,
        lambda: state.save_state("gs://no-such-bucket/nope", step=1, verbose=False),
    )
    assert str(error).startswith("not found: gs://no-such-bucket/nope/run.json: found ")
    assert str(error).endswith("a bucket must exist before anything is stored in it.")
    Checkpointer.for_run("gs://no-such-bucket/nope").close()
