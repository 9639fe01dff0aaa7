"""What was made of all steps of a run, as its lineage shows it."""

import json

from cairn import Run
from cairn.service.actions import artifacts
from cairn.storage.runs.records.exports import exports_of_run
from tests.service.jobs import done, save_llama, serving

STEPS = "/v1/roots/default/runs/llama/checkpoints"
HTML = {"Accept": "text/html"}


def test_exports_of_every_step_are_told_highest_step_first_and_only_published_ones(tmp_path):
    save_llama(tmp_path / "store/llama", (1, 2, 10))
    run = Run.open(tmp_path / "store/llama")
    assert exports_of_run(run.objects, 5) == ([], False)
    with serving(tmp_path / "store", tmp_path / "data") as http:
        for step in (1, 10):
            done(http, f"{STEPS}/{step}:gather", {})
        done(http, f"{STEPS}/2:convert", {})
        unpublished = tmp_path / "store/llama/exports/2.1/gather-0123456789abcdef/try"
        unpublished.mkdir(parents=True)
        (tmp_path / "store/llama/exports/notes").mkdir()
        plane = http.app.state.plane
        found, more = artifacts.list_run_artifacts(plane, "default", "llama", 5)
        assert [(one.step, one.kind.value) for one in found] == [
            (10, "gather"),
            (2, "convert"),
            (1, "gather"),
        ]
        assert not more
        assert http.get(f"/v1/artifacts/{found[0].id}").json() == json.loads(
            found[0].model_dump_json()
        )
        first, more = artifacts.list_run_artifacts(plane, "default", "llama", 2)
        assert ([one.step for one in first], more) == ([10, 2], True)
        page = http.get("/ui/default/llama/lineage", headers=HTML).text
        assert page.count("One safetensors file") == 4  # in the graph and in the list
        manifest = next((tmp_path / "store/llama/exports/10.1").glob("*.json"))
        manifest.write_text("{")
        damaged = http.get("/ui/default/llama/lineage", headers=HTML)
        assert damaged.status_code == 200  # the rest of the page is there
        assert "Exports could not be listed" in damaged.text
