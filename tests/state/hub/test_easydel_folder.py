"""Folders that older releases of EasyDeL saved are imported, without their pickles."""

import json
from pathlib import Path

import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import save_file

from cairn import ConversionError, EasyDeLBaseModule, EasyDeLState, NotACheckpointError, adopt
from cairn.state.paths import named_leaves
from tests.contract.subjects import assert_same_bits, make_decoder

RUN_HERE = {
    "attn_mechanism": "vanilla",
    "blocksize_q": 512,
    "platform": "jax",
    "sharding_axis_dims": [1, -1, 1, 1],
    "quantization_method": None,
}


FATAL = b"cos\nsystem\n(S'exit 1'\ntR."
"""A pickle that must never be read."""


def save_as_easydel(folder: Path, model: nnx.Module, norms: str = "kernel") -> None:
    """As its `save_state` did: the weights, and an optimizer whose structure is a pickle."""
    folder.mkdir()
    tensors = {}
    for leaf in named_leaves(nnx.state(model, nnx.Param)):
        owner, _, last = leaf.path.replace("/", ".").rpartition(".")
        tensors[f"{owner}.{norms if last == 'scale' else last}"] = np.asarray(leaf.leaf)
    save_file(tensors, folder / "easydel-model.parameters")
    save_file({"param_0": np.zeros(3, np.float32)}, folder / "easydel-optstate.parameters")
    (folder / "easydel-optstate.structure").write_bytes(FATAL)
    config = {**model.config.to_hf(), **RUN_HERE}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("norms", ["kernel", "scale"])
def test_an_easydel_folder_becomes_a_run_and_says_what_stays_behind(tmp_path, norms):
    model = make_decoder()
    save_as_easydel(tmp_path / "old", model, norms)
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    with pytest.warns(UserWarning, match="left behind") as caught:
        state = EasyDeLState.from_pretrained(tmp_path / "old", tx=optax.adam(1e-3))
    said = str(caught[0].message)
    for part in ("easydel-optstate.structure", "easydel-optstate.parameters", "blocksize_q"):
        assert part in said
    assert_same_bits(state.graphstate, nnx.state(model, nnx.Param))
    state.save_state(tmp_path / "run", step=7, verbose=False, wait=True)
    again = EasyDeLState.load_state(tmp_path / "run", tx=optax.adam(1e-3), verbose=False)
    assert_same_bits(again.graphstate, state.graphstate)
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before


def test_a_tensor_that_the_model_lacks_is_named(tmp_path):
    model = make_decoder()
    save_as_easydel(tmp_path / "old", model)
    tensors = {"model.extra.kernel": np.ones(3, np.float32), "model.norm.kernel": np.ones(2)}
    save_file(tensors, tmp_path / "old" / "easydel-model.parameters")
    with pytest.warns(UserWarning, match="left behind"), pytest.raises(ConversionError) as caught:
        EasyDeLBaseModule.from_pretrained(tmp_path / "old")
    text = str(caught.value)
    assert "unexpected tensor: model.extra.kernel" in text
    assert "missing tensor: model.embed_tokens.embedding" in text


def test_adoption_says_how_an_easydel_folder_is_imported(tmp_path):
    save_as_easydel(tmp_path / "old", make_decoder())
    with pytest.raises(NotACheckpointError, match=r"EasyDeLState\.from_pretrained"):
        adopt(tmp_path / "old")
