"""Verifying over HTTP and in the shell: sound, damaged, cancelled."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from cairn import Damage, Run, annotate_step
from cairn.service.jobs.kinds import verify
from cairn.storage.arrays.ocdbt import is_data_file
from cairn.storage.runs.annotate import annotation_of, note_verified
from cairn.storage.runs.records.layout import annotation_file, manifest_file
from tests.service.commands import cairn_here
from tests.service.jobs import done, save_llama, serving, until, watch
from tests.service.planes import running_plane

CHECKPOINTS = "/v1/roots/default/runs/{}/checkpoints"
STEPS = (1, 2, 3)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A sound run, one whose step 2 has damaged files, and one with a damaged manifest."""
    root = tmp_path_factory.mktemp("store")
    save_llama(root / "sound", STEPS)
    for name in ("damaged", "described", "unreadable", "amiss", "lost", "headless"):
        shutil.copytree(root / "sound", root / name)
    folder = root / "damaged" / "attempts" / "1" / "2"
    values = [path for path in folder.rglob("*") if is_data_file(str(path.relative_to(folder)))]
    flip(max(values, key=lambda path: path.stat().st_size))
    (folder / "model" / "_METADATA").unlink()
    flip(root / "described" / "attempts" / "1" / "2" / "model" / "_METADATA")
    flip(root / "unreadable" / manifest_file(2, 1))
    return root


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def http(root, tmp_path_factory):
    with serving(root, tmp_path_factory.mktemp("data")) as client:
        yield client


def ended(http, path):
    answer = http.post(path)
    assert answer.status_code == 202, answer.text
    assert answer.headers["Location"] == f"/v1/operations/{answer.json()['id']}"
    return watch(http, answer.json()["id"])


def test_a_sound_step_succeeds_and_says_what_was_read(http, root):
    operation = done(http, f"{CHECKPOINTS.format('sound')}/2:verify", {})
    assert operation["kind"] == "verify"
    (report,) = operation["result"]["steps"]
    run = Run.open(root / "sound")
    manifest = run.manifest(run.step(2))
    assert report["sound"] is True
    assert (report["step"], report["attempt"], report["problems"]) == (2, 1, [])
    assert report["bytes"] == manifest.nbytes
    assert report["leaves"] == len(run.contents(run.step(2)).leaves)
    assert operation["progress"]["done_bytes"] == manifest.nbytes
    assert operation["progress"]["total_bytes"] == manifest.nbytes


def test_a_damaged_step_fails_with_a_problem_that_names_the_files(http):
    operation = ended(http, f"{CHECKPOINTS.format('damaged')}/2:verify")
    assert operation["state"] == "failed"
    error = operation["error"]
    assert error["type"] == "urn:cairn:problem:damaged"
    assert error["status"] == 500
    assert any("model/_METADATA: missing" in problem for problem in error["problems"])
    assert any("model/d/" in problem for problem in error["problems"])
    assert all(problem.startswith("damaged/steps/2: ") for problem in error["problems"])
    (report,) = error["steps"]
    assert (report["sound"], report["loads"]) == (False, False)
    assert report["problem_count"] == len(error["problems"])
    again = ended(http, f"{CHECKPOINTS.format('damaged')}/3:verify")
    assert again["state"] == "succeeded"


def test_damage_that_no_load_meets_is_told_as_such(http, url):
    error = ended(http, f"{CHECKPOINTS.format('described')}/2:verify")["error"]
    (report,) = error["steps"]
    assert (report["sound"], report["loads"]) == (False, True)
    ran = cairn_here("verify", "described/steps/2", url=url)
    assert ran.returncode == 7
    assert "described/steps/2: Cairn loads every value of it all the same" in ran.stderr
    assert "all the same" not in cairn_here("verify", "damaged/steps/2", url=url).stderr


def test_every_step_of_a_run_is_verified_in_one_operation(http):
    operation = done(http, "/v1/roots/default/runs/sound:verify", {})
    reports, progress = operation["result"]["steps"], operation["progress"]
    assert [report["step"] for report in reports] == list(STEPS)
    read = sum(report["bytes"] for report in reports)
    assert progress["done_bytes"] == progress["total_bytes"] == read > reports[-1]["bytes"]
    operation = ended(http, "/v1/roots/default/runs/damaged:verify")
    assert operation["state"] == "failed"
    assert [report["sound"] for report in operation["error"]["steps"]] == [True, False, True]
    assert "1 of 3 steps" in operation["error"]["detail"]


