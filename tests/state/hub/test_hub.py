"""Loading and writing Hugging Face folders: stores, placement, the hub, what is refused."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file
from transformers import LlamaForCausalLM

from cairn import (
    ArgumentError,
    ConfigError,
    ConversionError,
    CorruptionError,
    DecoderForCausalLM,
    EasyDeLBaseModule,
    EasyDeLState,
    NotFoundError,
    OptimizerError,
    Run,
    ShardingError,
    make_optimizer,
    open_files,
    parse_uri,
    promote_step,
)
from cairn.state.paths import named_leaves
from cairn.state.states.load_options import LoadOptions
from tests.programs.program import run
from tests.state import hub_server
from tests.state.gguf_files import write_llama
from tests.state.hf_models import save, tiny_llama, tokens
from tests.state.my_model import MyModel, my_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = save(tiny_llama(), tmp_path_factory.mktemp("hub"), max_shard_size="20KB")
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    return path


def same_params(one, two):
    ones, twos = (named_leaves(nnx.state(model)) for model in (one, two))
    assert [n.path for n in ones] == [n.path for n in twos]
    for a, b in zip(ones, twos, strict=True):
        np.testing.assert_array_equal(np.asarray(a.leaf), np.asarray(b.leaf), err_msg=a.path)


def test_weights_arrive_sharded_and_no_device_holds_the_model(folder):
    model = DecoderForCausalLM.from_pretrained(folder, sharding_axis_dims=(1, 4, 2, 1))
    leaves = [named.leaf for named in named_leaves(nnx.state(model))]
    total = sum(leaf.nbytes for leaf in leaves)
    for device in jax.devices():
        held = sum(
            s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == device
        )
        assert held < total / 4
    assert model.config.sharding_axis_dims == (1, 4, 2, 1)
    same_params(model, DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False))


def test_one_device_on_request(folder):
    device = jax.devices()[3]
    model = DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False, device=device)
    assert {leaf.sharding.device_set == {device} for leaf in jax.tree.leaves(model.params)} == {
        True
    }
    with pytest.raises(ArgumentError, match="auto_shard_model"):
        DecoderForCausalLM.from_pretrained(folder, device=device)


def test_a_mesh_that_heads_do_not_divide_is_refused_with_both_counts(folder):
    with pytest.raises(ShardingError, match="2 key/value heads do not divide by tp=4"):
        DecoderForCausalLM.from_pretrained(folder, sharding_axis_dims=(1, 2, 4, 1))


def test_the_base_class_finds_the_model_class(folder):
    assert type(EasyDeLBaseModule.from_pretrained(folder)) is DecoderForCausalLM


def test_options_of_ours_and_of_the_config_are_taken(folder):
    model = DecoderForCausalLM.from_pretrained(
        folder,
        config_kwargs={
            "scan_layers": True,
            "rms_norm_eps": 1e-3,
            "tokenizer_files": {"tokenizer.json": b"{}"},
        },
    )
    assert model.config.scan_layers
    assert model.config.tokenizer_files["tokenizer.json"] == b"{}"
    assert model.config.rms_norm_eps == 1e-3
    assert model.model.norm.eps == 1e-3


def test_config_kwargs_that_nothing_reads_are_refused_by_name(folder):
    wrong = {"max_position_embedding": 64, "rms_norm_eps": 1e-3}
    with pytest.raises(ConfigError, match=r"config_kwargs: .*found unknown: max_position_embed"):
        DecoderForCausalLM.from_pretrained(folder, config_kwargs=wrong)
    known = {"sep_token_id": 3}  # carried along: exports have it
    model = DecoderForCausalLM.from_pretrained(folder, config_kwargs=known)
    assert model.config.to_hf()["sep_token_id"] == 3


def test_a_folder_in_a_store_serves_both_ways(folder, gcs):
    model = DecoderForCausalLM.from_pretrained(folder)
    uri = f"{gcs.bucket_uri}/models/tiny"
    written = model.save_pretrained(uri, max_shard_size="20KB")
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(written)
    again = DecoderForCausalLM.from_pretrained(uri)
    same_params(model, again)
    assert again.config.tokenizer_files["tokenizer.json"] == b'{"version": "1.0"}'


def test_a_gguf_in_a_store_is_read(gcs, tmp_path):

    path = write_llama(tmp_path / "tiny.gguf", tiny_llama())
    open_files(tmp_path).copy("tiny.gguf", open_files(gcs.bucket_uri), "tiny.gguf")
    same_params(
        DecoderForCausalLM.from_pretrained(f"{gcs.bucket_uri}/tiny.gguf"),
        DecoderForCausalLM.from_pretrained(path),
    )


@pytest.mark.parametrize("kind", ["folder", "gguf", "alias"])
def test_every_source_is_sharded_cast_and_quantized_in_one_call(kind, folder, tmp_path, saved_run):
    source = {"folder": folder, "alias": f"{saved_run}@good"}.get(kind)
    if kind == "gguf":
        source = write_llama(tmp_path / "tiny.gguf", tiny_llama())
    mesh = {"sharding_axis_dims": (1, 4, 2, 1), "param_dtype": "bfloat16", "dtype": "bfloat16"}
    model = DecoderForCausalLM.from_pretrained(
        source,
        quantization_method="8bit",
        quantization_block_size=16,
        quantization_pattern="mlp",
        **mesh,
    )
    assert (model.dtype, model.module_dtype) == ("bfloat16", "bfloat16")
    assert model.config.sharding_axis_dims == (1, 4, 2, 1)
    kernel = model.model.layers[0].mlp.up_proj.kernel.array.qvalue.get_value()
    assert kernel.dtype == "int8"
    assert kernel.addressable_shards[0].data.size == kernel.size / 8
    assert "array" not in str(nnx.to_pure_dict(nnx.state(model.model.layers[0].self_attn)).keys())
    plain = DecoderForCausalLM.from_pretrained(source, **mesh)
    assert not plain.is_quantized
    same_params(model, plain.quantize("8bit", 16, "mlp"))


@pytest.fixture(scope="module")
def saved_run(folder, tmp_path_factory):
    """A run of the folder's model: step 4 has the alias "good", step 5 other weights."""
    uri = str(tmp_path_factory.mktemp("runs") / "tiny")
    model = DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    model.to_state().save_state(uri, step=4, wait=True, verbose=False)
    run = Run.open(parse_uri(uri))
    promote_step(run, 4, "good", expect=None, by="me")
    model.model.norm.scale.set_value(model.model.norm.scale.get_value() + 1)
    model.to_state().save_state(uri, step=5, wait=True, verbose=False)
    return uri


