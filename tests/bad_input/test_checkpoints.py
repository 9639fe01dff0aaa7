"""Checkpoints that are damaged, or of another model, and weights of a type that nobody reads."""

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from cairn import Checkpointer, Client, ConversionError, DecoderForCausalLM, EasyDeLState, Run
from cairn.service.errors import ProblemResponseError
from cairn.state.checkpointing.restore import read_meta
from cairn.state.checkpointing.trees import nest
from cairn.storage import errors as storage
from tests.bad_input.conftest import Store, assert_loads_bit_equal, digests, raised, says
from tests.service.commands import cairn_here
from tests.tiny import make_state


def copied(store: Store, name: str) -> Path:
    """A run of our own to damage: step 1 stays good."""
    shutil.copytree(store.root / "tiny", store.root / name)
    return store.root / name


def emptied(run: Path) -> None:
    for entry in (run / "attempts/1/2").iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    (run / "attempts/1/2/notes.txt").write_text("no checkpoint")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "emptied": emptied,
    "gone": lambda run: shutil.rmtree(run / "attempts/1/2"),
    "meta-gone": lambda run: shutil.rmtree(run / "attempts/1/2/meta"),
    "model-gone": lambda run: shutil.rmtree(run / "attempts/1/2/model"),
}
# damage, what loading raises, expected, found, next step
LOADS = [
    ("emptied", "NotACheckpointError", "commit_success.txt, which a save writes last", "notes.txt",
     "Name a step's folder"),
    ("gone", "StepNotFoundError", "the folder of a committed checkpoint", "nothing",
     "List the run's steps."),
    ("meta-gone", "CorruptionError", "{meta} bytes", "none",
     "Restore the step's files, or use another step."),
    ("model-gone", "CorruptionError", "d/", "no such file",
     "Restore the step's files, or use another step."),
]  # fmt: skip


@pytest.mark.parametrize("case", LOADS, ids=[case[0] for case in LOADS])
def test_a_folder_that_is_no_checkpoint_any_more_is_told(store, case):
    damage, kind, *texts = case
    run = copied(store, f"load-{damage}")
    size = (run / "attempts/1/2/meta/data.json").stat().st_size
    texts = [text.format(meta=size) for text in texts]
    DAMAGES[damage](run)
    before = digests(run)
    reference = f"{run}/steps/2"
    error = raised(
        getattr(storage, kind), lambda: EasyDeLState.load_state(reference, verbose=False)
    )
    says(str(error), f"file://{run}/attempts/1/2", *texts)
    assert digests(run) == before
    EasyDeLState.load_state(f"{run}/steps/1", verbose=False)


# damage, job, status, problem type, expected, found, next step
JOBS = [
    ("emptied", "convert", 422, "not-a-checkpoint", "commit_success.txt", "notes.txt", "Name a"),
    ("emptied", "restore", 409, "corrupt", "the step's index of", "none",
     "Restore the file from a backup, or use another step."),
    ("gone", "convert", 404, "step-not-found", "the folder of a committed checkpoint", "nothing",
     "List the run's steps."),
    ("model-gone", "convert", 409, "corrupt", "d/",
     "no such file", "Restore the step's files, or use another step."),
    ("model-gone", "restore", 409, "corrupt", "the 19 files that its manifest names",
     "7 that are not", "Fork from another step"),
]  # fmt: skip


def start(client: Client, job: str, run: str, step: int):
    options = {"target": f"fork-of-{run}"} if job == "restore" else {}
    return getattr(client, job)(run, step, **options)


@pytest.mark.parametrize("case", JOBS, ids=[f"{case[0]} {case[1]}" for case in JOBS])
def test_a_job_on_a_folder_that_is_no_checkpoint_any_more_fails_and_leaves_nothing(
    store, plane, case
):
    damage, job, status, kind, *texts = case
    name = f"{job}-{damage}"
    run = copied(store, name)
    DAMAGES[damage](run)
    before = digests(run)
    with Client(plane) as client:
        operation = start(client, job, name, 2)
        with pytest.raises(ProblemResponseError) as caught:
            client.wait(operation.id)
        assert client.operation(operation.id).state == "failed"
    problem = caught.value.problem
    assert (caught.value.status, problem["type"]) == (status, f"urn:cairn:problem:{kind}")
    assert problem["instance"] == f"/v1/operations/{operation.id}"
    says(problem["detail"], f"file://{run}/attempts/1/2", *texts)
    after = digests(run)
    assert {path: after[path] for path in before} == before
    assert {path for path in after if path not in before and (run / path).is_file()} == set()
    assert not (store.root / f"fork-of-{name}").exists()


def test_a_gather_of_a_folder_that_is_no_checkpoint_any_more_is_refused_at_once(store, plane):
    """Which items hold arrays only the step's index tells."""
    run = copied(store, "gather-emptied")
    DAMAGES["emptied"](run)
    before = digests(run)
    with Client(plane) as client, pytest.raises(ProblemResponseError) as caught:
        client.gather("gather-emptied", 2)
    problem = caught.value.problem
    assert (caught.value.status, problem["type"]) == (409, "urn:cairn:problem:corrupt")
    says(problem["detail"], f"file://{run}/attempts/1/2/cairn.index", "the step's index of ",
         "none", "Restore the file from a backup, or use another step.")  # fmt: skip
    assert digests(run) == before


