"""What the page shows for copying works as it is shown, for each kind of step and export."""

import html
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from cairn import Checkpointer, CheckpointManager, Client, TrainState, adopt
from cairn.service.app import create_app
from cairn.service.settings import Settings
from tests.service.access.conftest import Keys
from tests.service.commands import cairn_here
from tests.service.planes import running_plane
from tests.service.servers import serve
from tests.service.tiny_run import copy_tiny_run
from tests.trainers.kept import kept, store

TREE = {"params": {"w": jnp.arange(6.0)}, "epoch": 3}


def save_train_state(root: Path) -> None:
    state = TrainState.create(params=TREE["params"], tx=optax.sgd(0.1), step=4)
    state.save_state(f"{root}/train-state", verbose=False).wait()


def save_trees(root: Path) -> None:
    with Checkpointer(f"{root}/trees") as checkpointer:
        checkpointer.save(4, {"loop": TREE})


def save_managed(root: Path) -> None:
    with CheckpointManager(f"{root}/managed") as manager:
        manager.save(4, args=ocp.args.Composite(loop=ocp.args.StandardSave(TREE)))
        manager.wait_until_finished()


TREES = {"maxtext": "maxtext-llama3.1-scanned", "tunix": "tunix-gemma3"}
"""Trees of other trainers, by run."""


def save_of_trainers(root: Path) -> None:
    for run, name in (*TREES.items(), ("beside", TREES["maxtext"])):
        store(name, root / "out" / run / "checkpoints")
        adopt(root / "out" / run / "checkpoints", root / run)
    _, settings = kept(TREES["maxtext"])
    lines = (f"{key}: {json.dumps(value)}" for key, value in settings.items())
    (root / "out/beside/config.yml").write_text("\n".join(lines))


def save_adopted(root: Path) -> None:
    with ocp.CheckpointManager(root / "theirs") as manager:
        manager.save(4, args=ocp.args.Composite(loop=ocp.args.StandardSave(TREE)))
        manager.wait_until_finished()
    assert adopt(root / "theirs", root / "adopted").adopted == (4,)