def test_a_run_its_alias_and_its_steps_are_models_too(folder, saved_run):
    first = DecoderForCausalLM.from_pretrained(folder)
    for source in (f"{saved_run}@good", f"{saved_run}/steps/4"):
        model = EasyDeLBaseModule.from_pretrained(source)
        assert type(model) is DecoderForCausalLM
        assert len(model.model.norm.scale.get_value().sharding.device_set) == 8
        same_params(model, first)
        assert model.config.tokenizer_files["tokenizer.json"] == b'{"version": "1.0"}'
    latest = DecoderForCausalLM.from_pretrained(parse_uri(saved_run), auto_shard_model=False)
    scales = [np.asarray(one.model.norm.scale.get_value()) for one in (latest, first)]
    np.testing.assert_allclose(scales[0], scales[1] + 1, atol=1e-6)
    device = jax.devices()[2]
    model = DecoderForCausalLM.from_pretrained(saved_run, auto_shard_model=False, device=device)
    assert model.model.norm.scale.get_value().devices() == {device}


def test_what_a_run_does_not_have_is_said_so(saved_run):
    for source in (f"{saved_run}@better", f"{saved_run}/steps/9"):
        with pytest.raises(FileNotFoundError, match=r"better|9"):
            EasyDeLBaseModule.from_pretrained(source)
    with pytest.raises(ArgumentError, match="revision: expected a hub id with it; found a Cairn"):
        EasyDeLBaseModule.from_pretrained(saved_run, revision="main")
    with pytest.raises(ArgumentError, match=r"checkpoint of a MyModel; found one of a Decoder"):
        MyModel.from_pretrained(saved_run)


