"""Runs the main job end to end; every line it prints is something that just happened."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cairn.service.client.client import Client
from cairn.service.command.watch import on_console, watch_operation
from cairn.service.errors import ProblemResponseError, ServiceError
from cairn.service.schemas import Operation
from cairn.service.sizes import size_text
from cairn.storage.runs.records.layout import attempt_dir
from cairn.storage.runs.run import Run
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import parse_uri
from examples.demo import needs, sweep
from examples.demo.jobs import Event, Jobs, events, losses
from examples.demo.report import DemoFailedError, Report
from examples.demo.servers import control_plane, store

RUN = "smollm2"
FORK = "smollm2-fork"
SAVE_EVERY, LAST_SAVED, LAST_STEP = 4, 8, 10
BATCHES = 3  # that training sees again and again
MESH, OTHER_MESH = "1,4", "1,2"
ENOUGH_BYTES = 100_000_000  # of the 1.1 GB of a save, before it is killed


def show(report: Report, event: Event) -> None:
    """Prints one event of a training job."""
    match event["event"]:
        case "loaded":
            report.say(f"loaded {event['source']}: {event['parameters'] / 1e6:.1f} M parameters")
        case "restored":
            report.say(f"restored {event['source']}: step {event['step']}")
        case "ready":
            mesh = " x ".join(f"{axis}={size}" for axis, size in event["mesh"].items())
            report.say(
                f"{event['devices']} devices, mesh {mesh}, state {event['bytes'] / 1e9:.2f} GB, "
                f"ready after {event['seconds']:.1f} s"
            )
        case "refused":
            report.say(f"mesh {event['mesh']} is refused:")
            for line in event["message"].splitlines()[:3]:
                report.say(f"  {line}")
        case "step":
            report.say(
                f"step {event['step']:>3}  loss {event['loss']:.6f}  {event['seconds']:.2f} s"
            )
        case "saved":
            report.say(f"          save of step {event['step']} blocked {event['blocked']:.3f} s")


def mesh_text(mesh: str) -> str:
    """A mesh as the report names it."""
    return "dp={} x fsdp={}".format(*mesh.split(","))


class Demo:
    """The steps; each leaves what the next one needs in the store."""

    def __init__(self, report: Report, jobs: Jobs, root: str) -> None:
        self.report = report
        self.jobs = jobs
        self.root = root
        self.run_uri = f"{root}/{RUN}"
        self.fork_uri = f"{root}/{FORK}"
        self.digests = jobs.folder / "digests-saved.json"
        self.expected: dict[int, str] = {}

    def train(self) -> None:
        """Steps a and b: real weights on a mesh, fine-tuned and saved while training goes on."""
        self.report.step("a", f"SmolLM2-135M onto 4 virtual devices, mesh {mesh_text(MESH)}")
        announced = False

        def follow(event: Event) -> None:
            nonlocal announced
            if event["event"] == "step" and not announced:
                announced = True
                self.report.step(
                    "b", f"fine-tune {LAST_STEP} steps, save every {SAVE_EVERY} without waiting"
                )
            show(self.report, event)

        seen = self.jobs.run(
            "train", "--run", self.run_uri, "--mesh", MESH, "--steps", str(LAST_STEP),
            "--save-every", str(SAVE_EVERY), "--batches", str(BATCHES), "--show-refusal",
            "--digests", str(self.digests), on_event=follow,
        )  # fmt: skip
        refused = [
            event["message"].splitlines()[0] for event in seen if event["event"] == "refused"
        ]
        self.report.check(
            "a", "a tensor-parallel mesh that 9 heads do not divide is refused by name",
            bool(refused) and "9" in refused[0], refused[0] if refused else "accepted",
        )  # fmt: skip
        self.expected = losses(seen)
        first, last = (
            [float.fromhex(self.expected[step]) for step in steps]
            for steps in (range(1, BATCHES + 1), range(LAST_STEP - BATCHES + 1, LAST_STEP + 1))
        )
        self.report.check(
            "b", f"the loss falls: mean of {BATCHES} steps, over the same texts",
            sum(last) < 0.9 * sum(first),
            f"{sum(first) / BATCHES:.2f} -> {sum(last) / BATCHES:.2f}",
        )  # fmt: skip
        saves = [event for event in seen if event["event"] == "saved"]
        blocked = [event["blocked"] for event in saves]
        steps = [event["seconds"] for event in seen if event["event"] == "step"][1:]
        listed = [step.step for step in Run.open(parse_uri(self.run_uri)).steps()]
        self.report.check("b", "saved steps", listed == [SAVE_EVERY, LAST_SAVED], str(listed))
        self.report.check(
            "b", "every save was still being written when training went on",
            all(event["in_flight"] for event in saves),
            f"blocked {min(blocked):.2f}-{max(blocked):.2f} s a save of 1.1 GB; "
            f"step time {min(steps):.1f}-{max(steps):.1f} s",
        )  # fmt: skip

    def operate(self, client: Client, started: float) -> Path:
        """Step c: what a control plane is asked for over HTTP; returns the export's folder."""
        report = self.report
        report.step("c", "the control plane: list, promote, clean up, fork, gather, convert")
        report.say(f"answered after {started:.1f} s")
        run = client.run(RUN)
        steps = [checkpoint.step for checkpoint in client.checkpoints(RUN)]
        report.check(
            "c", "the run is listed", run.latest_step == LAST_SAVED,
            f"{run.name}: steps {steps}, {run.bytes / 1e9:.1f} GB",
        )  # fmt: skip
        first = client.promote(
            RUN, SAVE_EVERY, "production", expect=None, reason="a first candidate"
        )
        moved = client.promote(
            RUN, LAST_SAVED, "production", expect=first.sequence, reason="the last step"
        )
        report.say(f"production -> step {first.step}, then step {moved.step}")
        try:
            client.promote(RUN, SAVE_EVERY, "production", expect=first.sequence)
            status = 200
        except ProblemResponseError as error:
            status = error.status
            report.say(str(error))
        now = client.alias(RUN, "production").step
        report.check(
            "c",
            "a stale promotion is refused",
            status == 412 and now == LAST_SAVED,
            f"HTTP {status}; production is step {now}",
        )

        self.clean_up(client)
        self.follow(client, client.restore(RUN, LAST_SAVED, target=FORK))
        forked = client.run(FORK)
        origin = forked.lineage
        report.check(
            "c", "a new run is forked",
            forked.latest_step == LAST_SAVED and origin is not None and origin.step == LAST_SAVED,
            f"{FORK}: step {forked.latest_step}, {forked.bytes / 1e9:.1f} GB",
        )  # fmt: skip
        gathered = self.follow(client, client.gather(RUN, LAST_SAVED))
        report.check("c", "the checkpoint is gathered", bool(gathered), gathered["artifact_id"])
        converted = self.follow(client, client.convert(RUN, LAST_SAVED))
        artifact = client.artifact(converted["artifact_id"])
        target = self.jobs.folder / "export"
        target.mkdir()
        for file in artifact.files:
            client.download(artifact.id, file.name, target / file.name)
        report.check(
            "c", "the checkpoint is converted to Hugging Face format",
            (target / "config.json").exists(),
            f"{len(artifact.files)} files, {artifact.bytes / 1e6:.0f} MB",
        )  # fmt: skip
        return target

    def clean_up(self, client: Client) -> None:
        """Deletes what no alias and no policy keeps, and has its bytes removed."""
        before = client.usage(RUN).bytes
        policy = {"keep_last": 1}
        self.follow(client, client.apply_retention(RUN, policy, grace_seconds=0))
        self.follow(client, client.collect_garbage(RUN, dry_run=False))
        left = [checkpoint.step for checkpoint in client.checkpoints(RUN)]
        after = client.usage(RUN).bytes
        self.report.check(
            "c", "what no alias names and no policy keeps is removed",
            left == [LAST_SAVED] and after < 0.6 * before,
            f"step {left[0]} stays; {size_text(before)} -> {size_text(after)}",
        )  # fmt: skip

    def follow(self, client: Client, operation: Operation) -> dict[str, Any]:
        """Shows live progress until an operation ends; returns its result."""
        return watch_operation(client, operation, on_console(self.report.console)).result or {}

    def compare(self, export: Path) -> None:
        """Step d: the export in transformers beside the checkpoint in ours."""
        self.report.step("d", "the export in transformers, the checkpoint in ours")
        found = self.jobs.call(
            "compare", "examples.demo.compare",
            "--checkpoint", f"{self.run_uri}@production", "--export", str(export),
        )  # fmt: skip
        self.report.say(f"transformers: {found['theirs']!r}")
        self.report.say(f"ours:         {found['ours']!r}")
        self.report.check(
            "d", "logits agree within 1e-4 of the largest",
            found["difference"] <= 1e-4 * found["scale"],
            f"max difference {found['difference']:.2e}, largest logit {found['scale']:.1f}",
        )  # fmt: skip
        self.report.check(
            "d", "greedy completions agree", found["theirs"] == found["ours"], repr(found["ours"])
        )
        shutil.rmtree(export)  # a copy: the store keeps what was exported

    def restore(self) -> None:
        """Step e: the promoted step on the same and on another mesh, going on where it stopped."""
        self.report.step("e", "restore run@production in new processes and continue 2 steps")
        saved = json.loads(self.digests.read_text())
        for mesh, limits in ((MESH, (0.0, 0.0)), (OTHER_MESH, (1e-5, 1e-4))):
            digests = self.jobs.folder / f"digests-{mesh.replace(',', 'x')}.json"
            seen = self.jobs.run(
                f"restore-{mesh.replace(',', 'x')}", "--run", self.run_uri,
                "--restore", f"{self.run_uri}@production", "--mesh", mesh,
                "--steps", str(LAST_STEP), "--digests", str(digests),
                on_event=lambda event: show(self.report, event),
            )  # fmt: skip
            name = mesh_text(mesh)
            same = json.loads(digests.read_text()) == saved
            self.report.check(
                "e", f"restored arrays are bit-equal ({name})", same, f"{len(saved)} leaves"
            )
            found = losses(seen)
            differences = [
                abs(float.fromhex(found[step]) - float.fromhex(self.expected[step]))
                for step in (LAST_SAVED + 1, LAST_STEP)
            ]
            holds = all(a <= b for a, b in zip(differences, limits, strict=True))
            allowed = "bit-equal" if mesh == MESH else "within 1e-5 and 1e-4"
            self.report.check(
                "e", f"losses continue those of the uninterrupted job, {allowed} ({name})", holds,
                "differences " + ", ".join(f"{value:.1e}" for value in differences),
            )  # fmt: skip

    def crash(self, client: Client) -> None:
        """Step f: SIGKILL in the middle of a save; nothing half-written is ever listed."""
        self.report.step("f", "SIGKILL in the middle of a save, then a restart")
        run = Run.open(parse_uri(self.fork_uri))
        arguments = (
            "--run", self.fork_uri, "--restore", self.fork_uri,
            "--mesh", MESH, "--steps", str(LAST_SAVED + 1), "--save-every", "1",
        )  # fmt: skip
        before = {attempt.number for attempt in run.attempts()}
        process = self.jobs.start("killed", *arguments)
        killed_at = None
        for event in events(process):
            show(self.report, event)
            if event["event"] == "saving":
                killed_at = self.kill_in_save(process, run, event["step"], before)
        process.wait()
        listed = [step.step for step in run.steps()]
        for item in run.all_states():
            self.report.say(f"step {item.step} of attempt {item.attempt}: {item.state}")
        self.report.check(
            "f", "the process was killed while the save was in flight", killed_at is not None,
            f"SIGKILL with {killed_at}",
        )  # fmt: skip
        self.report.check(
            "f", "the previous step is still the latest", listed == [LAST_SAVED], f"{listed}"
        )
        over_http = [checkpoint.step for checkpoint in client.checkpoints(FORK)]
        self.report.check(
            "f", "nothing half-written is listed over HTTP", over_http == [LAST_SAVED],
            f"{over_http}",
        )  # fmt: skip
        self.jobs.run("restarted", *arguments, on_event=lambda event: show(self.report, event))
        listed = [step.step for step in run.steps()]
        self.report.check(
            "f", "the restart saved that step again",
            listed == [LAST_SAVED, LAST_SAVED + 1], f"{listed}",
        )  # fmt: skip

    def sweep(self, client: Client) -> None:
        """Step g: runs to compare in the browser, and the best of them."""
        self.report.step("g", f"a sweep of {len(sweep.RATES)} learning rates on a tiny model")
        seen = self.jobs.call("sweep", "examples.demo.sweep", "--root", self.root)
        for name, loss in seen.items():
            self.report.say(f"{name}: eval/loss {loss:.3f}")
        ranked = list(
            client.runs(
                filter="labels.sweep = learning-rate",
                order_by="best.eval/loss",
                columns="best.eval/loss",
                refresh=True,
            )
        )
        best = ranked[0].columns[0]
        saved = sweep.STEPS // sweep.SAVE_EVERY
        counts = [run.checkpoint_count for run in ranked]
        self.report.check(
            "g", "the best run of a sweep is the first of a list",
            counts == [saved] * len(sweep.RATES) and best.step is not None,
            f"{ranked[0].name}: eval/loss {best.value} at step {best.step}",
        )  # fmt: skip

    def kill_in_save(
        self, process: subprocess.Popen[str], run: Run, step: int, before: set[int]
    ) -> str | None:
        """Kills the process once a good part of the step is written but no manifest is."""
        files = open_files(run.uri)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            size = sum(
                file.size
                for attempt in run.attempts()
                if attempt.number not in before
                for file in files.walk(attempt_dir(attempt.number))
            )
            if run.latest_step() == step:
                return None
            if size > ENOUGH_BYTES:
                process.send_signal(signal.SIGKILL)
                return f"{size_text(size)} of step {step} written"
        return None


