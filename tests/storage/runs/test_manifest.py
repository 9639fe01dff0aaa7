import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import CorruptionError, Manifest, ModelInfo, UnsupportedFormatError
from cairn.storage.runs.records.manifest import (
    MAX_BYTES,
    AssetRecord,
    IndexRef,
    LeafRecord,
    ManifestSummary,
    ObjectRecord,
    dtype_bits,
)
from cairn.storage.store.records import sha256_of


def manifest(**changes):
    fields = {
        "step": 300,
        "attempt": 2,
        "created": "2026-11-21T12:00:00Z",
        "writer": "ann@host",
        "items": ("model", "optimizer"),
        "leaves": (
            LeafRecord(
                item="model",
                path="layers/0/kernel",
                shape=(4, 6),
                dtype="bfloat16",
                spec=("fsdp", ("tp", "sp")),
                chunks=(2, 6),
                shards=(4, 6),
            ),
            LeafRecord(item="optimizer", path="0/count", shape=(), dtype="int32"),
        ),
        "objects": (
            ObjectRecord(name="model/d/abc", size=48, crc32c="0123abcd"),
            ObjectRecord(name="_METADATA", size=2, crc32c="4567cdef"),
        ),
        "assets": (AssetRecord(name="tokenizer.json", sha256="0" * 64, size=7),),
        "model": ModelInfo(model_type="llama", model_class="Llama", config={"layers": 2}),
        "environment": {"jax": "0.10.2"},
        "plain": {"trees": {"model": "", "optimizer": "optimizer"}},
    }
    return Manifest(**fields | changes)


INDEX = IndexRef(
    size=900,
    sha256="1" * 64,
    directory=(600, 276),
    directory_sha256="2" * 64,
    nbytes=123,
    files=7,
    leaves=5,
    leaves_digest="3" * 64,
)


def with_index(**changes):
    """The manifest of a step that Cairn saved."""
    return manifest(leaves=(), objects=(), plain=None, **{"index": INDEX} | changes)


def test_a_manifest_reads_back_as_it_was_written():
    for written in (manifest(), with_index()):
        read = Manifest.parse(written.to_bytes(), "p")
        assert read == written
        assert read.digest() == written.digest()
        assert read.digest().startswith("sha256:")
    assert read.index == INDEX
    spec = Manifest.parse(manifest().to_bytes(), "p").inline_leaves[0].spec
    assert spec == ("fsdp", ("tp", "sp"))


def test_a_manifest_has_an_index_or_leaves_and_files():
    assert "index" not in json.loads(manifest().to_bytes())
    body = json.loads(with_index().to_bytes())
    assert (body["leaves"], body["objects"]) == ([], [])
    inline = {"leaves": manifest().inline_leaves, "objects": manifest().inline_objects}
    for name in inline:
        with pytest.raises(ValueError, match="only of a plain step"):
            manifest(**{"leaves": (), "objects": (), "plain": None} | {name: inline[name]})
    with pytest.raises(ValueError, match="of a plain step, and no index"):
        manifest(index=INDEX)
    with pytest.raises(UnsupportedFormatError, match="a manifest of no files"):
        Manifest.parse(with_index(index=None).to_bytes(), "p")


def test_a_manifest_stays_small_however_large_the_step_is():
    large = INDEX.model_copy(update={"nbytes": MAX_BYTES, "files": 10**9, "leaves": 10**9})
    assert len(with_index(index=large).to_bytes()) < len(with_index().to_bytes()) + 40


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(
    st.lists(
        st.builds(
            LeafRecord,
            item=st.text(max_size=5),
            path=st.text(max_size=9),
            shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
            dtype=st.sampled_from(["float32", "int4", "bool"]),
            spec=st.none() | st.lists(st.none() | st.text(max_size=4), max_size=4).map(tuple),
            digest=st.none() | st.text(max_size=9),
        ),
        max_size=4,
    ),
    st.dictionaries(st.text(), json_values, max_size=3),
)
def test_any_manifest_reads_back_with_the_same_digest(leaves, config):
    try:
        data = (
            written := manifest(leaves=tuple(leaves), model=ModelInfo(config=config))
        ).to_bytes()
    except UnsupportedFormatError:  # a lone surrogate is no text
        return
    read = Manifest.parse(data, "p")
    assert read == written
    assert read.to_bytes() == data