def test_links_as_in_the_hubs_cache_are_followed(folder, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        (blobs / f"blob{number}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/blob{number}")
    same_params(
        DecoderForCausalLM.from_pretrained(snapshot), DecoderForCausalLM.from_pretrained(folder)
    )


def test_a_smaller_save_into_the_same_folder_leaves_no_stale_weights(folder, tmp_path):
    model = DecoderForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    model.save_pretrained(tmp_path, float_dtype="bfloat16")
    weights = sorted(path.name for path in tmp_path.glob("model*"))
    assert weights == ["model.safetensors"]
    assert {a.dtype.name for a in load_file(tmp_path / "model.safetensors").values()} == {
        "bfloat16"
    }
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_config_kwargs_do_not_turn_one_architecture_into_another(folder, tmp_path):
    def copy_with(**changes):
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        data = json.loads((folder / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(data))
        return tmp_path

    other = copy_with(model_type="mistral", architectures=["MistralForCausalLM"])
    for key, value in (("model_type", "llama"), ("architectures", ["LlamaForCausalLM"])):
        with pytest.raises(ConfigError, match=f"config_kwargs: .*another architecture: {key}="):
            DecoderForCausalLM.from_pretrained(other, config_kwargs={key: value})
    coded = copy_with(auto_map={"AutoModelForCausalLM": "own.Own"})
    with pytest.raises(ConfigError, match="auto_map"):
        DecoderForCausalLM.from_pretrained(coded)
    with pytest.raises(ConfigError, match="another architecture: auto_map=None"):
        DecoderForCausalLM.from_pretrained(coded, config_kwargs={"auto_map": None})
    odd = copy_with(sliding_window=4)
    with pytest.raises(ConfigError, match="sliding_window=4"):
        DecoderForCausalLM.from_pretrained(odd)
    taken = DecoderForCausalLM.from_pretrained(odd, config_kwargs={"sliding_window": None})
    same_params(taken, DecoderForCausalLM.from_pretrained(folder))


def test_files_that_a_save_does_not_write_stay(folder, tmp_path):
    model = DecoderForCausalLM.from_pretrained(folder)
    users = (
        "model_ema.safetensors",
        "model-best.safetensors",
        "model-00001-of-best.safetensors",
        "model.ema.safetensors",
        "adapter_model.safetensors",
        "notes.txt",
    )
    for name in users:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "model-00007-of-00009.safetensors").mkdir()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    model.save_pretrained(tmp_path)
    assert all((tmp_path / name).read_bytes() == b"mine" for name in users)
    assert (tmp_path / "model-00007-of-00009.safetensors").is_dir()
    assert sorted(path.name for path in tmp_path.glob("model-*-of-0*")) == [
        "model-00007-of-00009.safetensors"
    ]
    same_params(DecoderForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("name", ["additional_chat_templates/rag.jinja", "tiktoken.model"])
def test_files_of_the_tokenizer_that_stay_behind_are_named(folder, tmp_path, name):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match=f"left behind: {name.partition('/')[0]}"):
        DecoderForCausalLM.from_pretrained(tmp_path)


def test_a_stale_index_beside_one_file_counts_for_nothing(folder, tmp_path):
    model = DecoderForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    same_params(DecoderForCausalLM.from_pretrained(tmp_path), model)
    assert LlamaForCausalLM.from_pretrained(tmp_path) is not None


def test_shards_beside_one_file_are_refused_by_name(folder, tmp_path):
    model = DecoderForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors").write_bytes(whole)
    with pytest.raises(ConversionError, match=r"both: model\.safetensors and model-00001-of"):
        DecoderForCausalLM.from_pretrained(tmp_path)


def test_a_users_own_model_is_saved_and_loaded_under_its_own_names(tmp_path):
    model = my_model()
    model.save_pretrained(tmp_path)
    assert "layers.0.kernel" in load_file(tmp_path / "model.safetensors")
    again = MyModel.from_pretrained(tmp_path)
    assert again.config == model.config.replace(sharding_axis_dims=(2, 4, 1, 1))
    for path, leaf in ((n.path, n.leaf) for n in named_leaves(nnx.state(model, nnx.Param))):
        found = {n.path: n.leaf for n in named_leaves(nnx.state(again, nnx.Param))}
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(leaf))
    again(tokens(1, 3))
    with pytest.raises(ArgumentError, match="own class"):
        EasyDeLBaseModule.from_pretrained(tmp_path)