def test_a_step_whose_manifest_is_damaged_is_found_with_the_others(http):
    operation = ended(http, "/v1/roots/default/runs/unreadable:verify")
    assert [report["sound"] for report in operation["error"]["steps"]] == [True, False, True]
    of_records, of_step = operation["error"]["problems"]
    assert of_records.startswith("unreadable: manifests/2.1.json: ")
    assert of_step.startswith("unreadable/steps/2: manifests/2.1.json: ")
    answer = http.post(f"{CHECKPOINTS.format('unreadable')}/2:verify")
    assert answer.status_code in (422, 500)
    assert "manifests/2.1.json" in answer.json()["detail"]


@pytest.mark.parametrize(
    "path", [CHECKPOINTS.format("sound") + "/9:verify", "/v1/roots/default/runs/nothing:verify"]
)
def test_what_is_not_there_is_404(http, path):
    assert http.post(path).status_code == 404


def test_a_verification_under_way_is_cancelled(http, monkeypatch):
    reached, cancelled = threading.Event(), threading.Event()
    real = verify.verify_step

    def slow(run, step, *, progress):
        def stall(read, total):
            reached.set()
            cancelled.wait(60)
            progress(read, total)

        return real(run, step, progress=stall)

    monkeypatch.setattr(verify, "verify_step", slow)
    started = http.post(f"{CHECKPOINTS.format('sound')}/1:verify").json()
    assert reached.wait(60)
    answers = []
    cancel = threading.Thread(
        target=lambda: answers.append(http.post(f"/v1/operations/{started['id']}:cancel"))
    )
    cancel.start()
    operation = f"/v1/operations/{started['id']}"
    until(lambda: http.get(operation).json()["state"] == "cancelled")
    cancelled.set()
    cancel.join(60)
    assert answers[0].json()["state"] == "cancelled"
    assert watch(http, started["id"])["state"] == "cancelled"


@pytest.fixture(scope="module")
def url(root, tmp_path_factory):
    with running_plane(root, tmp_path_factory.mktemp("plane")) as (url, _):
        yield url


def rows(text):
    titles, *lines = text.splitlines()
    return [dict(zip(titles.split("\t"), line.split("\t"), strict=True)) for line in lines]


def test_the_command_prints_a_table_and_exits_with_0_for_a_sound_step(url):
    ran = cairn_here("verify", "sound/steps/2", url=url)
    assert ran.returncode == 0, ran.stderr
    (row,) = rows(ran.stdout)
    assert (row["step"], row["found"], row["problems"]) == ("2", "ok", "0")
    assert int(row["size"]) > 10_000


def test_the_command_names_files_and_exits_with_1_for_a_damaged_step(url):
    ran = cairn_here("verify", "damaged", "--all", url=url)
    assert ran.returncode == 7
    found = {row["step"]: row["found"] for row in rows(ran.stdout)}
    assert found == {"records": "ok", "1": "ok", "2": "damaged", "3": "ok"}
    assert "damaged/steps/2: model/_METADATA: missing" in ran.stderr
    assert "Traceback" not in ran.stderr
    ran = cairn_here("verify", "damaged", url=url)
    assert ran.returncode == 0  # its records, and its latest step
    assert [row["step"] for row in rows(ran.stdout)] == ["records", "3"]


def test_the_command_names_damaged_records_and_repairs_them(url, root):
    attempt = root / "amiss" / "attempts" / "1.json"
    sound = attempt.read_bytes()
    attempt.write_bytes(sound.replace(b'"writer"', b'"Writer"'))
    ran = cairn_here("verify", "amiss", "--records", url=url)
    assert ran.returncode == 7
    (row,) = rows(ran.stdout)
    assert (row["step"], row["found"], row["problems"]) == ("records", "damaged", "1")
    assert "amiss: attempts/1.json: the attempt is not what was written" in ran.stderr
    ran = cairn_here("repair", "amiss", url=url)
    assert rows(ran.stdout) == [{"record": "attempts/1.json", "mended": "can be"}]
    assert ran.returncode == 0
    assert attempt.read_bytes() != sound
    ran = cairn_here("repair", "amiss", "--apply", url=url)
    assert rows(ran.stdout) == [{"record": "attempts/1.json", "mended": "mended"}], ran.stderr
    assert json.loads(attempt.read_text())["base_step"] == json.loads(sound)["base_step"]
    assert cairn_here("verify", "amiss", "--records", url=url).returncode == 0