def test_the_bytes_are_canonical():
    data = manifest().to_bytes()
    body = json.loads(data)
    assert (body["format"], body["version"]) == ("cairn.manifest", 1)
    assert data == canonical(body)


def canonical(body):
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def test_the_checksum_is_that_of_the_other_bytes():
    body = json.loads(manifest().to_bytes())
    told = body.pop("checksum")
    assert told == f"sha256:{hashlib.sha256(canonical(body)).hexdigest()}"


@pytest.mark.parametrize("parse", [Manifest.parse, ManifestSummary.parse])
@pytest.mark.parametrize("made", ["inline", "with an index"])
def test_every_flipped_bit_is_an_error_that_names_the_file(parse, made):
    data = (manifest() if made == "inline" else with_index()).to_bytes()
    parse(data, "p")
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises((CorruptionError, UnsupportedFormatError), match=r"m/1\.1\.json"):
            parse(bytes(flipped), "m/1.1.json")


@given(data=st.data())
def test_any_other_bytes_are_an_error(data):
    written = manifest().to_bytes()
    start = data.draw(st.integers(0, len(written)))
    end = data.draw(st.integers(start, len(written)))
    other = written[:start] + data.draw(st.binary(max_size=9)) + written[end:]
    if other == written:
        return
    for parse in (Manifest.parse, ManifestSummary.parse):
        with pytest.raises((CorruptionError, UnsupportedFormatError)):
            parse(other, "p")


@pytest.mark.parametrize("parse", [Manifest.parse, ManifestSummary.parse])
def test_a_checksum_that_is_absent_or_out_of_place_is_an_error(parse):
    body = json.loads(manifest().to_bytes())
    for data in (body | {"checksum": 3}, {**body, "checksum": None}):
        with pytest.raises(CorruptionError, match="not what was written"):
            parse(canonical(data), "p")
    del body["checksum"]
    with pytest.raises(CorruptionError, match="not what was written"):
        parse(canonical(body), "p")


def test_the_digest_depends_on_every_field():
    changed = [
        {"step": 301},
        {"attempt": 3},
        {"writer": "x"},
        {"items": ("model",)},
        {"leaves": ()},
        {"objects": manifest().inline_objects[:1]},
        {"assets": ()},
        {"model": None},
        {"environment": {}},
        {"created": "2026-11-21T12:00:01Z"},
    ]
    digests = {manifest(**change).digest() for change in [{}, *changed]}
    assert len(digests) == len(changed) + 1
    others = {
        "size": 901,
        "sha256": "3" * 64,
        "directory": (601, 276),
        "directory_sha256": "3" * 64,
        "nbytes": 124,
        "files": 8,
        "leaves": 6,
        "leaves_digest": "4" * 64,
    }
    assert others.keys() == IndexRef.model_fields.keys()
    for name, value in others.items():
        digests.add(with_index(index=INDEX.model_copy(update={name: value})).digest())
    assert len(digests) == len(changed) + 1 + len(others)


def test_sizes():
    assert manifest().nbytes == 50
    assert (with_index().nbytes, with_index().leaf_count) == (123, 5)
    assert manifest().leaf_count == 2
    assert LeafRecord(item="m", path="p", shape=(3, 3), dtype="int4").nbytes == 5
    assert LeafRecord(item="m", path="p", shape=(0, 3), dtype="float32").nbytes == 0


@pytest.mark.parametrize(("shards", "words"), [(None, 2), ((3, 2), 2), ((1, 5), 5)])
def test_bytes_of_keys_are_those_of_their_words(shards, words):
    keys = LeafRecord(item="m", path="p", shape=(3,), dtype="key<fry>", shards=shards)
    assert keys.nbytes == 3 * words * 4
    assert LeafRecord(item="m", path="p", shape=(0,), dtype="key<rbg>").nbytes == 0


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("float32", 32),
        ("bfloat16", 16),
        ("float8_e4m3fn", 8),
        ("float8_e8m0fnu", 8),
        ("float4_e2m1fn", 4),
        ("int2", 2),
        ("uint4", 4),
        ("int64", 64),
        ("bool", 8),
        ("complex64", 64),
        ("key<fry>", 8),
    ],
)
def test_bits_of_a_dtype(dtype, bits):
    assert dtype_bits(dtype) == bits