SAVED = {
    "train-state": save_train_state,
    "trees": save_trees,
    "managed": save_managed,
    "adopted": save_adopted,
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    root = tmp_path_factory.mktemp("snippets") / "store"
    root.mkdir()
    copy_tiny_run(root)
    for save in SAVED.values():
        save(root)
    save_of_trainers(root)
    with running_plane(root, tmp_path_factory.mktemp("data")) as (url, _):
        yield url


def snippets(url: str, page: str, key: dict[str, str] | None = None) -> dict[str, str]:
    """Texts to copy, by their names."""
    shown = httpx.get(f"{url}{page}", follow_redirects=True, headers=key)
    assert shown.status_code == 200, shown.text
    found = re.findall(
        r'<pre tabindex="0" aria-label="([^"]*)"><code>(.*?)</code>', shown.text, re.S
    )
    return {name: html.unescape(text) for name, text in found}


def run_python(code: str) -> SimpleNamespace:
    names: dict[str, object] = {}
    exec(compile(code, "snippet", "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("run", SAVED)
def test_python_of_any_step_loads_it(plane, run):
    texts = snippets(plane, f"/ui/default/{run}/steps/4")
    restored = run_python(texts["Python that loads the step"]).restored
    arrays = [leaf for leaf in jax.tree.leaves(dict(restored.items())) if np.shape(leaf) == (6,)]
    np.testing.assert_array_equal(arrays[0], np.arange(6.0))
    for line in texts["commands for the step"].splitlines():
        assert cairn_here(*shlex.split(line)[1:], url=plane).returncode == 0


@pytest.mark.parametrize("run", SAVED)
def test_commands_for_steps_without_a_model_config_work_as_pasted(plane, run):
    page = httpx.get(f"{plane}/ui/default/{run}/steps/4/export").text
    assert "can&#39;t be exported" in page or "can't be exported" in page
    (gather,) = re.findall(r"<code>(cairn gather [^<]*)</code>", page)
    done = cairn_here(*shlex.split(gather)[1:], "--watch", url=plane)
    assert done.returncode == 0, done.stderr
    with Client(plane) as client:
        item, path = next((one.item, one.path) for one in client.tensors(run, 4) if one.bytes)
    query = urlencode({"item": item, "path": path})
    texts = snippets(plane, f"/ui/default/{run}/steps/4/tensor?{query}")
    command = shlex.split(texts["command that prints its statistics"])
    done = cairn_here(*command[1:], url=plane)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("run", "trainer"), [("maxtext", "MaxText"), ("tunix", "Tunix")])
def test_command_for_a_step_of_another_trainer_exports_it_with_its_config(
    plane, tmp_path, run, trainer
):
    page = httpx.get(f"{plane}/ui/default/{run}/steps/1/export").text
    assert f"Stored by {trainer}" in page
    assert "docs/howto/from-maxtext.md" in page
    assert "be exported" not in page
    (tmp_path / "config.json").write_text(json.dumps(kept(TREES[run])[1]))
    texts = snippets(plane, f"/ui/default/{run}/steps/1/export")
    command = texts["command that exports the step"].replace("FILE", f"{tmp_path}/config.json")
    done = cairn_here(*shlex.split(command)[1:], url=plane)
    assert done.returncode == 0, done.stderr


def test_step_beside_the_config_of_its_trainer_is_exported_without_another(plane):
    page = httpx.get(f"{plane}/ui/default/beside/steps/1/export").text
    assert "Stored by MaxText, whose config.yml lies beside it" in page
    assert "cairn convert beside/steps/1 --watch" in page
    assert '<select name="format">' in page


def test_pages_of_an_imported_step_say_whose_it_is_and_where_its_files_lie(plane):
    step = "/ui/default/adopted/steps/4"
    overview, config, files = (
        httpx.get(f"{plane}{step}{tab}", follow_redirects=True).text
        for tab in ("", "/config", "/files")
    )
    assert "imported" in overview
    assert "<dt>Imported by</dt>" in config
    assert "<dt>Values</dt><dd>7 (" in config  # six of an array, and a number
    folders = snippets(plane, f"{step}/files")
    assert folders["folder of the step"].endswith("/theirs/4")
    assert folders["folder of the digests"].endswith("/adopted/attempts/1/4")
    assert files.index("theirs/4") < files.index("_METADATA")
    assert files.index("attempts/1/4</code>") < files.index("chunk_digests.process_0.json")
    own = httpx.get(f"{plane}/ui/default/trees/steps/4", follow_redirects=True).text
    assert "imported" not in own


def test_texts_of_a_known_model_load_it_here_and_in_transformers(plane, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = snippets(plane, "/ui/default/tiny/steps/2")
    assert int(run_python(texts["Python that loads the step"]).state.step) == 2
    for name in ("commands for the step", "command that downloads an export"):
        for line in texts[name].splitlines():
            done = cairn_here(*shlex.split(line)[1:], url=plane)
            assert done.returncode == 0, done.stderr
    assert run_python(texts["Python that loads the export"]).model.config.model_type == "llama"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "max_shard_size": "20KB"},
        {"format": "gguf", "dtype": "float16"},
        {"allow_nonfinite": True},
    ],
)
def test_the_command_of_an_export_fetches_that_export(plane, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    with Client(plane) as client:
        result = client.wait(client.convert("tiny", 2, **options).id).result
    texts = snippets(plane, f"/artifacts/{result['artifact_id']}")
    address, *command = shlex.split(texts["command that downloads it"])
    assert (address, command[0]) == (f"CAIRN_URL={plane}", "cairn")
    pulled = cairn_here(*command[1:], "--json", url=plane)
    assert json.loads(pulled.stdout)["artifact"] == result["artifact_id"]
    permanent = texts["permanent address of its files"].replace("NAME", "config.json")
    assert (
        httpx.get(permanent)
        .headers["Content-Location"]
        .startswith(f"/v1/artifacts/{result['artifact_id']}/")
    )
    if "format" not in options:
        assert run_python(texts["code that loads it"]).model.config.model_type == "llama"


def test_an_export_of_an_alias_s_step_is_named_by_the_alias_and_with_a_key(
    plane, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with Client(plane) as client:
        artifact = client.artifact(client.wait(client.convert("tiny", 1).id).result["artifact_id"])
        client.promote("tiny", 1, "production", expect=None)
    page = f"/artifacts/{artifact.id}"
    texts = snippets(plane, page)
    _, *command = shlex.split(texts["command that downloads it"])
    assert command == ["cairn", "pull", "tiny@production", "models/tiny-production"]
    exports = f"{plane}/v1/roots/default/runs/tiny/exports"
    assert texts["permanent address of its files"] == f"{exports}/production/files/NAME"
    store = Path(artifact.uri.removeprefix("file://")).parents[4]
    settings = Settings(root=str(store), data_dir=tmp_path / "data", auth="keys")
    settings.prepare()
    with serve(create_app(settings, jobs=False)) as guarded:
        (tmp_path / "FILE").write_text(Keys(settings.database_url).make("reader"))
        key = {"Authorization": f"Bearer {(tmp_path / 'FILE').read_text()}"}
        texts = snippets(guarded, page, key)
        url, file, *command = shlex.split(texts["command that downloads it"])
        assert (url, file) == (f"CAIRN_URL={guarded}", "CAIRN_KEY_FILE=FILE")
        pulled = cairn_here(*command[1:], "--json", url=guarded, CAIRN_KEY_FILE="FILE")
    assert json.loads(pulled.stdout)["artifact"] == artifact.id


def test_page_of_a_step_tells_exports_apart_by_their_options(plane):
    with Client(plane) as client:
        for options in ({"dtype": "float16"}, {"format": "gguf", "dtype": "q8_0"}):
            client.wait(client.convert("tiny", 2, **options).id)
    shown = httpx.get(f"{plane}/ui/default/tiny/steps/2").text
    assert "dtype=float16" in shown
    assert "format=gguf dtype=q8_0" in shown


def test_the_command_of_a_gathered_file_fetches_it(plane):
    with Client(plane) as client:
        result = client.wait(client.gather("tiny", 2).id).result
        artifact = client.artifact(result["artifact_id"])
    texts = snippets(plane, f"/artifacts/{artifact.id}")
    (command,) = texts["command that downloads it"].splitlines()
    assert httpx.get(shlex.split(command)[-1]).content[8:9] == b"{"
    assert run_python(texts["code that loads it"]).tensors
