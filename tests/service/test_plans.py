"""`POST …:plan`: what a step needs on a mesh, and the load that it says."""

import ast
import re
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from cairn import (
    Checkpointer,
    CheckpointReader,
    DecoderConfig,
    DecoderForCausalLM,
    EasyDeLState,
    PartitionAxis,
    adopt,
    make_optimizer,
    model_map,
)
from cairn.state.checkpointing.trees import nest
from cairn.state.paths import named_leaves
from tests.service.jobs import CONFIG as LLAMA
from tests.service.jobs import leaves_of
from tests.service.stores import begin_saving, make_run

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
URL = "/v1/roots/default/runs/{}/checkpoints/1:plan"
RULES = [["embedding", ["tp", "fsdp"]], ["kernel", [["fsdp", "tp"], None]], [".*", []]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with a state of a decoder, and Adam's moments."""
    folder = tmp_path_factory.mktemp("planned") / "run"
    tx, tx_init = make_optimizer("adamw", learning_rate=1e-3)
    model = DecoderForCausalLM(CONFIG, rngs=nnx.Rngs(0))
    state = EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)
    state.save_state(str(folder), step=1, wait=True)
    return folder


@pytest.fixture
def root(trained):
    return trained.parent


@pytest.fixture(autouse=True)
def unread(monkeypatch):
    """No values are read, and nothing of the step but its index."""

    def refuse(*arguments, **options):
        raise AssertionError("values were read")

    monkeypatch.setattr(CheckpointReader, "iter_blocks", refuse)
    monkeypatch.setattr(CheckpointReader, "meta", refuse)


def ask(http, axes, run="run", **more):
    processes = more.pop("processes", 1)
    parameters = more.pop("parameters", {})
    body = {"mesh": {"axes": axes, "processes": processes}} | more
    return http.post(URL.format(run), json=body, params=parameters)


