"""Tiny models of other trainers, by their own code: adopted, exported, and held against it.

Exports for MaxText are imported again, and what its own code restores of that is held too.

    python -m tests.trainers PYTHON [--keep] [CASE...]

PYTHON is the interpreter of an environment that has maxtext 0.2.5, google-tunix 0.1.7 or both.
A CASE is such as maxtext-gemma3-scanned; without any, all are run. --keep: the trees that
`make test` uses are written anew (`kept/`). Outcomes are in `benchmarks/results/trainers.json`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from cairn import CheckpointReader, Run, adopt
from cairn.interop.trainers.maxtext_settings import flat_yaml
from cairn.interop.weights.export import export_sources, mapped_model
from cairn.interop.weights.files import open_pretrained
from cairn.interop.weights.trainer_tree import write_trainer_step
from cairn.state.models.exported_logits import round_tied_head
from cairn.storage.safetensors.writer import plan_shards, write_shard
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import parse_uri
from tests.trainers.kept import KEPT, keep

HERE = Path(__file__).parent
RECORD = HERE.parents[1] / "benchmarks/results/trainers.json"
TOLERANCE = 1e-4
MAXTEXT = (
    *("llama", "llama3.1", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
    *("gemma2", "gemma3"),
)
TUNIX = ("llama", "llama-tied", "qwen2", "qwen3", "gemma3", "gemma3-mha")
CASES = {
    "maxtext": [(family, layout) for family in MAXTEXT for layout in ("scanned", "unscanned")],
    "tunix": [(family,) for family in TUNIX],
}


def exported(folder: Path) -> tuple[float, str]:
    """Adopt and export what a program left; return how far the logits are, and the map."""
    report = adopt(folder / "checkpoints", folder / "run")
    assert report.ok, report.problems
    run = Run.open(report.run)
    step = run.latest()
    manifest = run.manifest(step)
    described = json.loads((folder / "config.json").read_text()) if _has_json(folder) else None
    if described is None:
        described = flat_yaml((folder / "config.yml").read_text())
    mapped = mapped_model(manifest, described)
    assert mapped is not None
    reader = CheckpointReader.open(run.step_uri(step), manifest)
    sources, config = export_sources(manifest, reader, mapped=mapped)
    target = folder / "exported"
    target.mkdir()
    (shard,) = plan_shards(sources, 1 << 40)
    write_shard(open_files(parse_uri(target)), shard.file_name, shard)
    (target / "config.json").write_text(json.dumps(config))
    reference = np.load(folder / "reference.npz")
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys")), loading
    if mapped.head_rounding is not None:  # as the trainer computed the reference
        round_tied_head(model, *mapped.head_rounding)
    with torch.no_grad():
        logits = model(torch.from_numpy(reference["tokens"])).logits.numpy()
    expected = reference["logits"][..., : logits.shape[-1]]
    return float(np.abs(logits - expected).max() / np.abs(expected).max()), mapped.layout


def imported(folder: Path, python: str, case: tuple[str, ...]) -> float:
    """Import an export for MaxText, and return how far the logits are of what it restores."""
    step = write_trainer_step(
        open_pretrained(folder / "exported"),
        "maxtext",
        folder / "imported",
        scan=case[-1] == "scanned",
        dtype=np.dtype(np.float32),
    )
    command = [python, "-W", "ignore", HERE / "maxtext_model.py", folder, *case, step.folder]
    subprocess.run(command, env=_environment(), capture_output=True, check=True)
    logits = np.load(folder / "restored.npz")["logits"]
    expected = np.load(folder / "reference.npz")["logits"]
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def _environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}


def _has_json(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def main(python: str, *options: str) -> int:
    """Hold every case whose trainer the environment has; return how many differ."""
    chosen = {option for option in options if not option.startswith("--")}
    rows, wrong = _recorded(), 0
    for trainer, cases in CASES.items():
        package = "google-tunix" if trainer == "tunix" else trainer
        asked = f"from importlib.metadata import version; print(version({package!r}))"
        said = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False)
        if said.returncode:
            print(f"{trainer}: not installed there, and not held")
            continue
        for case in cases:
            name = "-".join((trainer, *case))
            if chosen and name not in chosen:
                continue
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary) / "model"
                command = [python, "-W", "ignore", HERE / f"{trainer}_model.py", folder, *case]
                made = subprocess.run(
                    command, env=_environment(), capture_output=True, text=True, check=False
                )
                row: dict[str, object] = {"version": said.stdout.strip()}
                if made.returncode:
                    row["outcome"] = f"not run: {made.stderr.strip().splitlines()[-1][:200]}"
                else:
                    difference, layout = exported(folder)
                    agrees = difference <= TOLERANCE
                    row |= {"map": layout, "difference": difference, "outcome": "agrees"}
                    if trainer == "maxtext":
                        row["restored_difference"] = imported(folder, python, case)
                        agrees = agrees and row["restored_difference"] <= TOLERANCE
                    if not agrees:
                        row["outcome"] = "differs"
                    if "--keep" in options and name in KEPT:
                        keep(folder, name)
            wrong += row["outcome"] != "agrees"
            rows[name] = row
            print(name, ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    record = {"tolerance": TOLERANCE, "cases": dict(sorted(rows.items()))}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    return wrong


def _recorded() -> dict[str, dict[str, object]]:
    return dict(json.loads(RECORD.read_text())["cases"]) if RECORD.is_file() else {}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
