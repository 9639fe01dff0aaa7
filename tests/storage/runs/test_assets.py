import pytest

from cairn import CorruptionError
from cairn.storage.runs.records.assets import put_assets, read_asset
from cairn.storage.runs.records.layout import asset_file


def test_equal_files_are_kept_once_and_read_back(objects):
    records = put_assets(objects, {"b.json": b"{}", "a.json": b"{}", "empty": b""})
    assert [record.name for record in records] == ["a.json", "b.json", "empty"]
    assert len(objects.list("assets/")) == 2
    assert [read_asset(objects, record) for record in records] == [b"{}", b"{}", b""]


def test_a_damaged_file_is_told_and_mended_by_the_next_save(objects):
    (record,) = put_assets(objects, {"tokenizer.json": b"{}"})
    objects.write(asset_file(record.sha256), b"[]")
    with pytest.raises(CorruptionError, match=r"tokenizer\.json.*2 other bytes"):
        read_asset(objects, record)
    put_assets(objects, {"tokenizer.json": b"{}"})
    assert read_asset(objects, record) == b"{}"


def test_a_file_that_is_gone_is_told(objects):
    (record,) = put_assets(objects, {"tokenizer.json": b"{}"})
    objects.delete(asset_file(record.sha256))
    with pytest.raises(CorruptionError, match="found nothing"):
        read_asset(objects, record)
