"""How much memory a server takes for what somebody wrote into its store; a test starts it.

    python -m tests.service.bounded_memory FOLDER REQUESTS MANIFESTS ROWS

The control plane runs in this process. Of each case it tells as JSON by how many bytes the process
was larger, at most, than before, and the status of each answer.
"""

import json
import os
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from unittest.mock import patch

import google_crc32c
import numpy as np
import tensorstore as ts
from fastapi.testclient import TestClient

from cairn import Manifest, Run, Settings, annotate_step, create_app, promote_step
from cairn.storage.runs.records.index_writer import make_index
from cairn.storage.runs.records.layout import INDEX_FILE, manifest_file, step_dir
from cairn.storage.runs.records.manifest import LeafRecord, ObjectRecord, PlainStep
from cairn.storage.runs.records.placed import place_of
from cairn.storage.store.bounds import bound_of
from tests.service.conftest import BASE_URL, PEER
from tests.service.resident import reading
from tests.service.seams import placed
from tests.storage.indexes import forged
from tests.storage.runs.random_steps import random_manifest, random_parts
from tests.storage.stored_runs import begin, end, save

RUNS = "/v1/roots/default/runs"
HUGE = 1 << 30
RECORDS = {
    "run.json": "",
    "lease.json": "/writer",
    "attempts/1.json": "/checkpoints?refresh=true",
    "manifests/6.1.json": "/checkpoints/6?refresh=true",
    "annotations/6.1.json": "/checkpoints/6:diff?other=3",
    "aliases/good.json": "/aliases/good",
}
"""By name, what is asked for where it is huge."""


def run_of_records(uri: Path) -> Run:
    run = Run.create(uri)
    attempt = begin(run, -1)
    for step in (3, 6):
        save(run, step, attempt)
        annotate_step(run, step, labels={"a": "b"})
    promote_step(run, 6, "good", expect=None)
    end(run)
    return run


def run_with_huge_index(uri: Path) -> None:
    """Its index is some kB, and a directory of 128 MiB once it is inflated."""
    run = Run.create(uri)
    attempt = begin(run, -1)
    rng = Random(0)
    name = f"{step_dir(attempt, 3)}/{INDEX_FILE}"
    manifest = random_manifest(rng).model_copy(update={"step": 3, "attempt": attempt})
    data, indexed = make_index(manifest, place_of(run.objects, name), **random_parts(rng, 3))
    zipper, block = zlib.compressobj(1), b" " * (1 << 20)
    zipped = b"".join([*(zipper.compress(block) for _ in range(128)), zipper.flush()])
    data, indexed = forged(data, indexed, zipped=zipped)
    run.objects.write(name, data)
    placed.write_record(run.objects, manifest_file(3, attempt), indexed, generation=None)
    end(run)


def run_with_chunk(uri: Path, shape: tuple[int, int], chunk: tuple[int, int]) -> None:
    """A step as plain Orbax may have left it: an array of zeros, whose chunks are as large.

    Args:
        uri: of the run.
        shape: of the array.
        chunk: that its description names.
    """
    run = Run.create(uri)
    attempt = begin(run, -1)
    folder = uri / step_dir(attempt, 1)
    zarr = {"shape": shape, "data_type": "float32", "codecs": [{"name": "zstd"}]}
    spec = {
        "driver": "zarr3",
        "kvstore": f"file://{folder}/state/w/",
        "metadata": zarr | {"chunk_grid": _grid(shape)},
        "store_data_equal_to_fill_value": True,
    }
    ts.open(spec, create=True).result()[...].write(np.zeros(shape, np.float32)).result()
    description = folder / "state/w/zarr.json"
    told = json.loads(description.read_text())
    description.write_text(json.dumps(told | {"shape": chunk, "chunk_grid": _grid(chunk)}))
    tree = {
        "key_metadata": [{"key": "w", "key_type": 2}],
        "value_metadata": {"value_type": "jax.Array"},
    }
    metadata = {"tree_metadata": {"('w',)": tree}, "use_zarr3": True, "use_ocdbt": False}
    (folder / "state/_METADATA").write_text(json.dumps(metadata))
    manifest = Manifest(
        step=1,
        attempt=attempt,
        created="2026-11-21T12:00:00Z",
        writer="w",
        items=("state",),
        leaves=(
            LeafRecord(
                item="state", path="w", shape=chunk, dtype="float32", chunks=chunk, shards=chunk
            ),
        ),
        objects=tuple(
            ObjectRecord(
                name=str(path.relative_to(folder)),
                size=path.stat().st_size,
                crc32c=f"{google_crc32c.value(path.read_bytes()):08x}",
            )
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ),
        plain=PlainStep(trees={"state": "state"}),
    )
    placed.write_record(run.objects, manifest_file(1, attempt), manifest, generation=None)
    end(run)


def _grid(chunk: tuple[int, int]) -> dict[str, object]:
    return {"name": "regular", "configuration": {"chunk_shape": chunk}}


def measure(http: TestClient, paths: list[str]) -> dict[str, object]:
    """Bytes that requests take, all at once, and what they get."""
    Path("/proc/self/clear_refs").write_text("5")
    before = reading("VmRSS")
    with ThreadPoolExecutor(len(paths)) as pool:
        answers = list(pool.map(http.get, paths))
    return {
        "taken": reading("VmHWM") - before,
        "statuses": [answer.status_code for answer in answers],
        "said": answers[0].text[:2000] if answers[0].status_code != 200 else "",
    }


def values_of(run: str, count: int) -> list[str]:
    path = f"{RUNS}/{run}/checkpoints/1/tensors/w?item=state"
    kinds = ("&slice=0:1", "&stats=1", "&slice=0:1,:9&format=json", "&format=safetensors&slice=0:9")
    return [path + kinds[number % len(kinds)] for number in range(count)]


def main(folder: Path, count: int, manifests: int, rows: int) -> None:
    """Print what each case took.

    Args:
        folder: for the store and the databases.
        count: requests for values at a time.
        manifests: that have as many bytes as one may have.
        rows: of 256 KiB, of the one chunk that an array has.
    """
    root = folder / "store"
    for name in RECORDS:
        run = run_of_records(root / name.partition("/")[0].removesuffix(".json"))
        os.truncate(f"{run.uri.local_path}/{name}", HUGE)
    many = run_of_records(root / "many")
    for step in range(10, 10 + manifests):
        name = manifest_file(step, 1)
        Path(f"{many.uri.local_path}/{name}").touch()
        os.truncate(f"{many.uri.local_path}/{name}", bound_of(name).max_bytes)
    run_with_huge_index(root / "index")
    run_with_chunk(root / "chunk", (rows, 1 << 16), (rows, 1 << 16))
    run_with_chunk(root / "larger", (8, 8), (1024, (1 << 16) + 1))
    report = {}
    app = create_app(Settings(root=str(root), data_dir=folder / "data", scan_seconds=0), jobs=False)
    with (
        patch("cairn.service.http.limiters.WAIT_SECONDS", 300),
        TestClient(app, base_url=BASE_URL, client=PEER) as http,
    ):
        report["list"] = measure(http, [f"{RUNS}?refresh=true"])
        report["list"]["said"] = [one["name"] for one in http.get(RUNS).json()["runs"]]
        for name, asked in RECORDS.items():
            run = name.partition("/")[0].removesuffix(".json")
            report[name] = measure(http, [f"{RUNS}/{run}{asked}"])
        report["index"] = measure(http, [f"{RUNS}/index/checkpoints/3/tensors"])
        report["larger"] = measure(http, values_of("larger", count))
        report["chunk"] = measure(http, values_of("chunk", count))
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