def test_the_command_says_what_no_other_record_tells(url, root):
    manifest = root / "lost" / "manifests" / "3.1.json"
    stored = manifest.read_bytes()
    manifest.unlink()
    index = root / "lost" / "attempts" / "1" / "3" / "cairn.index"
    index.rename(root / "index")
    ran = cairn_here("verify", "lost", "--records", url=url)
    assert ran.returncode == 7
    assert "manifests/3.1.json: the manifest of a durable step is lost" in ran.stderr
    ran = cairn_here("repair", "lost", "--apply", url=url)
    assert ran.returncode == 7
    assert rows(ran.stdout) == [{"record": "manifests/3.1.json", "mended": "can't be"}]
    assert "backup" in ran.stderr
    ran = cairn_here("repair", "lost", "--apply", "--forget", "manifests/2.1.json", url=url)
    assert ran.returncode == 2
    assert "not to be forgotten" in ran.stderr
    (root / "index").rename(index)
    ran = cairn_here("repair", "lost", "--apply", url=url)
    assert rows(ran.stdout) == [{"record": "manifests/3.1.json", "mended": "mended"}]
    assert ran.returncode == 0
    assert manifest.read_bytes() == stored


def test_a_run_without_its_first_record_is_mended_by_the_command(url, root):
    (root / "headless" / "run.json").unlink()
    ran = cairn_here("repair", "headless", "--apply", url=url)
    assert ran.returncode == 0, ran.stderr
    assert cairn_here("verify", "headless", url=url).returncode == 0
    ran = cairn_here("repair", "nothing", url=url)
    assert ran.returncode == 3
    assert 'There is no run "nothing"' in ran.stderr


def test_the_command_refuses_what_it_cannot_mean(url):
    ran = cairn_here("verify", "sound/steps/2", "--all", url=url)
    assert (ran.returncode, ran.stdout) == (2, "")
    ran = cairn_here("verify", "sound/steps/9", url=url)
    assert (ran.returncode, ran.stdout) == (3, "")
    assert "There is no step 9" in ran.stderr


def test_a_verification_that_could_not_be_noted_says_so(url, root):
    run = Run.open(shutil.copytree(root / "sound", root / "unnoted"))
    note_verified(run, run.step(2), damage=Damage(at="2026-01-02T03:04:05Z"))
    flip(root / "unnoted" / annotation_file(2, 1))
    ran = cairn_here("verify", "unnoted/steps/2", url=url)
    assert rows(ran.stdout)[0]["found"] == "ok"
    assert "unnoted/steps/2 is as it was saved, and that could not be noted" in ran.stderr
    assert "noted" not in cairn_here("verify", "unnoted/steps/3", url=url).stderr


def test_steps_that_share_what_is_damaged_are_told_with_the_one_that_was_verified(url, root):
    run = Run.open(shutil.copytree(root / "sound", root / "assets"))
    flip(next((root / "assets" / "assets").iterdir()))
    ran = cairn_here("verify", "assets/steps/2", url=url)
    assert ran.returncode == 7
    for step in (1, 3):
        assert f"assets/steps/{step} is damaged too: it shares files with step 2" in ran.stderr
        assert annotation_of(run, run.step(step)).damaged is not None
    assert "newest sound" not in ran.stderr


def test_a_step_says_when_it_was_last_found_sound(http, root):
    run = Run.open(shutil.copytree(root / "sound", root / "noted"))
    step = f"{CHECKPOINTS.format('noted')}/2"
    for info in run.steps():  # others have verified what was copied
        note_verified(run, info, damage=Damage(at="2026-01-02T03:04:05Z"))
    annotate_step(run, 2, labels={"kept": "yes"})
    assert http.get(step, params={"refresh": True}).json()["verified"] is None
    done(http, f"{step}:verify", {})
    found = http.get(step).json()  # known once the operation has ended
    assert found["verified"] > found["created"]
    annotate_step(run, 2, metrics={"loss": 1.0})
    noted = annotation_of(run, run.step(2))
    assert (noted.verified is not None, noted.labels["kept"]) == (True, "yes")
    assert http.get(f"{step.removesuffix('2')}1").json()["verified"] is None

    (Path(run.step_uri(run.step(2)).local_path) / "model" / "_METADATA").unlink()
    assert ended(http, f"{step}:verify")["state"] == "failed"
    assert http.get(step).json()["verified"] is None
    assert annotation_of(run, run.step(2)).metrics == {"loss": 1.0}
