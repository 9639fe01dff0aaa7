"""The first layers and tokens of a model: these show as much, in a fraction of the time."""

from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter

ARCHITECTURE = "general.architecture"
EMBEDDINGS = ("token_embd.weight", "output.weight")
TOKENS = "tokenizer.ggml.tokens"
MERGES = "tokenizer.ggml.merges"


def first_layers(source: Path, target: Path, layers: int, tokens: int = 4096) -> Path:
    """A GGUF file with what `source` has of its first layers, and of its first tokens.

    A token of a byte-level BPE is merged of earlier ones: what is left is a tokenizer.
    """
    reader = GGUFReader(source)
    architecture = reader.get_field(ARCHITECTURE).contents()
    writer = GGUFWriter(target, architecture)
    kept = set(reader.get_field(TOKENS).contents()[:tokens])
    cut = {
        f"{architecture}.block_count": lambda _: layers,
        f"{architecture}.vocab_size": lambda _: tokens,
        TOKENS: lambda names: names[:tokens],
        "tokenizer.ggml.token_type": lambda types: types[:tokens],
        MERGES: lambda merges: [one for one in merges if one.replace(" ", "") in kept],
    }
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == ARCHITECTURE:  # the writer's own
            continue
        kind, inner = field.types[0], field.types[-1]
        value = cut.get(name, lambda value: value)(field.contents())
        inner = inner if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        part, number, *_ = [*tensor.name.split("."), ""]
        data = tensor.data[:tokens] if tensor.name in EMBEDDINGS else tensor.data
        if part != "blk" or int(number) < layers:
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
