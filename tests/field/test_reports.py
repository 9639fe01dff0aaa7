"""Each line of `reports.py` through the calls that users make."""

import json
import warnings

import jax
import numpy as np
import peft
import pytest
import safetensors
import transformers
from flax import nnx

import cairn
from cairn import DecoderConfig, DecoderForCausalLM, InteropError, StorageError, open_files
from cairn.interop.weights.peft_config import PeftConfig
from cairn.storage.safetensors.reader import read_header, read_tensor
from tests.field.reports import REPORTS
from tests.interop.families.test_config_fuzz import bases
from tests.tiny import TINY

TEXT = np.asarray([[7, 8, 9]])


def load_config(report, tmp_path):
    read = DecoderConfig.from_hf({**next(bases(report.family)), **report.value})
    assert read.to_hf().items() >= report.value.items()


def load_header(report, tmp_path):
    data = report.value
    if not isinstance(data, bytes):
        text = json.dumps(data).encode()
        data = len(text).to_bytes(8, "little") + text + bytes(4)
    (tmp_path / "x.safetensors").write_bytes(data)
    files = open_files(tmp_path)
    if report.outcome == "refused":
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(data)
    tensors = read_header(files, "x.safetensors").tensors
    expected = {name: tuple(entry["shape"]) for name, entry in safetensors.deserialize(data)}
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected
    assert [read_tensor(files, "x.safetensors", name).tolist() for name in tensors] == [[0.0]]


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def load_adapter(report, tmp_path):
    keys = {**LORA, **report.value}
    if report.outcome == "loads":
        assert peft.LoraConfig.from_peft_type(**keys).r == 4
    assert PeftConfig.read(keys, path="adapter_config.json").rank == 4


def load_generation(report, tmp_path):
    """A text ends at whichever of the ends comes first, as transformers ends it."""
    theirs = transformers.GenerationConfig.from_dict(report.value)
    assert theirs.eos_token_id == report.value["eos_token_id"]
    model = DecoderForCausalLM(TINY.replace(tie_word_embeddings=False), rngs=nnx.Rngs(0))

    def continued(settings):
        settings = {"do_sample": False, "pad_token_id": 0, **settings}
        tokens = model.generate(TEXT, max_new_tokens=6, generation_config=settings)
        return np.asarray(tokens.sequences)[0, TEXT.shape[1] :].tolist()

    free = continued({})
    ends = [free[2] if end == 5 else end for end in report.value["eos_token_id"]]
    stop = min((free.index(end) for end in ends if end in free), default=5)
    assert stop == (2 if 5 in report.value["eos_token_id"] else 5)
    assert continued({"eos_token_id": ends}) == free[: stop + 1]


def load_tree(report, tmp_path):
    cairn.Checkpointer(tmp_path / "run").save(1, {"tree": report.value}).wait()
    loaded = cairn.load(tmp_path / "run", {"tree": report.value})["tree"]
    assert jax.tree.structure(loaded) == jax.tree.structure(report.value)
    assert jax.tree.all(jax.tree.map(is_equal, loaded, report.value))


def is_equal(one, other):
    if jax.dtypes.issubdtype(getattr(one, "dtype", np.int32), jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return np.array_equal(one, other) and np.asarray(one).dtype == np.asarray(other).dtype


LOADS = {
    "config": load_config,
    "header": load_header,
    "adapter": load_adapter,
    "generation": load_generation,
    "tree": load_tree,
}


@pytest.mark.parametrize("report", REPORTS, ids=lambda one: one.name)
def test_an_input_of_a_report_is_handled_as_is_right(report, tmp_path):
    load = LOADS[report.kind]
    if report.outcome == "refused":
        with pytest.raises((InteropError, StorageError)) as refused:
            load(report, tmp_path)
        assert report.text in str(refused.value)
        if report.kind == "config":
            assert all(
                f"{key}={one!r} (" in str(refused.value) for key, one in report.value.items()
            )
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load(report, tmp_path)
    assert bool(told) == (report.outcome == "warns")
    assert all(report.text in str(one.message) for one in told)


def test_lines_have_names_of_their_own():
    assert len({one.name for one in REPORTS}) == len(REPORTS)
