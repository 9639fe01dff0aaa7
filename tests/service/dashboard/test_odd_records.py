"""Pages of a step whose record says what no release writes, where any JSON may stand."""

import pytest

from cairn import Manifest, ModelInfo
from tests.service.jobs import save_llama


@pytest.mark.parametrize("odd", [[1], "text", 7, {"a": {"b": []}}, None])
def test_pages_show_a_step_with_an_odd_environment_and_config(http, root, odd):
    save_llama(root / "run")
    path = root / "run/manifests/1.1.json"
    manifest = Manifest.parse(path.read_bytes(), path)
    assert manifest.model is not None
    config = {**manifest.model.config, "sharding_axis_dims": odd, "rope": odd}
    model = ModelInfo(model_type="llama", config=config)
    environment = {"packages": odd, "python": odd}
    forged = manifest.model_copy(update={"environment": environment, "model": model})
    path.write_bytes(forged.with_location(manifest.location).to_bytes())
    for page in ("", "/config", "/plan", "/files", "/tensors"):
        assert http.get(f"/ui/default/run/steps/1{page}").status_code == 200, page
