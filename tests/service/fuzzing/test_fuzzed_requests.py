"""What no test thought of: requests made from the API's own document, valid and not.

`make fuzz` asks 10,000 times and more. `make test` asks one in twenty of the operations for every
bound of their schemas, and the others a few times; the document's own examples are sent by
`test_openapi`, and by `make fuzz`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import httpx
import pytest

from cairn import Client, Run, parse_uri
from tests.faults.report import is_long, seed, trials
from tests.service.jobs import save_llama
from tests.service.planes import running_plane
from tests.service.stores import annotate, make_run

FOLDER = Path(__file__).parent
STEPS = (3, 6, 9)


def fill(root: Path) -> None:
    save_llama(root / "llama-sft", steps=STEPS)
    make_run(root / "empty")
    made = make_run(root / "other", STEPS)
    for run in (Run.open(parse_uri(root / "llama-sft")), made):
        for step in STEPS:
            annotate(run, step, metrics={"eval/loss": float(step)}, labels={"by": "test"})


def names(url: str, uri: str) -> dict[str, list[object]]:
    """What there is, made through the API: an artifact, operations, aliases."""
    with Client(url) as client:
        webhook = client.create_webhook("http://127.0.0.1:9/").details.id
        client.test_webhook(webhook)
        operation = client.wait(client.convert("llama-sft", 3).id)
        client.promote("llama-sft", 6, "best", expect=None)
        artifact = client.artifact(str((operation.result or {})["artifact_id"]))
        return {
            "artifact": [artifact.id],
            "name": [artifact.files[0].name],
            "operation": [operation.id],
            "uri": [uri],
            "worker": [worker.name for worker in client.workers()],
            "webhook": [webhook],
            "delivery": [one.id for one in client.deliveries(webhook)],
        }


def config(url: str, path: Path) -> Path:
    """Ours; in the short run with few requests to operations that it does not name."""
    text = (FOLDER / "schemathesis.toml").read_text(encoding="utf-8")
    for operations in httpx.get(f"{url}/openapi.json").json()["paths"].values():
        for name in sorted(operation["operationId"] for operation in operations.values()):
            if not is_long() and name not in text and crc32(f"{name} {seed()}".encode()) % 20:
                text += f'\n[[operations]]\ninclude-operation-id = "{name}"\n'
                text += "phases.coverage.enabled = false\n"
    if not is_long():
        text += "\n[phases.examples]\nenabled = false\n"
    path.write_text(text, encoding="utf-8")
    return path


def ask(url: str, report: Path, known: dict[str, list[object]]) -> subprocess.CompletedProcess[str]:
    own = config(url, report.with_name("schemathesis.toml"))
    arguments = ["--config-file", str(own), "run", f"{url}/openapi.json"]
    arguments += ["--checks", "all", "--continue-on-failure", "--no-color"]
    arguments += ["--max-examples", str(trials(short=1, long=310)), "--seed", str(seed())]
    arguments += ["--request-timeout", "30", "--output-truncate", "false"]
    arguments += ["--report", "json", "--report-json-path", str(report)]
    environment = {
        "SCHEMATHESIS_HOOKS": "tests.service.fuzzing.names",
        "PYTHONPATH": str(FOLDER.parents[2]),
        "CAIRN_FUZZED_NAMES": json.dumps(known),
    }
    return subprocess.run(
        [str(Path(sys.executable).with_name("schemathesis")), *arguments],
        env={**os.environ, **environment},
        cwd=report.parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(3600 if is_long() else 300)
def test_requests_made_from_the_document_find_no_fault(tmp_path):
    for root in ("store", "second", "third"):
        fill(tmp_path / root)
    second = {
        "CAIRN_ROOTS": json.dumps({"second": str(tmp_path / "second")}),
        "CAIRN_WEBHOOK_NETWORKS": "127.0.0.0/8",
    }
    report = tmp_path / "report.json"
    (tmp_path / "plane").mkdir()
    with running_plane(tmp_path / "store", tmp_path / "plane", second) as (url, process):
        asked = ask(url, report, names(url, str(tmp_path / "third")))
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert process.poll() is None
    assert asked.returncode == 0, asked.stdout[-20_000:]
    told = json.loads(report.read_text())
    assert told["complete"]
    assert not told["failures"]
    assert not told["errors"]
    assert told["operations"]["tested"] == told["operations"]["selected"]
    assert sum(told["test_cases"].values()) >= trials(short=200, long=10_000), told["test_cases"]