def plan(http, axes, **more):
    answer = ask(http, axes, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def by_path(found):
    return {(leaf["item"], leaf["path"]): leaf for leaf in found["leaves"]}


def test_a_plan_tells_where_leaves_go_and_what_each_device_holds(http):
    found = plan(http, {"fsdp": 4, "tp": 2})
    assert found["mesh"] == {"dp": 1, "fsdp": 4, "tp": 2, "sp": 1}
    assert (found["devices"], found["fits"], found["placed_by"]) == (8, True, "axis_names")
    leaves = by_path(found)
    kernel = leaves["model", "model/layers/0/mlp/up_proj/kernel"]
    assert kernel["spec"] == ["fsdp", "tp"]
    assert (kernel["part"], kernel["bytes_per_device"]) == ([8, 32], 8 * 32 * 4)
    moment = leaves["optimizer", "0/mu/model/layers/0/mlp/up_proj/kernel"]
    assert (moment["spec"], moment["rule"]) == (["fsdp", "tp"], "mirrors its parameter")
    device = found["bytes_per_device"]
    assert device["model"] == sum(
        leaf["bytes_per_device"] for (item, _), leaf in leaves.items() if item == "model"
    )
    assert device["optimizer"] == 2 * device["model"] + 4  # and a counter
    assert device["total"] == device["model"] + device["optimizer"] + device["other"]
    assert found["read_bytes"] == found["read_bytes_in_all"] == found["bytes"]


@pytest.fixture
def paste(monkeypatch):
    """Runs the load that a plan says; the state that it makes."""
    monkeypatch.undo()

    def load(text):
        made = {}
        exec(text, made)
        return made["state"]

    return load


def held(state):
    """Bytes of each leaf on a device, as they are."""
    trees = {"model": nnx.merge_state(state.graphstate, state.graphother)}
    if state.opt_state is not None:
        trees["optimizer"] = state.opt_state
    return {
        (item, named.path): (
            named.leaf.addressable_shards[0].data.nbytes,
            str(named.leaf.dtype),
        )
        for item, tree in trees.items()
        for named in named_leaves(tree)
    }


@pytest.mark.parametrize(
    ("axes", "more"),
    [
        ({"fsdp": 4, "tp": 2}, {}),
        ({"tp": 2, "fsdp": 2, "dp": 2}, {"dtype": "bfloat16"}),
        ({"fsdp": 2, "tp": 2}, {"rules": RULES}),
        ({"x": 4}, {"rules": [["kernel", ["x"]], [".*", []]], "items": ["model"]}),
        ({"dp": 2, "fsdp": 2, "tp": 1, "sp": 2}, {"items": ["model"]}),
    ],
)
def test_the_load_that_a_plan_says_places_what_was_planned(http, paste, axes, more):
    found = plan(http, axes, **more)
    assert found["fits"]
    state = paste(found["load"])
    planned = {
        key: (leaf["bytes_per_device"], leaf["dtype"]) for key, leaf in by_path(found).items()
    }
    assert planned == held(state)
    mesh = {name: size for name, size in state.model.mesh.shape.items() if size > 1}
    assert mesh == {name: size for name, size in found["mesh"].items() if size > 1}


def test_what_does_not_divide_comes_first_with_leaf_axis_and_sizes(http, root, paste):
    found = plan(http, {"tp": 4})
    assert (found["fits"], found["misfits"], found["load"]) == (False, 4, None)
    first = found["leaves"][0]
    assert first["path"] == "model/layers/0/self_attn/k_proj/kernel"
    (misfit,) = first["misfits"]
    assert misfit["detail"].startswith("2 key/value heads do not divide by tp=4")
    assert (misfit["dimension"], misfit["length"]) == (1, 16)
    assert (misfit["axes"], misfit["parts"]) == (["tp"], 4)
    assert [bool(leaf["misfits"]) for leaf in found["leaves"]] == [True] * 4 + [False] * (
        len(found["leaves"]) - 4
    )
    with pytest.raises(ValueError, match="do not divide by tp=4"):
        EasyDeLState.load_state(
            str(root / "run"),
            auto_shard_model=True,
            sharding_axis_dims=(1, 1, 4, 1),
        )


def test_a_page_goes_on_after_the_one_before(http):
    whole = plan(http, {"fsdp": 8})
    first = plan(http, {"fsdp": 8}, parameters={"page_size": 5})
    token = first["next_page_token"]
    second = plan(http, {"fsdp": 8}, parameters={"page_size": 1000, "page_token": token})
    assert first["leaves"] + second["leaves"] == whole["leaves"]
    assert {**first, "leaves": [], "next_page_token": None} == {**whole, "leaves": []}
    other = ask(http, {"fsdp": 4}, parameters={"page_token": token})
    assert other.status_code == 422


def test_processes_read_what_their_devices_hold(http):
    one, four = (plan(http, {"dp": 2, "fsdp": 4}, processes=n) for n in (1, 4))
    assert one["read_bytes"] == one["read_bytes_in_all"]
    # So small a leaf is one chunk, which every process that has a part of it reads.
    assert four["read_bytes"] == one["read_bytes"]
    assert four["read_bytes_in_all"] == 4 * one["read_bytes_in_all"]
    assert four["host_bytes"] < one["host_bytes"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"mesh": {"axes": {"fsdp": 0}}}, "body.mesh.axes.fsdp"),
        ({"mesh": {"axes": {"fsdp": -4}}}, "body.mesh.axes.fsdp"),
        ({"mesh": {"axes": {}}}, "body.mesh.axes"),
        ({"mesh": {"axes": {"fsdp": 1.5}}}, "body.mesh.axes.fsdp"),
        ({"mesh": {"axes": {"os.system('x')": 2}}}, "body.mesh.axes"),
        ({"mesh": {"axes": {"fsdp": 2**40}}}, "at most 1048576 devices"),
        ({"mesh": {"axes": {"a": 2**53 - 1, "b": 2**53 - 1}}}, "at most 1048576 devices"),
        ({"mesh": {"axes": {"fsdp": 8}, "processes": 3}}, "a number that divides 8"),
        (
            {"mesh": {"axes": {"fsdp": 8}}, "rules": [["a", ["tp"]], ["b", ["fsdp", ["fsdp"]]]]},
            "'a': unknown mesh axis 'tp'; 'b': mesh axis 'fsdp' twice",
        ),
        (
            {"mesh": {"axes": {"fsdp": 8}}, "rules": [["(", []], ["x", []], ["a**", []]]},
            "missing ), unterminated subpattern",
        ),
        ({"mesh": {"axes": {"fsdp": 8}}, "rules": [["x", "fsdp"]]}, "body.rules.0"),
        ({"mesh": {"axes": {"fsdp": 8}}, "dtype": "int8"}, "body.dtype"),
        ({"mesh": {"axes": {"fsdp": 8}}, "nonsense": 1}, "body.nonsense"),
    ],
)
def test_meshes_and_rules_that_cannot_be_are_refused(http, body, told):
    answer = http.post(URL.format("run"), json=body)
    assert answer.status_code == 422
    assert told in answer.text