EXTRA, MISSING = "model/extra/kernel", "model/layers/0/mlp/up_proj/kernel"
SHAPED, TYPED = "model/norm/scale", "model/layers/1/input_layernorm/scale"


@pytest.fixture(scope="module")
def odd(store):
    """A run whose step 1 is none of its config's: a leaf more, one less, one of another shape."""
    good = Run.open(store.tiny.uri)
    step = good.step(2)
    model = dict(store.tiny.leaves["model"])
    del model[MISSING]
    model |= {EXTRA: np.zeros(3, np.float32), SHAPED: np.ones(7, np.float32)}
    model[TYPED] = np.ones(32, np.int32)
    optimizer = dict(store.tiny.leaves["optimizer"])
    del optimizer["0/count"]
    with Checkpointer(store.root / "odd") as checkpointer:
        checkpointer.save(
            1,
            {"model": nest(model), "optimizer": nest(optimizer)},
            meta=read_meta(good.step_uri(step)),
            model=good.manifest(step).model,
        ).wait()
    return store.root / "odd"


def test_a_load_lists_every_leaf_that_does_not_fit(odd):
    before = digests(odd)
    error = raised(
        storage.TreeMismatchError, lambda: EasyDeLState.load_state(str(odd), verbose=False)
    )
    says(
        str(error),
        f"file://{odd}/attempts/1/1",
        "the model and optimizer that are being loaded",
        "5 leaves that differ",
        "load it with the config, model class and optimizer it was saved with",
    )
    assert error.problems == (
        f"model/{EXTRA}: unexpected in the checkpoint, stored as float32[3]",
        f"model/{MISSING}: missing from the checkpoint, expected float32[32, 64]",
        f"model/{TYPED}: expected float32[32], stored as int32[32]",
        f"model/{SHAPED}: expected float32[32], stored as float32[7]",
        "optimizer/0/count: missing from the checkpoint, expected int32[]",
    )
    assert all(problem in str(error) for problem in error.problems)
    state = make_state()
    error = raised(storage.TreeMismatchError, lambda: state.load_optimizer(str(odd)))
    assert len(error.problems) == 1
    assert digests(odd) == before


def test_a_convert_lists_every_leaf_that_does_not_fit(odd, plane):
    before = digests(odd)
    with Client(plane) as client, pytest.raises(ProblemResponseError) as caught:
        client.wait(client.convert("odd", 1).id)
    problem = caught.value.problem
    assert (caught.value.status, problem["type"]) == (422, "urn:cairn:problem:tree-mismatch")
    says(
        problem["detail"],
        f"file://{odd}/attempts/1/1: model",
        "the 20 leaves that the stored config describes",
        "3 that differ",
        "Save the model with the config that it was built from.",
    )
    assert problem["problems"] == [
        f"{EXTRA}: unexpected in the checkpoint, stored with shape [3]",
        f"{MISSING}: missing from the checkpoint, expected shape [32, 64]",
        f"{SHAPED}: expected shape [32], stored with [7]",
    ]
    ended = cairn_here("convert", "odd", "--watch", url=plane)
    assert (ended.returncode, ended.stdout) == (8, "")
    assert all(text in ended.stderr for text in problem["problems"])
    assert digests(odd) == before


Type = gguf.GGMLQuantizationType


def write_gguf(path: Path, types: dict[str, Type]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    for name, kind in types.items():
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        writer.add_tensor(name, block, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_LOADS = [
    DecoderForCausalLM.from_pretrained,
    EasyDeLState.from_pretrained,
    lambda path: EasyDeLState.load_state(path, verbose=False),
]
GGUF_TYPES = "tensors of the types F32, F16, BF16"


@pytest.mark.parametrize("load", GGUF_LOADS)
def test_a_gguf_lists_every_tensor_of_an_unsupported_type(tmp_path, load):
    types = {"token_embd.weight": Type.Q8_1, "a.weight": Type.Q4_0, "b.weight": Type.Q8_K}
    path = write_gguf(tmp_path / "model.gguf", types)
    error = raised(ConversionError, lambda: load(path))
    says(str(error), str(path), GGUF_TYPES, "2 of other types", "quantize the model to one of")
    assert error.problems == ("token_embd.weight: type Q8_1", "b.weight: type Q8_K")


def test_a_gguf_with_a_type_that_nobody_knows_names_its_number(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", {"a.weight": Type.Q8_1})
    data = path.read_bytes()
    old, new = (number.to_bytes(4, "little") for number in (Type.Q8_1.value, 99))
    at = data.index(old, data.index(b"a.weight") + 20)
    path.write_bytes(data[:at] + new + data[at + 4 :])
    error = raised(ConversionError, lambda: DecoderForCausalLM.from_pretrained(path))
    says(str(error), str(path), GGUF_TYPES, "the type number 99", "upgrade the package 'gguf'")


def test_a_file_that_is_no_gguf_is_told(tmp_path):
    path = tmp_path / "model.gguf"
    error = raised(storage.NotFoundError, lambda: DecoderForCausalLM.from_pretrained(path))
    says(str(error), str(path), "a GGUF file", "nothing", "Check the path.")
    path.write_text("hello")
    error = raised(ConversionError, lambda: DecoderForCausalLM.from_pretrained(path))
    says(str(error), str(path), "a readable GGUF file", "GGUF magic invalid", "take the file again")


def test_the_good_run_was_not_changed_by_all_this(store):
    assert_loads_bit_equal(f"{store.tiny.uri}/steps/2", store.tiny.leaves)
