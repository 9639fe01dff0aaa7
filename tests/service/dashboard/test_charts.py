"""What charts are drawn from: pure functions of data."""

import struct
import zlib
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.service.actions import activity
from cairn.service.catalog.queries import RecentStep
from cairn.service.dashboard import formats
from cairn.service.dashboard.charts import (
    changes,
    curves,
    family,
    json_tree,
    mesh,
    picture,
    tensor_tree,
)
from cairn.service.dashboard.pages import runs
from cairn.service.dashboard.pages.run import lineage
from cairn.service.errors import InvalidRequestError
from cairn.service.filters.fields import RUN_FIELDS
from cairn.service.filters.search import Search
from cairn.storage.runs.records.manifest import LeafRecord

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def steps(*states):
    return [
        RecentStep(step, 1, state, NOW + timedelta(minutes=step) if state == "listed" else None, 60)
        for step, state in reversed(list(enumerate(states, 1)))
    ]


def test_run_that_saves_every_minute_has_that_pace():
    found = activity.activity_of(steps("listed", "listed", "listed", "in_flight"))
    assert (found.writing, found.stalled, found.seconds_apart) == (4, None, 60)
    assert found.bytes_per_day == 60 * 1440
    assert [one.step for one in found.saved] == [1, 2, 3]


def test_run_stalls_with_a_step_whose_writer_is_gone_until_a_later_one_is_saved():
    assert activity.activity_of(steps("listed", "abandoned")).stalled == 2
    assert activity.activity_of(steps("abandoned", "listed")).stalled is None
    assert activity.activity_of(steps("listed", "abandoned", "in_flight")).stalled is None


def test_spec_splits_a_tensor_into_what_devices_hold():
    found = mesh.splitting((128, 32), [None, ["dp", "fsdp"]], {"dp": 2, "fsdp": 4, "tp": 2})
    assert (found.parts, found.part, found.copies, found.whole) == ((1, 8), (128, 4), 2, True)
    assert mesh.splitting((5,), ["fsdp"], {"fsdp": 4}).whole is False
    assert mesh.splitting((), None, {"fsdp": 4}).copies == 4


def test_mesh_is_read_from_a_configuration_only_if_every_size_is_known():
    names = {"sharding_axis_names": ["dp", "fsdp"]}
    assert mesh.mesh_of(names | {"sharding_axis_dims": [2, 4]}) == {"dp": 2, "fsdp": 4}
    assert mesh.mesh_of(names | {"sharding_axis_dims": [1, -1]}) == {}
    assert mesh.mesh_of({}) == {}


@pytest.mark.parametrize("text", ["fsdp", "fsdp=0", "fsdp=4,fsdp=2", "4", "fsdp=4,", "a b=1"])
def test_mesh_that_is_none_is_refused_with_what_was_expected(text):
    with pytest.raises(InvalidRequestError, match="Write fsdp=4,tp=2, each axis once"):
        mesh.parse_mesh(text)


def test_picture_has_a_pixel_for_each_element_and_marks_what_is_not_finite():
    png = picture.png_of(np.array([[1.0, -1.0, 0.0], [np.nan, np.inf, 0.5]]))
    width, height = struct.unpack(">II", png[16:24])
    assert (width, height) == (3, 2)
    at = png.index(b"IDAT") + 4
    rows = zlib.decompress(png[at : png.index(b"IEND") - 8])
    pixels = np.frombuffer(rows, np.uint8).reshape(2, 10)[:, 1:].reshape(2, 3, 3)
    assert pixels[0].tolist() == [[178, 24, 43], [33, 102, 172], [247, 247, 247]]
    assert pixels[1, 0].tolist() == pixels[1, 1].tolist() == [255, 196, 0]


def test_family_stands_in_columns_from_parents_to_forks():
    drawn = family.family(
        [family.Node("parent", "", "/p"), family.Node("grandparent", "", "/g")],
        family.Node("here", "", None, here=True),
        [family.Node("one", "", "/1"), family.Node("two", "", "/2")],
    )
    names = [one.node.name for one in sorted(drawn.nodes, key=lambda one: (one.x, one.y))]
    assert names == ["grandparent", "parent", "here", "one", "two"]
    assert len(drawn.edges) == 4


def checkpoint(step, attempt):
    return SimpleNamespace(step=step, attempt=attempt)


def test_steps_that_were_superseded_are_drawn_by_attempt_and_what_is_much_is_cut():
    aside = [checkpoint(step, attempt) for step, attempt in ((9, 1), (7, 2), (5, 1), (7, 1))]
    nodes = lineage._superseded_nodes(aside)
    assert [(one.name, one.note) for one in nodes] == [
        ("step 7", "superseded, attempt 2"),
        ("steps 5 to 9", "superseded, attempt 1"),
    ]
    many = lineage._shorten([family.Node(str(at), "", None, kind="export") for at in range(40)])
    assert (len(many), many[-1].name, many[-1].kind) == (12, "29 more", "export")


def test_place_of_a_tensor_tree_is_meant_with_slashes_around_it_or_without():
    leaves = [
        LeafRecord(item="model", path=path, shape=(2,), dtype="float32")
        for path in ("norm", "layers/0/kernel", "layers/1/kernel")
    ]
    for text in ("layers", "layers/", "/layers", "//layers//"):
        assert tensor_tree.place(leaves, text) == "layers/"
    assert tensor_tree.place(leaves, "layers/1/kernel") == "layers/1/"
    assert [tensor_tree.place(leaves, text) for text in ("norm", "", "/")] == ["", "", ""]
    assert tensor_tree.place(leaves, "lay") == "lay/"
    assert tensor_tree.branches(leaves, "lay/") == []


