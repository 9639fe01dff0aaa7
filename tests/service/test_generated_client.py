"""A client that a public generator makes of the API's document: it does what ours does."""

import importlib
import json
import subprocess
import sys

import numpy as np
import pytest

from tests.service.jobs import save_llama
from tests.service.planes import running_plane
from tests.service.test_openapi import described


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The client, as a package that can be imported."""
    folder = tmp_path_factory.mktemp("generated")
    document = folder / "openapi.json"
    document.write_text(json.dumps(described()))
    made = subprocess.run(
        [
            sys.executable,
            *("-m", "openapi_python_client", "generate", "--meta", "none"),
            *("--path", document, "--output-path", folder / "generated_cairn"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert "WARNING parsing" not in made.stdout, made.stdout
    sys.path.insert(0, str(folder))
    yield lambda name: importlib.import_module(f"generated_cairn.{name}")
    sys.path.remove(str(folder))


def test_it_lists_runs_reads_a_slice_and_starts_an_export(generated, tmp_path):
    saved = save_llama(tmp_path / "store" / "llama", (1, 2))[2]
    (tmp_path / "data").mkdir()
    with running_plane(tmp_path / "store", tmp_path / "data") as (url, _):
        client = generated("client").Client(base_url=url)
        runs = generated("api.runs.list_all_runs").sync(client=client, refresh=True)
        assert [(one.root, one.name, one.latest_step) for one in runs.runs] == [
            ("default", "llama", 2)
        ]

        kernel = "model/layers/1/mlp/up_proj/kernel"
        formats = generated("models.read_tensor_format").ReadTensorFormat
        part = generated("api.tensors.read_tensor").sync(
            "default", "llama", 2, kernel, client=client, slice_="3:5,:4", format_=formats.JSON
        )
        np.testing.assert_array_equal(np.float32(part.values), saved[kernel][3:5, :4])

        request = generated("models.convert_request").ConvertRequest()
        started = generated("api.jobs.convert_checkpoint").sync(
            "default", "llama", 2, client=client, body=request
        )
        get = generated("api.operations.get_operation").sync
        while (now := get(started.id, client=client)).state in ("pending", "running"):
            pass
        assert now.state == "succeeded"

        missing = generated("api.runs.get_run").sync("default", "nothing", client=client)
        assert missing.type_ == "urn:cairn:problem:run-not-found"