def test_every_expression_that_is_none_is_named(http):
    answer = ask(http, {"fsdp": 2}, rules=[["(", []], ["x", []], ["a**", []]])
    assert [one["field"] for one in answer.json()["errors"]] == ["body.rules.0", "body.rules.2"]


@pytest.mark.parametrize(
    "pattern",
    [r"^(([a-z_/0-9]+)+)!$", "(.*)*(.*)*(.*)*(.*)*=x$"],
)
def test_expressions_that_take_for_ever_are_refused_and_stop_nobody(http, monkeypatch, pattern):
    monkeypatch.setattr("cairn.service.jobs.rule_matches.MATCH_SECONDS", 0.5)
    answer = ask(http, {"fsdp": 2}, rules=[[pattern, []], [".*", []]])
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("rules: expected regular expressions")


def test_a_rule_stays_text_in_the_load_that_is_told(http):
    pattern = "x'), __import__('os') #\n\""
    found = plan(
        http, {"fsdp": 2}, rules=[[pattern.replace("(", "[(]").replace(")", "[)]"), []], ["", []]]
    )
    tree = ast.parse(found["load"])
    (call,) = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.keywords]
    rules = next(one.value for one in call.keywords if one.arg == "partition_rules")
    assert [ast.literal_eval(pair.elts[0]) for pair in rules.elts] == [
        pattern.replace("(", "[(]").replace(")", "[)]"),
        "",
    ]


def test_rules_that_take_no_leaf_are_told(http):
    found = plan(http, {"fsdp": 2}, rules=[["no_such", ["fsdp"]], ["kernel", ["fsdp"]], ["", []]])
    assert (found["idle_rules"], found["placed_by"]) == (["no_such"], "rules")
    assert any("large leaves" in note for note in found["notes"]) is False


def test_a_leaf_without_a_rule_does_not_fit(http):
    found = plan(http, {"fsdp": 2}, rules=[["kernel", ["fsdp"]]])
    assert not found["fits"]
    assert found["leaves"][0]["misfits"][0]["detail"].startswith("no partition rule matches")


def test_unknown_steps_runs_and_items_are_told_apart(http, root):
    assert ask(http, {"fsdp": 2}, run="none").status_code == 404
    missing = http.post(URL.format("run").replace("/1:", "/9:"), json={"mesh": {"axes": {"x": 1}}})
    assert missing.status_code == 404
    item = ask(http, {"fsdp": 2}, items=["model", "weights"])
    assert (item.status_code, "'weights'" in item.text) == (404, True)


def test_a_step_that_is_being_written_is_a_conflict(http, root):
    run = make_run(root / "writing")
    begin_saving(run, 1)
    answer = ask(http, {"fsdp": 2}, run="writing")
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:cairn:problem:step-in-flight"