def main() -> int:
    """Runs the demo; returns 0 when every promise held."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--store", choices=("file", "gcs", "s3"), default="file")
    parser.add_argument("--folder", type=Path, default=Path(".demo"))
    parser.add_argument("--port", type=int, default=8337)
    arguments = parser.parse_args()
    folder = arguments.folder / arguments.store
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report = Report()
    report.say(needs.told(folder))
    if lacking := needs.lacking(folder):
        report.console.print(*lacking, sep="\n", style="red")
        return 1
    try:
        with store(arguments.store, folder) as (root, environment):
            os.environ.update(environment)
            demo = Demo(report, Jobs(folder, environment), root)
            demo.train()
            with (
                control_plane(root, folder, environment, arguments.port) as (url, started, _),
                Client(url) as client,
            ):
                os.environ["CAIRN_URL"] = url  # jobs from now on announce what they save
                export = demo.operate(client, started)
                demo.compare(export)
                demo.restore()
                demo.crash(client)
                left = [c.step for c in client.checkpoints(FORK)]
                report.check(
                    "f",
                    "the control plane lists the same",
                    left == [LAST_SAVED + 1, LAST_SAVED],
                    f"{left}",
                )
                demo.sweep(client)
    except (DemoFailedError, RuntimeError, ServiceError) as error:
        report.console.print(f"\n[red]{error}[/]")
        return 1
    report.summary()
    report.say(
        f"\n   The store stays in {folder}; look at it with: make serve STORE={arguments.store}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
