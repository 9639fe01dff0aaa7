"""What torch has saved is read through its loader of tensors alone, and nothing in it is run."""

import json
import os
import pickle
import shutil
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn import ArgumentError, ConversionError, DecoderForCausalLM, NotFoundError, open_files
from cairn.interop.weights.files import open_pretrained
from tests.state.forward import logits_of
from tests.state.hf_models import save, tiny_llama, tokens, torch_logits

BIN, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
FORMATS = {"zip": True, "legacy": False}


@pytest.fixture(scope="module")
def theirs():
    return tiny_llama()


@pytest.fixture(scope="module")
def config(theirs, tmp_path_factory):
    return save(theirs, tmp_path_factory.mktemp("llama")) / "config.json"


@pytest.fixture
def folder(config, tmp_path):
    (tmp_path / "model").mkdir()
    shutil.copy(config, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(params=FORMATS)
def write(request, folder):
    """Writes pytorch_model.bin, in both formats that torch has had."""

    def written(content, name=BIN):
        torch.save(content, folder / name, _use_new_zipfile_serialization=FORMATS[request.param])
        return folder / name

    return written


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_logits_equal_the_model_that_was_saved(theirs, folder, write):
    write(theirs.state_dict())
    model = DecoderForCausalLM.from_pretrained(folder)
    ids = tokens(2, 24)
    expected = torch_logits(theirs, ids)
    assert np.abs(logits_of(model, ids) - expected).max() <= 1e-4 * np.abs(expected).max()


def test_every_tensor_arrives_bit_by_bit(theirs, folder, write):
    base = torch.randn(12, 10)
    kinds = {
        "float32": base,
        "float16": base.half(),
        "bfloat16": base.bfloat16(),
        "float64": base.double(),
        "int64": torch.arange(3),
        "bool": torch.tensor([True, False]),
        "transposed": base.T,
        "part": base[3:9, ::2],
        "expanded": torch.ones(1).expand(3, 2),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(base),
    }
    write(OrderedDict(kinds))
    weights = open_pretrained(folder).weights
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in kinds.items()}
    for name, tensor in kinds.items():
        found = weights.read(name)
        assert found.tobytes() == bits(tensor), name
        assert found.dtype == weights.dtypes[name], name
        assert str(tensor.dtype) == f"torch.{found.dtype.name}", name
        assert found.flags.writeable, name


def test_files_of_today_are_mapped_and_older_ones_are_not(theirs, folder, write, request):
    path = write(theirs.state_dict())
    weights = open_pretrained(folder).weights
    mapped = str(path) in Path("/proc/self/maps").read_text()
    assert mapped == ("zip" in request.node.name)
    assert weights.shapes


def test_tied_weights_share_a_storage_and_are_one(folder, write):
    tied = tiny_llama(tie_word_embeddings=True)
    save(tied, folder)
    (folder / "model.safetensors").unlink()
    state = tied.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    write(state)
    model = DecoderForCausalLM.from_pretrained(folder)
    assert model.config.tie_word_embeddings
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    write(state)
    with pytest.warns(UserWarning, match="loaded as two weights"):
        assert not open_pretrained(folder).config.tie_word_embeddings


