import json

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from cairn import (
    CorruptionError,
    InvalidSliceError,
    LeafNotFoundError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
    open_files,
)
from cairn.storage.safetensors.format import DTYPES, SafetensorsHeader
from cairn.storage.safetensors.reader import read_header, read_tensor
from tests.hostile.safetensors_files import FOLDER, hostile_files

REFERENCE_TOLERATES = {
    "header_leading_space",  # against the format's own text
    "metadata_twice",  # it takes the last
    "name_twice",  # likewise
}


@pytest.fixture
def files(tmp_path):
    return open_files(tmp_path)


def store(files, data, rel="x.safetensors"):
    with files.open_write(rel) as sink:
        sink.write(data)
    return rel


def test_checked_in_hostile_files_are_what_the_generator_makes():
    on_disk = {path.stem: path.read_bytes() for path in FOLDER.glob("*.safetensors")}
    assert on_disk == hostile_files()


@pytest.mark.parametrize("name", sorted(hostile_files()))
def test_hostile_file_is_refused_naming_the_file(name):
    kind = UnsupportedFormatError if name.startswith("unknown") else CorruptionError
    with pytest.raises(kind) as caught:
        read_header(open_files(FOLDER), f"{name}.safetensors")
    error: StorageError = caught.value
    assert f"{name}.safetensors" in error.path
    assert error.expected
    assert error.found
    assert error.next_step
    assert len(str(error)) < 2000


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ('{"a":{"dtype":"F32","shape":[SIZE,SIZE,0],"data_offsets":[0,0]}}', CorruptionError),
        ('{"a":{"dtype":"F32","shape":[0,SIZE,SIZE],"data_offsets":[0,0]}}', CorruptionError),
        ('{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', CorruptionError),
        ('{"__metadata__":{"format":"\\udfff"}}', CorruptionError),
    ],
)
def test_header_of_what_no_array_or_text_can_be_is_refused(files, header, kind):
    data = header.replace("SIZE", str(2**62)).encode()
    rel = store(files, len(data).to_bytes(8, "little") + data)
    with pytest.raises(kind) as caught:
        read_header(files, rel)
    assert str(caught.value).encode()


def test_tensor_of_more_axes_than_an_array_can_have_is_listed_and_not_read(files):
    entry = {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}
    text = json.dumps({"a": entry}).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(4)
    rel = store(files, data)
    ((_, reference),) = safetensors.deserialize(data)
    assert read_header(files, rel).tensors["a"].shape == tuple(reference["shape"])
    with pytest.raises(UnsupportedFormatError, match="a: expected at most 64"):
        read_tensor(files, rel, "a")


@pytest.mark.parametrize("name", sorted(hostile_files().keys() - REFERENCE_TOLERATES))
def test_the_reference_reader_refuses_the_same_files(name):
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(hostile_files()[name])


def test_reads_what_the_reference_writes(files):
    numbers = np.random.default_rng(0)
    tensors = {
        str(dtype): torch.from_numpy(numbers.integers(0, 255, 48, dtype=np.uint8))
        .view(dtype)
        .reshape(2, -1)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
            torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
            torch.float8_e8m0fnu, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
            torch.uint16, torch.uint32, torch.uint64,
        )
    } | {"bool": torch.tensor([True, False]), "scalar": torch.tensor(3.0),
         "empty": torch.zeros(0, 3)}  # fmt: skip
    rel = store(files, safetensors.torch.save(tensors, metadata={"format": "pt", "x": "é"}))
    header = read_header(files, rel)
    assert header.metadata == {"format": "pt", "x": "é"}
    assert {tensor.code for tensor in header.tensors.values()} == set(DTYPES)
    for name, expected in tensors.items():
        found = read_tensor(files, rel, name, header=header)
        assert found.shape == tuple(expected.shape)
        assert found.flags.writeable
        words = expected.reshape(-1).view(torch.uint8).numpy()
        assert found.reshape(-1).view(np.uint8).tobytes() == words.tobytes(), name


def test_reads_rows_alone(root_uri):
    files = open_files(root_uri)
    matrix = np.arange(30, dtype=np.float32).reshape(10, 3)
    rel = store(files, safetensors.numpy.save({"a": np.ones(5), "m": matrix}))
    np.testing.assert_array_equal(read_tensor(files, rel, "m", rows=(2, 5)), matrix[2:5])
    assert read_tensor(files, rel, "m", rows=(4, 4)).shape == (0, 3)
    with pytest.raises(InvalidSliceError, match="rows within"):
        read_tensor(files, rel, "m", rows=(2, 11))


def test_packed_dtype_is_listed_but_not_decoded(files):
    header = json.dumps({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    rel = store(files, len(header).to_bytes(8, "little") + header + bytes(2))
    assert read_header(files, rel).tensors["a"].nbytes == 2
    with pytest.raises(UnsupportedFormatError, match="F4"):
        read_tensor(files, rel, "a")


def test_header_alone_is_a_valid_file(files):
    rel = store(files, safetensors.numpy.save({}))
    assert read_header(files, rel) == SafetensorsHeader({}, {})


def test_unknown_tensor_and_unknown_file_are_not_found(files):
    rel = store(files, safetensors.numpy.save({"a": np.ones(5)}))
    with pytest.raises(LeafNotFoundError, match="no such tensor"):
        read_tensor(files, rel, "b")
    with pytest.raises(NotFoundError):
        read_header(files, "absent.safetensors")


def test_file_that_shrinks_after_its_header_was_read_is_corrupt(files, tmp_path):
    rel = store(files, safetensors.numpy.save({"a": np.ones(5)}))
    header = read_header(files, rel)
    (tmp_path / rel).write_bytes((tmp_path / rel).read_bytes()[:-8])
    with pytest.raises(CorruptionError, match="ends early"):
        read_tensor(files, rel, "a", header=header)
