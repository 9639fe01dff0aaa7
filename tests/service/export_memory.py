"""How much memory exports really take; a test starts it and reads it.

    python -m tests.service.export_memory FOLDER

Its control plane runs in this process. Of each export it tells as JSON what the job was allowed,
and by how many bytes the process was larger, at most, than after a small export of the same kind.
"""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from cairn import Checkpointer, ModelInfo
from cairn.state.checkpointing.trees import nest
from tests.faults.report import is_long
from tests.service.jobs import CONFIG, serving, shapes_of, watch
from tests.service.resident import reading

CONVERT = "/v1/roots/default/runs/{}/checkpoints/1:convert"
LARGE = CONFIG.replace(
    num_hidden_layers=1,
    vocab_size=512,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=128,
)
"""A layer of 230 MiB in float32. Its largest matrices are of 64 MiB, as much as is read at once."""
BOX = 64


def quantized_leaves(config):
    """Codes of 8 bits, and a scale for 64 of them, in place of every kernel."""
    numbers = np.random.default_rng(0)
    leaves = {}
    for path, shape in shapes_of(config).items():
        if path.endswith("/kernel"):
            scales = (shape[0] // BOX, shape[1])
            codes = numbers.integers(-127, 127, shape, np.int8)
            leaves[f"{path}/array/qvalue"] = codes
            scale = numbers.random(scales, np.float32)
            leaves[f"{path}/array/scale"] = scale.astype(ml_dtypes.bfloat16)
        else:
            leaves[path] = np.ones(shape, ml_dtypes.bfloat16)
    return leaves


def plain_leaves(config):
    numbers = np.random.default_rng(0)
    return {path: numbers.random(shape, np.float32) for path, shape in shapes_of(config).items()}


def save(run, config, leaves):
    info = ModelInfo(model_type="llama", model_class="DecoderForCausalLM", config=config.to_dict())
    with Checkpointer(run) as checkpointer:
        checkpointer.save(1, {"model": nest(leaves)}, model=info).wait()


def measure(http, run, body):
    """An export's bytes over what the process has now, at most; or the refusal of too little."""
    Path("/proc/self/clear_refs").write_text("5")
    before = reading("VmRSS")
    ended = watch(http, http.post(CONVERT.format(run), json=body).json()["id"])
    if ended["state"] != "succeeded":
        return ended["error"]["detail"]
    return reading("VmHWM") - before


def least(http, run, body):
    """The smallest `memory` that is accepted, as the refusal of too little tells it."""
    told = measure(http, run, {**body, "memory": "1MB"})
    return int(str(told).split("expected at least ")[1].split()[0])


EVERY_EXPORT = {
    "plain, one file": ("plain", {}, 1),
    "plain, two files at once": ("plain", {"max_shard_size": "70MB"}, 2),
    "dequantized, one file": ("quantized", {}, 1),
    "dequantized, two files at once": ("quantized", {"max_shard_size": "35MB"}, 2),
    "gguf": ("plain", {"format": "gguf", "dtype": "q8_0"}, 1),
    "gguf of quantized": ("quantized", {"format": "gguf", "dtype": "q8_0"}, 1),
}
SLICE = ("plain, two files at once", "gguf of quantized")
"""Of each kind of leaves, of files and of formats one; `make faults` measures all."""
EXPORTS = {label: export for label, export in EVERY_EXPORT.items() if is_long() or label in SLICE}


def main(folder: Path) -> None:
    root = folder / "store"
    for name, make in (("plain", plain_leaves), ("quantized", quantized_leaves)):
        save(root / name, LARGE, make(LARGE))
        small = CONFIG.replace(hidden_size=128, intermediate_size=128, head_dim=32)
        save(root / f"small-{name}", small, make(small))
    report, warm = {}, set()
    with serving(root, folder / "data") as http:
        for label, (run, body, files) in EXPORTS.items():
            if (run, body.get("format")) not in warm:  # imports, threads and pools
                measure(http, f"small-{run}", body)
                warm.add((run, body.get("format")))
            memory = files * least(http, run, body)
            taken = measure(http, run, {**body, "memory": str(memory)})
            report[label] = {"allowed": memory, "taken": taken}
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
