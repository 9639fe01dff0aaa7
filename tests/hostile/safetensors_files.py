"""Safetensors files that lie, one way each; `python -m tests.hostile.safetensors_files` makes them.

The files are checked in beside this module, so that any reader can be tried on them; a test holds
that they are what this module makes.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parent / "safetensors"


def packed(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with this header, whatever it says, and this length, whatever is true."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def tensors(data: bytes = bytes(8), **entries: object) -> bytes:
    """A file with these header entries."""
    return packed(json.dumps(entries).encode(), data)


def tensor(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def twice(name: str) -> bytes:
    entry = json.dumps(tensor())
    return packed(f'{{"{name}": {entry}, "{name}": {entry}}}'.encode(), bytes(8))


def hostile_files() -> dict[str, bytes]:
    """Contents by name. Those named `unknown_…` are of a format we don't know; all others lie."""
    valid = tensors(a=tensor())
    return {
        "empty": b"",
        "short_length": bytes(4),
        "header_oversized": packed(b"{}", length=2**63),
        "header_above_limit": packed(b"{}", length=100_000_001),
        "header_past_end": packed(b"{}", length=1000),
        "header_not_json": packed(b"{not json}"),
        "header_not_utf8": packed(b'{"\xff\xfe": 1}'),
        "header_no_object": packed(b"[1, 2, 3]"),
        "header_leading_space": packed(b"  {}"),
        "header_nested_deep": packed(b'{"a":' * 3000 + b"1" + b"}" * 3000),
        "name_twice": twice("a"),
        "metadata_twice": twice("__metadata__"),
        "metadata_no_text": tensors(b"", __metadata__={"format": 1}),
        "metadata_list": tensors(b"", __metadata__=["pt"]),
        "entry_no_object": tensors(a=3),
        "entry_without_shape": tensors(a={"dtype": "F32", "data_offsets": [0, 8]}),
        "unknown_dtype": tensors(a=tensor("F99")),
        "unknown_dtype_list": tensors(a=tensor(["F32"])),
        "dtype_of_other_size": tensors(a=tensor("F64")),
        "shape_negative": tensors(a=tensor(shape=[-2])),
        "shape_fraction": tensors(a=tensor(shape=[2.0])),
        "shape_boolean": tensors(a=tensor(shape=[True], offsets=[0, 4])),
        "shape_text": tensors(a=tensor(shape="2")),
        "shape_overflow": tensors(a=tensor(shape=[2**62, 2**62, 4])),
        "shape_long": tensors(a=tensor(shape=[2**62] * 1000)),
        "shape_long_number": packed(
            b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', bytes(8)
        ),
        "packed_odd": tensors(bytes(2), a=tensor("F4", [3], [0, 2])),
        "offsets_three": tensors(a=tensor(offsets=[0, 8, 8])),
        "offsets_negative": tensors(a=tensor(offsets=[-8, 0])),
        "offsets_reversed": tensors(a=tensor(offsets=[8, 0])),
        "offsets_past_end": tensors(a=tensor(offsets=[8, 16])),
        "overlap": tensors(bytes(12), a=tensor(), b=tensor(offsets=[4, 12])),
        "same_bytes": tensors(a=tensor(), b=tensor()),
        "gap": tensors(bytes(20), a=tensor(), b=tensor(offsets=[12, 20])),
        "trailing_bytes": valid + b"more",
        "truncated_data": valid[:-1],
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in hostile_files().items():
        (FOLDER / f"{name}.safetensors").write_bytes(content)
