"""Runs for tests of the control plane: real layout, real manifests, no arrays."""

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from cairn import Annotation, Attempt, Manifest, ModelInfo, Run, StoreURI
from cairn.storage.runs.records.layout import annotation_file, step_dir, trash_file
from cairn.storage.runs.records.manifest import LeafRecord, ObjectRecord, PlainStep
from cairn.storage.store.clock import rfc3339, utc_now
from cairn.storage.store.records import canonical_json
from tests.service.seams import lease, placed, writer

BYTES_PER_STEP = 4 * 4 * 4


def make_run(
    uri: StoreURI | str | PathLike[str],
    steps: Iterable[int] = (),
    *,
    labels: Mapping[str, str] | None = None,
) -> Run:
    """A run whose first attempt has saved these steps."""
    run = Run.create(uri, labels=labels or {})
    steps = list(steps)
    if steps:
        add_steps(run, steps)
    return run


def add_steps(run: Run, steps: Iterable[int], *, base_step: int = -1) -> Attempt:
    """Save steps as a new attempt."""
    attempt = begin_attempt(run, base_step=base_step)
    for step in steps:
        publish(run, attempt.number, step)
    end_saving(run, attempt)
    return attempt


def publish(
    run: Run,
    attempt: int,
    step: int,
    *,
    iterators: Mapping[str, int] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Manifest:
    """Save one step in an attempt that was begun."""
    manifest = Manifest(
        step=step,
        attempt=attempt,
        created=rfc3339(utc_now()),
        writer="trainer",
        items=("model", "optimizer"),
        iterators=dict(iterators or {}),
        leaves=(
            LeafRecord(item="model", path="kernel", shape=(4, 2), dtype="float32"),
            LeafRecord(item="optimizer", path="mu/kernel", shape=(4, 2), dtype="float32"),
        ),
        objects=(ObjectRecord(name="model/data", size=BYTES_PER_STEP, crc32c="0" * 8),),
        plain=PlainStep(trees={"model": "model", "optimizer": "optimizer"}),
        model=ModelInfo(
            model_type="llama", model_class="LlamaForCausalLM", config=dict(config or {})
        ),
    )
    run.objects.write(f"{step_dir(attempt, step)}/commit_success.txt", b"")
    writer.publish_manifest(run.objects, manifest, lambda: None)
    return manifest


def begin_attempt(run: Run, *, base_step: int) -> Attempt:
    """Take the run, as a writer does."""
    # Nobody renews the lease, and a machine may take its time over the tests that look at it.
    return lease.begin_attempt(run.objects, writer="trainer", base_step=base_step, ttl=3600)


def begin_saving(run: Run, step: int) -> Attempt:
    """A writer that holds the run and is in the middle of a save."""
    attempt = begin_attempt(run, base_step=step - 1)
    run.objects.write(f"{step_dir(attempt.number, step)}/model/half", b"half")
    return attempt


def end_saving(run: Run, attempt: Attempt) -> None:
    """Give the run back, as a writer that ends does."""
    lease.release(run.objects, attempt)


def trash(run: Run, step: int, attempt: int = 1) -> None:
    """Delete a step softly."""
    run.objects.write(trash_file(step, attempt), canonical_json({"by": "test"}))


def annotate(
    run: Run,
    step: int,
    attempt: int = 1,
    *,
    labels: Mapping[str, str] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Set labels and metrics of a step."""
    annotation = Annotation(labels=dict(labels or {}), metrics=dict(metrics or {}))
    placed.put_record(run.objects, annotation_file(step, attempt), annotation)