def test_shards_are_those_of_the_index(theirs, folder, write):
    state = theirs.state_dict()
    names = sorted(state)
    files = {
        name: f"pytorch_model-0000{1 + (at > 9)}-of-00002.bin" for at, name in enumerate(names)
    }
    for file in set(files.values()):
        write({name: state[name] for name in names if files[name] == file}, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    found = DecoderForCausalLM.from_pretrained(folder).to_torch()
    assert {name: bits(one) for name, one in found.items()} == {
        n: bits(t) for n, t in state.items()
    }
    astray = files | {"model.norm.weight": "pytorch_model-00001-of-00002.bin"} | {"more": BIN}
    (folder / INDEX).write_text(json.dumps({"weight_map": astray}))
    with pytest.raises(NotFoundError, match=r"pytorch_model\.bin"):
        open_pretrained(folder)
    del astray["more"]
    (folder / INDEX).write_text(json.dumps({"weight_map": astray}))
    with pytest.raises(ConversionError, match="file that the index names") as caught:
        open_pretrained(folder)
    assert caught.value.problems == (
        "pytorch_model-00001-of-00002.bin: lacks model.norm.weight, which is in "
        "pytorch_model-00002-of-00002.bin",
    )


def test_an_index_leads_to_bin_files_alone(theirs, folder):
    save_file({"a": torch.ones(2)}, folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    with pytest.raises(ConversionError, match=r"file names of this folder, \*\.bin"):
        open_pretrained(folder)


def test_safetensors_win(theirs, folder, write):
    write({"no": torch.ones(1)})
    save(theirs, folder)
    assert (
        open_pretrained(folder).weights.shapes.keys()
        == load_file(folder / "model.safetensors").keys()
    )


def test_a_store_serves_what_torch_saved(theirs, folder, write, gcs):
    write(theirs.state_dict())
    uri = f"{gcs.bucket_uri}/models/old"
    for name in ("config.json", BIN):
        open_files(folder).copy(name, open_files(uri), name)
    found = open_pretrained(uri).weights
    for name, tensor in theirs.state_dict().items():
        assert found.read(name).tobytes() == bits(tensor), name


class Code:
    """What a pickle may hold: a call that leaves a trace."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("call", [os.mkdir, eval, torch.save], ids=lambda call: call.__name__)
def test_code_is_refused_by_name_and_not_run(call, folder, write, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # who asks for it elsewhere
    trace = tmp_path / "trace"
    arguments = {
        os.mkdir: (str(trace),),
        eval: (f"open({str(trace)!r}, 'w')",),
        torch.save: (torch.ones(1), str(trace)),
    }[call]
    code = Code(call, *arguments)
    path = write({"model.norm.weight": torch.ones(32), "more": code})
    with pytest.raises(ConversionError, match="nothing that can run code") as caught:
        DecoderForCausalLM.from_pretrained(folder)
    assert str(path) in str(caught.value)
    assert f"{call.__name__}, which is no part of a tensor" in caught.value.found
    assert "weights_only" not in str(caught.value)
    assert not trace.exists()
    code.__reduce__()[0](*arguments)
    assert trace.exists()  # it would have


def test_a_bare_pickle_is_refused(folder, tmp_path):
    for number in range(2, 6):
        code = Code(os.mkdir, str(tmp_path / "trace"))
        (folder / BIN).write_bytes(pickle.dumps({"a": code}, protocol=number))
        with pytest.raises(ConversionError, match=BIN):
            open_pretrained(folder)
    assert not (tmp_path / "trace").exists()


def test_whatever_is_no_plain_tensor_is_listed(folder, write):
    write({
        "fine": torch.ones(2),
        "epoch": 3,
        "nested": {"a": torch.ones(2)},
        7: torch.ones(2),
        "sparse": torch.eye(3).to_sparse(),
    })  # fmt: skip
    with pytest.raises(ConversionError, match="names and plain tensors") as caught:
        open_pretrained(folder)
    assert [one.partition(":")[0] for one in caught.value.problems] == [
        *("epoch", "nested", "the name 7", "sparse")
    ]
    write([torch.ones(2)])
    with pytest.raises(ConversionError, match="the file: list"):
        open_pretrained(folder)


def test_integers_are_no_weights(theirs, folder, write):
    write(theirs.state_dict() | {"model.norm.weight": torch.ones(32).long()})
    with pytest.raises(ConversionError, match=r"model\.norm\.weight: expected a floating one"):
        DecoderForCausalLM.from_pretrained(folder)


def test_a_file_that_is_cut_short_is_refused(theirs, folder, write):
    path = write(theirs.state_dict())
    data = path.read_bytes()
    for end in (0, 2, 5, 60, 2000, len(data) // 2, len(data) - 20, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(ConversionError, match=BIN) as caught:
            open_pretrained(folder)
        assert "if it was cut short" in str(caught.value)


def rezipped(path, change, **options):
    """The same archive, with entries changed: (name, content) -> content, or None for none."""
    with zipfile.ZipFile(path) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in entries:
            new = change(name, content)
            if new is not None:
                archive.writestr(name, new)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda name, content: content[:-8] if name.endswith("data/0") else content, "as long as"),
        (lambda name, content: content + b"m" if name.endswith("data/0") else content, "as long"),
        (lambda name, content: None if name.endswith("data/0") else content, "data/0"),
        (lambda name, content: None if name.endswith("data.pkl") else content, "data.pkl"),
    ],
    ids=["shorter", "longer", "gone", "no_names"],
)
def test_an_archive_that_lies_of_its_entries_is_refused(change, said, folder):
    torch.save({"a": torch.ones(9), "b": torch.ones(7)}, folder / BIN)
    rezipped(folder / BIN, lambda name, content: content)
    assert open_pretrained(folder).weights.read("b").tolist() == [1] * 7
    rezipped(folder / BIN, change)
    with pytest.raises(ConversionError, match=BIN) as caught:
        open_pretrained(folder)
    assert said in str(caught.value)


def test_numbers_that_an_old_file_does_not_have_are_refused(folder):
    """torch would give what happens to lie in memory."""
    torch.save({"a": torch.ones(9000)}, folder / BIN, _use_new_zipfile_serialization=False)
    data = (folder / BIN).read_bytes()
    keys = data.rindex(b"\x80\x02]")  # the list of tensors whose numbers follow
    (folder / BIN).write_bytes(data[:keys] + pickle.dumps([], protocol=2))
    assert torch.load(folder / BIN, weights_only=True)["a"].shape == (9000,)
    with pytest.raises(ConversionError, match=rf"{BIN}: .*found tensors of 36000 bytes"):
        open_pretrained(folder)


def test_a_compressed_archive_is_refused(folder):
    torch.save({"a": torch.ones(900)}, folder / BIN)
    rezipped(folder / BIN, lambda name, content: content, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ConversionError, match="compressed entries"):
        open_pretrained(folder)


def test_a_tar_archive_is_refused(folder):
    with tarfile.open(folder / BIN, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    with pytest.raises(ConversionError, match=r"legacy \.tar format"):
        open_pretrained(folder)


def test_a_torch_whose_loader_is_not_safe_is_refused(theirs, folder, write, monkeypatch):
    write(theirs.state_dict())
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ArgumentError, match=r"torch 2\.10 or newer.*found 2\.9\.1"):
        open_pretrained(folder)