def test_a_step_without_a_model_is_whole_on_every_device_and_said_to_be(http, root):
    tree = {"weights": {"w": np.ones((256, 256), np.float32)}, "count": {"n": np.int32(1)}}
    with Checkpointer(str(root / "bare")) as checkpointer:
        checkpointer.save(1, tree, meta={}).wait()
    found = plan(http, {"fsdp": 8}, run="bare")
    assert (found["placed_by"], found["load"]) == ("nothing", None)
    assert found["notes"][0] == (
        "No model config: without sharding rules every tensor is replicated"
    )
    assert found["bytes_per_device"]["other"] == found["bytes"] == 256 * 256 * 4 + 4
    ruled = plan(http, {"fsdp": 8}, run="bare", rules=[["^w$", ["fsdp"]], [".*", []]])
    assert by_path(ruled)["weights", "w"]["part"] == [32, 256]
    page = http.get("/ui/default/bare/steps/1/plan", params={"mesh": "fsdp=8"}).text
    assert re.findall(r"<dt>(\w+) per device</dt>", page) == ["Other"]


def test_an_adopted_step_is_planned_by_rules(http, root, tmp_path, monkeypatch):
    monkeypatch.undo()
    with ocp.CheckpointManager(tmp_path / "plain") as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": np.ones((8, 4), np.float32)}))
        manager.wait_until_finished()
    adopt(str(tmp_path / "plain"), run=str(root / "adopted"))
    found = plan(http, {"fsdp": 4}, run="adopted", rules=[["w", ["fsdp"]]])
    (leaf,) = found["leaves"]
    assert (leaf["part"], found["load"], found["fits"]) == ([2, 4], None, True)
    assert any("cairn.load" in note for note in found["notes"])


def test_partition_axes_that_the_mesh_lacks_are_problems_of_the_load(http, root):
    config = CONFIG.replace(partition_axis=PartitionAxis())
    model = DecoderForCausalLM(config, rngs=nnx.Rngs(0))
    EasyDeLState.create(model=model).save_state(str(root / "axes"), step=1, wait=True)
    assert plan(http, {"fsdp": 4}, run="axes")["fits"]
    found = plan(http, {"x": 4}, run="axes", rules=[[".*", []]])
    assert (found["fits"], found["load"]) == (False, None)
    assert "names mesh axis" in found["problems"][0]


def test_planning_loads_no_array_framework(trained):
    program = f"""
import sys
from cairn.service.actions.caches import StepCache
from cairn.service.actions.plans import plan_step
from cairn.service.schemas import PlanRequest, StepName
from cairn import resolve_checkpoint

run, info = resolve_checkpoint({str(trained)!r})
name = StepName(root="default", run="run", step=1)
wanted = PlanRequest.model_validate({{"mesh": {{"axes": {{"fsdp": 8}}}}}})
plan, _ = plan_step(StepCache().open(run, info), name, "uri", wanted, after=0, limit=None)
assert plan.placed_by == "axis_names"
assert not {{"jax", "flax", "optax", "orbax", "torch"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_there_are_eight_devices_to_compare_with():
    assert jax.device_count() == 8


def test_an_adopted_model_goes_by_its_axis_names_and_no_load_is_told(
    http, root, tmp_path, monkeypatch
):
    monkeypatch.undo()
    with ocp.CheckpointManager(tmp_path / "plain") as manager:
        manager.save(1, args=ocp.args.StandardSave(nest(leaves_of(LLAMA))))
        manager.wait_until_finished()
    model = model_map(LLAMA, {"state/(.*)": r"\1"})
    adopt(str(tmp_path / "plain"), run=str(root / "mapped"), model=model)
    found = plan(http, {"fsdp": 4, "tp": 2}, run="mapped")
    assert (found["placed_by"], found["fits"], found["load"]) == ("axis_names", True, None)
    up = by_path(found)["model", "model/layers/1/mlp/up_proj/kernel"]
    assert (up["spec"], up["part"]) == (["fsdp", "tp"], [8, 32])
    assert any("cairn.load" in note for note in found["notes"])
