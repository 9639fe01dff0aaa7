"""Each line of `reports.py` through the calls that users make."""

import json
import warnings

import pytest
import safetensors

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.errors import ConfigError
from cairn.storage.errors import StorageError
from cairn.storage.safetensors.reader import read_header, read_tensor
from cairn.storage.store.open_files import open_files
from tests.field.reports import REPORTS
from tests.interop.families.test_config_fuzz import bases


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


LOADS = {"config": load_config, "header": load_header}


@pytest.mark.parametrize("report", REPORTS, ids=lambda one: one.name)
def test_an_input_of_a_report_is_handled_as_is_right(report, tmp_path):
    load = LOADS[report.kind]
    if report.outcome == "refused":
        with pytest.raises((ConfigError, StorageError)) as refused:
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