def test_weights_in_forms_that_are_not_read_are_named(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "consolidated.00.pth").write_bytes(b"\x80\x04.")
    with pytest.raises(NotFoundError, match=r"consolidated\.00\.pth.*that can run code is never"):
        DecoderForCausalLM.from_pretrained(tmp_path)


def test_an_empty_folder_and_a_wrong_path_are_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        DecoderForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        DecoderForCausalLM.from_pretrained(str(tmp_path / "nowhere" / "deep"))


@pytest.mark.parametrize(
    ("index", "error"),
    [
        ({"weight_map": {"a": "../secret.safetensors"}}, ConversionError),
        ({"weight_map": {"a": "/etc/passwd"}}, ConversionError),
        ({"weight_map": {}}, ConversionError),
        ({}, ConversionError),
        ({"weight_map": {"a": "model-00009-of-00009.safetensors"}}, NotFoundError),
    ],
)
def test_an_index_that_leads_astray_is_refused(index, error, folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(error):
        DecoderForCausalLM.from_pretrained(tmp_path)


def test_a_truncated_shard_is_refused(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    victim = next(p for p in sorted(tmp_path.glob("*.safetensors")))
    victim.write_bytes(victim.read_bytes()[:-8])
    with pytest.raises(CorruptionError, match=victim.name):
        DecoderForCausalLM.from_pretrained(tmp_path)


def test_config_that_is_no_json_or_of_no_known_family_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConversionError, match="JSON"):
        DecoderForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(ConfigError, match="unheard-of"):
        DecoderForCausalLM.from_pretrained(tmp_path)


def run_with_hub(code, hub, home, **more):
    """Runs Python code in a process of its own, whose hub is `hub`."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_of_the_tests",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **more,
    }
    done = run(["-c", code], env=environment, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_hub_id_is_downloaded_by_the_real_client(folder, tmp_path):
    code = """
from cairn.interop.weights.files import open_pretrained
from cairn.storage.errors import NotFoundError
found = open_pretrained("org/tiny")
assert found.config.num_hidden_layers == 2, found.config
assert found.weights.read("model.norm.weight").shape == (32,)
assert "tokenizer.json" in found.config.tokenizer_files
try:
    open_pretrained("org/none")
except NotFoundError as error:
    assert "org/none" in str(error)
else:
    raise SystemExit("found a model that is not there")
"""
    with hub_server.serve(folder) as hub:
        run_with_hub(code, hub, tmp_path)


@pytest.fixture
def crowded(folder, tmp_path):
    """A repository as they are: the weights in every format, and some of them twice."""
    repository = tmp_path / "crowded"
    repository.mkdir()
    for file in folder.iterdir():
        (repository / file.name).write_bytes(file.read_bytes())
    weights = next(repository.glob("model-*.safetensors")).read_bytes()
    for name in (
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "original/params.json",
        "original/model.safetensors",
        "onnx/model.onnx",
        "tf_model.h5",
        "flax_model.msgpack",
        "model.Q4_K_M.gguf",
        "consolidated.safetensors",
        "model.fp16.safetensors",
        "adapter_model.safetensors",
        "README.md",
    ):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_bytes(weights)
    return repository


LOAD = """
from cairn import DecoderForCausalLM
found = DecoderForCausalLM.from_pretrained("hf://org/tiny", auto_shard_model=False)
again = DecoderForCausalLM.from_pretrained("org/tiny", revision="v1", auto_shard_model=False)
cached = DecoderForCausalLM.from_pretrained(
    "org/tiny", revision="v1", local_files_only=True, auto_shard_model=False
)
assert found.config == again.config == cached.config
"""


def test_of_a_hub_just_the_files_that_are_read_are_downloaded_each_once(crowded, folder, tmp_path):
    used = sorted(p.name for p in folder.iterdir())
    with hub_server.serve(crowded) as hub:
        run_with_hub(LOAD, hub, tmp_path / "home")
        assert hub.downloaded[0] == "config.json"
        assert sorted(hub.downloaded) == used
        assert {revision for _, revision, _ in hub.asked} == {hub_server.COMMIT}
    (crowded / "model.safetensors.index.json").unlink()
    for shard in crowded.glob("model-*"):
        shard.unlink()
    model = DecoderForCausalLM.from_pretrained(folder)
    model.save_pretrained(crowded)
    with hub_server.serve(crowded) as hub:
        run_with_hub(LOAD, hub, tmp_path / "another home")
        weights = [name for name in hub.downloaded if name.endswith(".safetensors")]
        assert weights == ["model.safetensors"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "unheard-of"}, "unheard-of"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_a_config_that_is_refused_costs_no_more_than_itself(changes, said, crowded, tmp_path):
    data = json.loads((crowded / "config.json").read_text()) | changes
    (crowded / "config.json").write_text(json.dumps(data))
    code = f"""
from cairn import EasyDeLState
from cairn.interop.errors import ConfigError
try:
    EasyDeLState.load_state("hf://org/tiny", verbose=False)
except ConfigError as error:
    assert {said!r} in str(error), error
else:
    raise SystemExit("loaded")
"""
    with hub_server.serve(crowded) as hub:
        run_with_hub(code, hub, tmp_path / "home")
        assert hub.downloaded == ["config.json"]


def test_of_a_hub_without_safetensors_what_torch_saved_is_downloaded(folder, tmp_path):
    repository = tmp_path / "old"
    repository.mkdir()
    (repository / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save(tiny_llama().state_dict(), repository / "pytorch_model.bin")
    (repository / "consolidated.00.pth").write_bytes(b"\x80\x04.")
    with hub_server.serve(repository) as hub:
        run_with_hub(LOAD, hub, tmp_path / "home")
        assert hub.downloaded == ["config.json", "pytorch_model.bin"]
    code = (
        'from cairn.interop.weights.files import open_pretrained as o; o("org/tiny").weights.shapes'
    )
    run_with_hub(code, hub, tmp_path / "home")  # nobody listens there any more


def test_what_torch_saved_is_not_downloaded_where_torch_is_missing(folder, tmp_path):
    repository = tmp_path / "old"
    repository.mkdir()
    (repository / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save(tiny_llama().state_dict(), repository / "pytorch_model.bin")
    code = """
import sys
sys.modules["torch"] = None
from cairn.interop.errors import ArgumentError
from cairn.interop.weights.files import open_pretrained
try:
    open_pretrained("org/tiny")
except ArgumentError as error:
    assert "pip install 'cairn-checkpoints[torch]'" in str(error), error
else:
    raise SystemExit("loaded")
"""
    with hub_server.serve(repository) as hub:
        run_with_hub(code, hub, tmp_path / "home")
        assert hub.downloaded == ["config.json"]


def test_a_hub_without_a_config_says_what_is_there(crowded, tmp_path):
    (crowded / "config.json").unlink()
    code = """
from cairn.interop.weights.files import open_pretrained
from cairn.storage.errors import NotFoundError
try:
    open_pretrained("org/tiny")
except NotFoundError as error:
    assert "expected a model's folder, with config.json, found README.md" in str(error), error
else:
    raise SystemExit("loaded")
"""
    with hub_server.serve(crowded) as hub:
        run_with_hub(code, hub, tmp_path / "home")
        assert hub.downloaded == []


def test_a_cache_that_lacks_a_shard_is_refused_when_nothing_may_be_downloaded(crowded, tmp_path):
    code = """
from pathlib import Path
from cairn.interop.weights.files import open_pretrained
from cairn.storage.errors import NotFoundError
open_pretrained("org/tiny")
(shard, *_) = Path({home!r}).rglob("snapshots/*/model-00001*")
shard.unlink()
for name, arguments in (("org/tiny", {{"local_files_only": True}}), ("org/other", {{}})):
    try:
        open_pretrained(name, **arguments)
    except NotFoundError as error:
        assert "model-00001" in str(error) or name in str(error), error
    else:
        raise SystemExit("loaded")
open_pretrained("org/tiny")  # fetched again
"""
    with hub_server.serve(crowded) as hub:
        home = str(tmp_path / "home")
        run_with_hub(code.format(home=home), hub, home)


def test_what_was_downloaded_is_loaded_when_the_hub_can_not_be_had(crowded, tmp_path):
    code = """
from cairn.interop.weights.files import open_pretrained
from cairn.storage.errors import NotFoundError
found = open_pretrained("org/tiny")
assert found.weights.read("model.norm.weight").shape == (32,)
assert "tokenizer.json" in found.config.tokenizer_files
try:
    open_pretrained("org/tiny", revision="v1")
except NotFoundError as error:
    assert "org/tiny" in str(error), error
else:
    raise SystemExit("loaded a revision that was never downloaded")
"""
    home = tmp_path / "home"
    with hub_server.serve(crowded) as hub:
        run_with_hub(
            'from cairn.interop.weights.files import open_pretrained as o; o("org/tiny")', hub, home
        )
    run_with_hub(code, hub, home)  # nobody listens there any more
    run_with_hub(code, hub, home, HF_HUB_OFFLINE="1")


def test_of_an_adapter_on_a_hub_the_config_comes_first_and_then_its_weights_alone(folder, tmp_path):
    repository = tmp_path / "adapter"
    model = DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    model.apply_lora_to_layers(2, 4.0, "q_proj").save_adapter(repository)
    for name in ("adapter_model.bin", "optimizer.pt", "model.safetensors"):
        (repository / name).write_bytes(b"more")
    code = f"""
from cairn import DecoderForCausalLM
from cairn.interop.errors import ConversionError
model = DecoderForCausalLM.from_pretrained({str(folder)!r}, auto_shard_model=False)
try:
    model.load_adapter("org/tiny")
except ConversionError as error:
    assert "use_dora" in str(error), error
else:
    assert (model.lora.rank, model.lora.alpha) == (2, 4.0), model.lora
"""
    with hub_server.serve(repository) as hub:
        run_with_hub(code, hub, tmp_path / "home")
        assert hub.downloaded == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((repository / "adapter_config.json").read_text())
    (repository / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with hub_server.serve(repository) as hub:
        run_with_hub(code, hub, tmp_path / "another home")
        assert hub.downloaded == ["adapter_config.json"]


def test_a_state_asks_the_hub_for_what_is_named_as_the_hubs_and_for_nothing_else(folder, tmp_path):
    code = """
from cairn import EasyDeLState, TrainState
from cairn.storage.errors import RunNotFoundError, NotFoundError
state = EasyDeLState.load_state("hf://org/tiny", verbose=False)
assert state.model.config.num_hidden_layers == 2
assert EasyDeLState.from_pretrained("hf://org/tiny", auto_shard_model=False).step == 0
assert EasyDeLState.from_pretrained("org/tiny", auto_shard_model=False).step == 0
for name in ("hf://org/none", "hf://org/tiny/more", "hf://"):
    try:
        EasyDeLState.load_state(name, verbose=False)
    except NotFoundError as error:
        assert name.removeprefix("hf://") in str(error), error
    else:
        raise SystemExit(f"found {name}")
try:
    EasyDeLState.load_state("org/tiny", verbose=False)
except RunNotFoundError as error:
    assert str(error).endswith("The hub's repository of this name is hf://org/tiny."), error
    assert "/org/tiny: expected a folder with run.json, found nothing" in str(error), error
else:
    raise SystemExit("asked the hub for a path")
"""
    with hub_server.serve(folder) as hub:
        run_with_hub(code, hub, tmp_path)


def test_load_state_hands_what_is_for_the_hub_on_to_from_pretrained(folder, tmp_path):
    code = """
from cairn import EasyDeLState
from cairn.storage.errors import NotFoundError
state = EasyDeLState.load_state(
    "hf://org/tiny",
    revision="v1",
    token="hf_of_the_call",
    tx_init={"name": "sgd", "learning_rate": 0.1},
    verbose=False,
)
assert state.tx is not None and state.opt_state is not None and state.tx_init["name"] == "sgd"
for arguments in ({"revision": "v2"}, {"revision": "main", "local_files_only": True}):
    try:
        EasyDeLState.load_state("hf://org/tiny", **arguments, verbose=False)
    except NotFoundError as error:
        assert "org/tiny" in str(error), error
    else:
        raise SystemExit(f"loaded {arguments}")
cached = EasyDeLState.load_state(
    "hf://org/tiny", revision="v1", local_files_only=True, verbose=False
)
assert cached.model.config == state.model.config
"""
    with hub_server.serve(folder) as hub:
        run_with_hub(code, hub, tmp_path)
        assert "Bearer hf_of_the_call" in hub.tokens


def test_what_is_asked_of_the_hub_is_refused_by_name_for_anything_else(folder, saved_run, gcs):
    sources = {"a Cairn run": saved_run, "the folder": folder, "the file": folder / "w.gguf"}
    for found, source in sources.items():
        with pytest.raises(ArgumentError, match=f"revision: .*hub id with it; found {found}"):
            EasyDeLState.load_state(source, revision="main", verbose=False)
        with pytest.raises(ArgumentError, match="revision, token: expected a hub id with it"):
            DecoderForCausalLM.from_pretrained(source, revision="main", token="hf_secret")
    with pytest.raises(ArgumentError, match=r"token: .*found a Cairn run") as refused:
        EasyDeLState.from_pretrained(saved_run, token="hf_secret")
    assert "hf_secret" not in str(refused.value)
    assert "hf_secret" not in repr(LoadOptions(token="hf_secret"))
    here = DecoderForCausalLM.from_pretrained(folder, local_files_only=True)
    stored = f"{gcs.bucket_uri}/models/there"
    here.save_pretrained(stored)
    with pytest.raises(ArgumentError, match=r"local_files_only: .*found the folder gs://"):
        EasyDeLState.load_state(stored, local_files_only=True, verbose=False)


def test_an_unknown_argument_is_refused_with_the_one_that_it_is_like(folder, saved_run):
    said = r"found unknown: colour, revison \(did you mean revision\?\)"
    for source in (folder, saved_run):
        with pytest.raises(ArgumentError, match=said):
            EasyDeLState.load_state(source, revison="main", colour="red")


def test_an_optimizer_that_is_only_described_is_built(folder, saved_run):
    description = {"name": "sgd", "learning_rate": 0.5}
    loaded = EasyDeLState.load_state(saved_run, tx_init=description, verbose=False)
    fresh = EasyDeLState.from_pretrained(folder, tx_init=description, auto_shard_model=False)
    for state in (loaded, fresh):
        assert state.tx is make_optimizer(**description)[0]
        assert state.tx_init == description
    assert fresh.opt_state is not None
    with pytest.raises(OptimizerError, match="sgdd"):
        EasyDeLState.load_state(folder, tx_init={"name": "sgdd"}, verbose=False)


def test_a_hub_id_is_loaded_sharded_cast_and_quantized(folder, tmp_path):
    """In a process of its own: the client reads HF_ENDPOINT when it is imported."""
    code = f"""
import jax, numpy as np
from flax import nnx
from cairn import DecoderForCausalLM
from cairn.state.paths import named_leaves
options = dict(
    sharding_axis_dims=(1, 4, 2, 1),
    param_dtype="bfloat16",
    quantization_method="nf4",
    quantization_block_size=16,
)
found = DecoderForCausalLM.from_pretrained("org/tiny", revision="main", **options)
assert found.is_quantized and found.module_dtype == "bfloat16", found.module_dtype
assert len(found.model.norm.scale.get_value().sharding.device_set) == 8
local = DecoderForCausalLM.from_pretrained({str(folder)!r}, **options)
for one, other in zip(named_leaves(nnx.state(found)), named_leaves(nnx.state(local)), strict=True):
    assert np.asarray(one.leaf).tobytes() == np.asarray(other.leaf).tobytes(), one.path
"""
    with hub_server.serve(folder) as hub:
        run_with_hub(code, hub, tmp_path)


def test_a_torch_model_is_refused_unless_every_parameter_has_its_tensor(folder, monkeypatch):
    model = DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    tensors = model.to_torch()
    tensors["model.more"] = tensors.pop("model.norm.weight")
    monkeypatch.setattr(model, "to_torch", lambda **_: tensors)
    with pytest.raises(ConversionError) as refused:
        model.to_pytorch()
    assert refused.value.problems == (
        "missing_keys: model.norm.weight",
        "unexpected_keys: model.more",
    )


def test_a_torch_model_shares_no_memory_with_ours(folder):
    model = DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    before = [np.array(leaf.leaf) for leaf in named_leaves(nnx.state(model))]
    theirs = model.to_pytorch()
    for parameter in theirs.parameters():
        parameter.data.zero_()
    after = [np.asarray(leaf.leaf) for leaf in named_leaves(nnx.state(model))]
    assert any(leaf.any() for leaf in before)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
