"""Imports of somebody's weights by several processes: who reads what, and what comes of it."""

import pytest

from cairn import DecoderForCausalLM
from tests.multi_process.importing import digest_of, run
from tests.state.hf_models import save, tiny_llama

MESHES = {
    "fsdp": (1, 4, 1, 1),
    "tensors": (1, 2, 2, 1),
    "copies": (2, 2, 1, 1),
    "quantized": (1, 4, 1, 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """4 MiB in three shards: what is shared out is worth it, by far."""
    model = tiny_llama(
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=512,
        num_hidden_layers=1,
    )
    return save(model, tmp_path_factory.mktemp("llama"), max_shard_size="1500KB")


def weights(folder):
    return sorted(folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def imported(launch, folder, tmp_path_factory):
    first, *_ = weights(folder)
    cut = first.read_bytes()
    headless = b"\xff" * 8 + cut[8:]
    return run(
        launch,
        tmp_path_factory.mktemp("stores"),
        folder,
        MESHES,
        quantized="quantized",
        damaged={
            "header": {first.name: headless},
            "other": {"config.json": other(folder)},
            "refused": {},
        },
    )


def other(folder):
    config = (folder / "config.json").read_text()
    return config.replace('"num_hidden_layers": 1', '"num_hidden_layers": 2').encode()


def sizes(folder):
    """Bytes of all weights, and of headers and norms, which all processes read."""
    total = sum(path.stat().st_size for path in weights(folder))
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in weights(folder))
    return total, headers + 3 * 256 * 4


@pytest.mark.parametrize("mesh", ["fsdp", "tensors", "quantized"])
def test_a_process_reads_its_half_and_what_both_hold(mesh, imported, folder):
    total, shared = sizes(folder)
    for read in imported.read:
        assert (total - shared) / 2 <= read[mesh] <= (total - shared) / 2 + shared
    assert sum(read[mesh] for read in imported.read) >= total


def test_a_process_that_holds_all_reads_all_once(imported, folder):
    total, _ = sizes(folder)
    assert [read["copies"] for read in imported.read] == [total, total]


def test_every_bit_is_that_of_an_import_by_one_process(imported, folder):
    alone = DecoderForCausalLM.from_pretrained(folder)
    quantized = DecoderForCausalLM.from_pretrained(
        folder, quantization_method="8bit", quantization_block_size=16
    )
    expected = dict.fromkeys(MESHES, digest_of(alone))
    expected["quantized"] = digest_of(quantized.dequantize())
    for found in imported.results:
        assert {mesh: found[mesh] for mesh in MESHES} == expected


def test_what_one_process_can_not_read_fails_in_all(imported, folder):
    name = weights(folder)[0].name
    for found in imported.results:
        assert "CorruptionError" in found["header"]["kinds"]
        assert f"header/{name}" in found["header"]["text"]
        assert "a header of at most" in found["header"]["text"]


def test_a_weight_that_one_process_can_not_read_fails_in_all(imported, folder):
    for number, found in enumerate(imported.results):
        assert "StoreUnavailableError" in found["refused"]["kinds"]
        assert "gs://models/refused/model-0000" in found["refused"]["text"]
        assert found["refused"]["text"].startswith("process 1: ") == (number == 0)
    first, second = (read["refused"] for read in imported.read)
    _, shared = sizes(folder)
    assert second < shared < first


def test_processes_that_found_different_models_are_told(imported):
    for found in imported.results:
        assert "ArgumentError" in found["other"]["kinds"]
        assert "from_pretrained" in found["other"]["text"]
        assert "another value on process 1 than on process 0" in found["other"]["text"]