def test_tree_of_tensors_is_shown_a_level_at_a_time():
    leaves = [
        LeafRecord(
            item="model",
            path=f"model/layers/{layer}/experts/{expert}/kernel",
            shape=(2, 2),
            dtype="float32",
        )
        for layer in range(3)
        for expert in range(4)
    ]
    (top,) = tensor_tree.branches(leaves, "")
    assert (top.name, top.prefix, top.leaves) == ("model/layers", "model/layers/", 12)
    layers = tensor_tree.branches(leaves, top.prefix)
    assert len(layers) == 3
    assert (layers[0].name, layers[0].prefix) == ("0/experts", "model/layers/0/experts/")
    experts = tensor_tree.branches(leaves, layers[0].prefix)
    assert len(experts) == 4
    assert experts[0].leaf == leaves[0]
    assert experts[0].name == "0/kernel"
    assert sum(one.nbytes for one in experts) == layers[0].nbytes


def test_form_of_the_runs_page_is_a_filter_whatever_is_typed():
    text = runs.run_filter('a "b" \\', "o'neil", "team=x AND y", "in_flight")
    assert Search.parse(text, "", RUN_FIELDS).names("states")
    assert runs.run_filter("", " ", "", "") == ""
    assert runs.run_filter("", "", "team", "") == 'labels."team":*'


def changed(path, norm, relative):
    values = SimpleNamespace(norm=norm, relative=relative)
    return SimpleNamespace(item="model", path=path, values=values)


def test_layers_are_as_changed_as_their_tensors_are_together():
    differences = [
        changed("model/layers/0/q/kernel", 3.0, 0.3),  # of a tensor whose norm is 10
        changed("model/layers/0/k/kernel", 4.0, 4.0),  # 1
        changed("model/layers/1/q/kernel", 1.0, 1.0),
        changed("lm_head/kernel", 2.0, 0.02),
        changed("scale", "inf", 0.5),
    ]
    found = changes.layers_of(differences)
    assert [one.name for one in found] == ["model/layers/1", "model/layers/0", "lm_head"]
    assert [one.relative for one in found] == pytest.approx([1.0, 5 / 101**0.5, 0.02])
    assert [one.share for one in found] == pytest.approx([one.relative for one in found])
    assert changes.bars_of(differences)[0].name == "model/layers/0/k/kernel"
    assert changes.layer_of("scale") == "scale"


def test_values_of_records_are_said_in_few_words():
    digest = "0dbfbb093e13ff03f480c7128bb86cb56f11e5f36b2141e747331e9a0b06512f"
    options = {"format": "gguf", "dtype": None, "all": True, "none": {}}
    assert formats.brief(options) == "format gguf, all yes"
    assert formats.brief(f"sha256:{digest}") == "sha256:0dbfbb093e13…"
    assert formats.brief([1, 0.25, "a"]) == "1, 0.2500, a"
    assert len(formats.brief("long " * 100)) == 120
    assert formats.keys("eval%2Floss/best") == "eval/loss/best"


def test_numbers_are_said_as_people_read_them():
    assert [formats.apart(one) for one in (0, 0.25, 1.5, 75, 7200, 864_000)] == [
        *("0 s", "250 ms", "1.5 s", "1.2 min", "2 h", "10 d"),
    ]
    assert [formats.figure(one) for one in (None, 1.23456, 1e-9, float("nan"), "inf")] == [
        *("–", "1.235", "1.000e-09", "nan", "inf"),
    ]
    assert [
        formats.figure(one) for one in (3.00006, -0.5, 2.0, 0.0, 2.59e8, 12_345.6, 1.5e7 + 0.5)
    ] == [
        *("3.000", "-0.5000", "2", "0", "259000000", "12346", "1.500e+07"),
    ]
    shares = (0.0, 0.00001, 0.0384, 0.5, 0.9996, 1.0)
    assert [formats.percent(one) for one in shares] == [
        "0 %",
        "<0.1 %",
        "3.84 %",
        "50.0 %",
        "100 %",
        "100 %",
    ]
    assert formats.percent(24_700.4) == "×24,700"
    assert formats.spec([None, ["dp", "fsdp"]]) == "–, dp×fsdp"
    assert formats.spec(None) == "–"
    assert formats.quoted("a <b>: see `cairn runs`, or `cairn doctor`") == (
        "a &lt;b&gt;: see <code>cairn runs</code>, or <code>cairn doctor</code>"
    )


numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, max_size=200), st.integers(4, 30))
def test_fewer_points_of_a_curve_have_its_ends_and_its_spikes(values, most):
    chosen = curves.sample_extremes(values, most)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == len(values) if len(values) <= most else len(chosen) <= most
    if values:
        assert {0, len(values) - 1} <= set(chosen)
        assert {min(values), max(values)} <= {values[at] for at in chosen}


@given(st.lists(numbers, max_size=50), st.floats(0, 0.99))
def test_smoothed_curve_is_the_mean_of_what_was_before(values, weight):
    weights = [[weight ** (at - before) for before in range(at + 1)] for at in range(len(values))]
    expected = [np.average(values[: len(one)], weights=one) for one in weights]
    np.testing.assert_allclose(curves.smooth(values, weight), expected, rtol=1e-6, atol=1e-6)


def test_tree_of_a_huge_json_is_bounded_and_says_what_it_leaves_out():
    deep = {}
    for _ in range(60):
        deep = {"deeper": deep, "x": 1}
    tree = json_tree.json_tree({"many": [{"a": number} for number in range(10_000)], "deep": deep})
    nodes = [tree]
    for node in nodes:
        nodes += node.children
    assert len(nodes) <= 1 + json_tree.MAX_NODES
    many, deepest = tree.children
    assert many.size == 10_000
    assert many.left_out == 10_000 - len(many.children) > 0
    assert deepest.size == 2
