import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import InvalidURIError, parse_uri
from cairn.storage.runs.records import layout

RUN = parse_uri("gs://bucket/run")
numbers = st.integers(0, layout.MAX_NUMBER)
aliases = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True).filter(
    lambda text: not text.isdigit() and text != "latest"
)
digests = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
kinds = st.from_regex(r"[a-z][a-z0-9_]{0,31}", fullmatch=True)


@given(numbers)
def test_attempt_names_read_back(attempt):
    assert layout.parse_attempt_file(layout.attempt_file(attempt)) == attempt


@given(numbers, numbers)
def test_names_of_a_step_read_back(step, attempt):
    key = (step, attempt)
    assert layout.parse_manifest_file(layout.manifest_file(*key)) == key
    assert layout.parse_annotation_file(layout.annotation_file(*key)) == key
    assert layout.parse_trash_file(layout.trash_file(*key)) == key
    lifted = layout.lifted_file(*key)
    assert layout.parse_lifted_file(lifted) == key
    others = (layout.parse_trash_file, layout.parse_intent_file, layout.parse_hold_file)
    assert [parse(lifted) for parse in others] == [None] * 3
    folder = layout.step_dir(attempt, step).rpartition("/")[2]
    assert layout.parse_step_folder(folder) == (step, False)
    assert layout.parse_step_folder(f"{folder}.orbax-checkpoint-tmp") == (step, True)
    assert layout.parse_step_folder(f"{folder}.orbax-checkpoint-tmp-17000") == (step, True)


@given(aliases)
def test_alias_names_read_back(alias):
    assert layout.parse_alias_file(layout.alias_file(alias)) == alias


@given(numbers, numbers, kinds, digests)
def test_export_names_read_back(step, attempt, kind, digest):
    name = layout.export_manifest(step, attempt, kind, digest)
    assert layout.parse_export_manifest(name) == (step, attempt, kind, digest)
    folder = layout.export_dir(step, attempt, kind, digest, "try-1")
    assert folder == f"{name.removesuffix('.json')}/try-1"


PARSERS = [
    layout.parse_attempt_file,
    layout.parse_manifest_file,
    layout.parse_annotation_file,
    layout.parse_trash_file,
    layout.parse_lifted_file,
    layout.parse_step_folder,
    layout.parse_alias_file,
    layout.parse_export_manifest,
]


FOREIGN = [
    "",
    "run.json",
    "attempts/1",
    "attempts/01.json",
    "attempts/-1.json",
    "attempts/1.json\n",
    "attempts/1/2.json",
    "attempts/١.json",
    "attempts/9999999999999999999.json",
    "manifests/1.json",
    "manifests/1.2.3.json",
    "manifests/01.2.json",
    "manifests/1.2.json.tmp",
    "manifests/x/1.2.json",
    "xmanifests/1.2.json",
    "aliases/latest.json",
    "aliases/12.json",
    "aliases/a/b.json",
    "aliases/.json",
    "aliases/..json",
    "assets/xyz",
    "assets/" + "A" * 64,
    "exports/1.2/hf-12345678",
    "exports/1.2/HF-12345678.json",
    "5.orbax-checkpoint-tmp/x",
    "05",
    "step_5",
]


def test_foreign_names_are_not_ours():
    parsed = {(parse.__name__, name): parse(name) for parse in PARSERS for name in FOREIGN}
    assert {case: key for case, key in parsed.items() if key is not None} == {}


@given(st.text(max_size=60))
def test_any_text_parses_or_gives_none(name):
    for parse in PARSERS:
        parse(name)


def test_the_layout_is_what_was_agreed():
    assert layout.RUN_FILE == "run.json"
    assert layout.LEASE_FILE == "lease.json"
    assert layout.attempt_file(3) == "attempts/3.json"
    assert layout.step_dir(3, 300) == "attempts/3/300"
    assert layout.manifest_file(300, 3) == "manifests/300.3.json"
    assert layout.annotation_file(300, 3) == "annotations/300.3.json"
    assert layout.trash_file(300, 3) == "trash/300.3.json"
    assert layout.alias_file("production") == "aliases/production.json"
    assert (
        layout.export_dir(300, 3, "huggingface", "0123456789ab", "t1")
        == "exports/300.3/huggingface-0123456789ab/t1"
    )


@pytest.mark.parametrize("alias", ["latest", "12", "", "-a", "a/b", "a" * 65, "..", "a b", "a\n"])
def test_alias_names_that_could_mislead_are_refused(alias):
    with pytest.raises(InvalidURIError, match="invalid alias"):
        layout.check_alias(alias)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "a" * 129, "a b", "ä", "a\n"])
def test_run_names_that_could_mislead_are_refused(name):
    with pytest.raises(InvalidURIError, match="invalid run name"):
        layout.check_run_name(name)
    assert not layout.is_run_name(name)


@pytest.mark.parametrize("step", [-1, 10**18, True, 1.0, "1"])
def test_steps_are_plain_numbers(step):
    with pytest.raises(InvalidURIError, match="invalid step"):
        layout.check_step(step)


@pytest.mark.parametrize(
    "arguments",
    [("Hf", "12345678", "t"), ("hf", "xyz", "t"), ("hf", "12345678", ".."), ("hf", "12345678", "")],
)
def test_export_names_are_checked(arguments):
    with pytest.raises(InvalidURIError):
        layout.export_dir(1, 1, *arguments)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.asarray, jnp.int32])
def test_integers_of_numpy_and_jax_are_steps_and_become_plain_ones(kind):
    for step in (layout.check_step(kind(12)), layout.CheckpointRef(RUN, step=kind(12)).step):
        assert (step, type(step)) == (12, int)
    assert layout.manifest_file(kind(12), kind(3)) == "manifests/12.3.json"


@pytest.mark.parametrize(
    "step",
    [np.True_, np.float64(1), np.array([1]), np.array([1, 2]), np.int64(-1), jnp.float32(1), None],
)
def test_what_only_looks_like_a_step_is_none(step):
    with pytest.raises(InvalidURIError, match="invalid step"):
        layout.check_step(step)
