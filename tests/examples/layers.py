"""The first layers of a model: an example shows as much with few, in a fraction of the time."""

from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter

ARCHITECTURE = "general.architecture"


def first_layers(source: Path, target: Path, count: int) -> Path:
    """A GGUF file with all that `source` has but the layers behind the first `count`."""
    reader = GGUFReader(source)
    architecture = reader.get_field(ARCHITECTURE).contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == ARCHITECTURE:  # the writer's own
            continue
        kind, inner = field.types[0], field.types[-1]
        value = count if name == f"{architecture}.block_count" else field.contents()
        inner = inner if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        part, number, *_ = [*tensor.name.split("."), ""]
        if part != "blk" or int(number) < count:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