def changed(**fields):
    """The bytes of a manifest with other fields, under a checksum that fits."""
    body = json.loads(manifest().to_bytes()) | fields
    del body["checksum"]
    return canonical(body | {"checksum": sha256_of(canonical(body))})


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "wrong format"),
        (changed(format="other"), r"expected 'cairn\.manifest', found 'other'"),
        (changed(version=2), r"found version 2\. Upgrade Cairn"),
        (changed(version=0), "found version 0"),
        (changed(version="1"), "found version '1'"),
        (changed(version=True), "found version True"),
        (changed(extra=1), "extra: Extra inputs"),
        (changed(step=-1), "step: "),
        (changed(step=10**18), "step: "),
        (changed(step="x"), "step: "),
        (changed(created="yesterday"), "created|object"),
        (changed(created="2026-01-01T00:00:00"), "time zone"),
        (changed(leaves=[{"item": "m"}]), r"leaves\.0\.path"),
        (changed(assets=[{"name": "t", "sha256": "../x", "size": 1}]), r"assets\.0\.sha256"),
        (changed(objects=[{"name": "t", "size": -1}]), r"objects\.0\.size"),
        (changed(index=INDEX.model_dump(mode="json")), "of a plain step, and no index"),
        (changed(index={}), r"index\.size: Field required"),
        (changed(index=INDEX.model_dump(mode="json") | {"sha256": "x"}), r"index\.sha256: "),
        (changed(index=INDEX.model_dump(mode="json") | {"directory": [1]}), r"index\.directory"),
        (manifest().to_bytes()[:-40], "not JSON"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[:20],
)
def test_a_manifest_that_does_not_fit_is_refused_and_named(data, text):
    with pytest.raises(UnsupportedFormatError, match=text) as caught:
        Manifest.parse(data, "gs://bucket/run/manifests/1.1.json")
    assert "gs://bucket/run/manifests/1.1.json" in str(caught.value)


def test_a_config_that_is_no_json_is_refused():
    for value in (float("nan"), float("inf"), object()):
        with pytest.raises(UnsupportedFormatError, match="not JSON"):
            manifest(model=ModelInfo(config={"x": value})).to_bytes()


def test_a_summary_says_what_the_manifest_says():
    plain = {"source": "gs://bucket/old/12", "trees": {"model": ""}}
    adopted = manifest(plain=plain, objects=manifest().inline_objects[:1])
    for written in (manifest(), with_index(), adopted):
        summary = ManifestSummary.parse(written.to_bytes(), "p")
        assert summary == (written.created, written.nbytes, written.digest(), written.source)
    assert summary.source == "gs://bucket/old/12"


def test_an_adopted_step_has_a_checksum_of_every_file():
    plain = {"source": "gs://bucket/old/12", "trees": {"model": ""}}
    with pytest.raises(ValueError, match="every file of a plain step"):
        manifest(plain=plain, objects=())
    with pytest.raises(ValueError, match="crc32c"):
        manifest(plain=plain, objects=[{"name": "model/d/0", "size": 3}])


@pytest.mark.parametrize("field", ["arrays", "keys"])
def test_an_adopted_step_tells_of_its_own_trees_only(field):
    plain = {"source": "gs://bucket/old/12", "trees": {"model": ""}, field: {"other": {"w": "w"}}}
    with pytest.raises(ValueError, match=r"of its trees, found some of \['other'\]"):
        manifest(plain=plain, objects=manifest().inline_objects[:1])


BEYOND = [10**400, float("-inf"), float("inf"), -1, 2.5]


@pytest.mark.parametrize(
    "change",
    [
        {"objects": [{}]},
        {"objects": 3},
        {"created": 1},
        {"created": "/"},
        {"created": "2026-01-02T03:04:05"},
        *({"objects": [{"name": "model/d/0", "size": size}]} for size in BEYOND),
        *({"index": {"nbytes": size}} for size in BEYOND),
    ],
)
def test_a_summary_of_a_broken_manifest_is_refused(change):
    with pytest.raises(UnsupportedFormatError, match="fields that don't fit"):
        ManifestSummary.parse(changed(**change), "p")
