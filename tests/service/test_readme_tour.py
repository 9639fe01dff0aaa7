"""The README's tour of the API: its commands, exactly as they are printed."""

import json
import os
import re
import subprocess
from pathlib import Path

from cairn import Run, annotate_step
from tests.service.jobs import save_llama
from tests.service.planes import running_plane

README = Path(__file__).parents[2] / "README.md"
TOUR = re.compile(r"^## The API\n.*?^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_command_of_the_tour_does_what_it_says(tmp_path):
    (tour,) = TOUR.findall(README.read_text(encoding="utf-8"))
    saved = save_llama(tmp_path / "store" / "my-run", (1000, 1200))
    run = Run.open(tmp_path / "store" / "my-run")
    annotate_step(run, 1200, metrics={"loss": 1.5})
    (tmp_path / "data").mkdir()
    # An answer that is no success ends the tour; each begins in a line of its own.
    (tmp_path / ".curlrc").write_text('fail-with-body\nwrite-out = "\\n"\n')
    with running_plane(tmp_path / "store", tmp_path / "data") as (url, _):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", tour],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CAIRN_URL": url},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    runs, found, leaves, values, statistics, diff, plan, noted, alias, usage, events, audit = told

    assert [one["name"] for one in runs["runs"]] == ["my-run"]
    assert [one["step"] for one in found["checkpoints"]] == [1200]
    assert [one["path"] for one in leaves["tensors"]] == ["model/norm/scale"]
    scale = saved[1200]["model/norm/scale"]
    assert values["values"] == [float(one) for one in scale[:4]]
    assert statistics["max"] == float(scale.max())
    assert diff["leaves"]["values"] == len(diff["differences"]) > 0
    assert (plan["fits"], plan["devices"]) == (True, 8)
    assert noted["labels"]["eval"] == "passed"
    assert (alias["alias"], alias["step"]) == ("production", 1200)
    assert usage["bytes"] == sum(usage["uses"].values())
    states = [
        json.loads(line[6:])["state"] for line in done.stdout.splitlines() if "data: " in line
    ]
    assert states[-1] == "succeeded"
    assert "alias.moved" in {one["kind"] for one in events["events"]}
    asked = {one["action"] for one in audit["audit_events"]}
    assert {"alias.promote", "checkpoint.annotate", "checkpoint.convert"} <= asked
