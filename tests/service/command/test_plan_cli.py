"""`cairn plan`: through a control plane, and straight in a store."""

import json
from pathlib import Path

import pytest
from flax import nnx

from cairn import DecoderConfig, DecoderForCausalLM, EasyDeLState, PartitionAxis, make_optimizer
from tests.service.commands import cairn_here
from tests.service.planes import running_plane

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned")
    (folder / "data").mkdir()
    tx, tx_init = make_optimizer("adamw", learning_rate=1e-3)
    model = DecoderForCausalLM(CONFIG, rngs=nnx.Rngs(0))
    state = EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)
    state.save_state(str(folder / "store" / "run"), step=3, wait=True)
    return folder / "store" / "run"


@pytest.fixture(scope="module")
def served(run):
    with running_plane(run.parent, run.parent.parent / "data") as (url, _):
        yield url


@pytest.fixture(params=["server", "store"])
def ask(request, run, served):
    """Runs `cairn plan` of the run, by a control plane or in the store."""
    name = "run" if request.param == "server" else str(run)
    asked = served if request.param == "server" else "http://127.0.0.1:1"
    return lambda *arguments: cairn_here("plan", name, *map(str, arguments), "--url", asked)


def test_a_table_has_a_line_for_leaves_that_are_alike(ask):
    done = ask("--mesh", "fsdp=4,tp=2", "--processes", 2)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        "mesh: dp=1, fsdp=4, tp=2, sp=1 (8 devices of 2 processes)",
        "sharding: divides evenly",
    ]
    assert lines[2].startswith("each device: ")
    (up,) = [line for line in lines if "\tmodel/layers/*/mlp/up_proj/kernel\t3\t" in line]
    assert up.split("\t")[3:7] == ["32x64", "float32", "fsdp, tp", str(8 * 32 * 4)]
    assert "state = EasyDeLState.load_state(" in lines
    assert "    sharding_axis_dims=(1, 4, 2, 1)," in lines


def test_what_does_not_fit_is_named_once_and_the_status_says_so(ask):
    done = ask("--mesh", "tp=4")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[1] == "sharding: 6 leaves do not divide evenly"
    (told,) = [line for line in lines if line.startswith("does not fit: ")]
    assert told == (
        "does not fit: model/model/layers/0/self_attn/k_proj/kernel and 5 more: "
        "2 key/value heads do not divide by tp=4 (shape (32, 16))"
    )
    assert "load_state(" not in done.stdout


def test_json_is_the_answer_of_the_control_plane(ask, tmp_path):
    rules = tmp_path / "rules.json"
    rules.write_text('[["kernel$", [["x", "y"]]], ["none", []], [".*", []]]')
    more = ("--rules", rules, "--dtype", "bfloat16", "--item", "model", "--json")
    done = ask("--mesh", "x=2,y=2", *more)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["mesh"], found["step"]["step"]) == ({"x": 2, "y": 2}, 3)
    assert (found["placed_by"], found["idle_rules"]) == ("rules", ["none"])
    assert {leaf["dtype"] for leaf in found["leaves"]} == {"bfloat16"}
    assert found["bytes_per_device"]["optimizer"] == 0
    assert 'optimizer="skip"' in found["load"]
    assert found["next_page_token"] is None


FILES = {"rules": "rules.json", "text": "text", "deep": "deep"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--mesh", "fsdp"), "found 'fsdp'"),
        (("--mesh", "fsdp=2,fsdp=4"), "each once"),
        (("--mesh", "fsdp=-2"), "found 'fsdp=-2'"),
        (("--mesh", "fsdp=" + "9" * 5000), "each once"),
        (("--mesh", "fsdp=0"), "fsdp: Input should be greater than or equal to 1"),
        (("--mesh", "fsdp=8", "--processes", "3"), "a number that divides 8"),
        (("--mesh", "fsdp=8", "--dtype", "int8"), "dtype"),
        (("--mesh", "fsdp=8", "--rules", "{rules}"), "unknown mesh axis 'tp'"),
        (("--mesh", "fsdp=8", "--rules", "{text}"), "expected JSON"),
        (("--mesh", "fsdp=8", "--rules", "{deep}"), "expected JSON"),
        (("--mesh", "fsdp=2097152"), "at most 1048576 devices"),
    ],
)
def test_what_cannot_be_is_wrong_usage(ask, tmp_path, arguments, told):
    (tmp_path / "rules.json").write_text('[["kernel", ["tp"]]]')
    (tmp_path / "text").write_text("kernel")
    (tmp_path / "deep").write_text("[" * 100_000)
    files = {name: tmp_path / file for name, file in FILES.items()}
    done = ask(*(one.format(**files) for one in arguments))
    assert done.returncode == 2
    assert told in " ".join(done.stderr.replace("│", " ").split())


def test_the_client_gathers_all_pages(run, served):
    from cairn.service.client.client import Client

    with Client(served) as client:
        whole = client.plan("run", 3, {"fsdp": 2})
        paged = client.plan("run", 3, {"fsdp": 2}, page_size=7)
    assert paged == whole
    assert len(whole.leaves) == 3 * (3 * 9 + 3) + 1
    assert Path(run).name in (whole.load or "")


def test_large_leaves_that_stay_whole_and_problems_of_the_config_are_told(tmp_path):
    axes = PartitionAxis()
    config = CONFIG.replace(vocab_size=1024, partition_axis=axes)
    model = DecoderForCausalLM(config, rngs=nnx.Rngs(0))
    EasyDeLState.create(model=model).save_state(str(tmp_path / "run"), step=1, wait=True)
    rules = tmp_path / "rules.json"
    rules.write_text('[["layers", []], [".*", []]]')
    done = cairn_here("plan", str(tmp_path / "run"), "--mesh", "x=8", "--rules", str(rules))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[1] == "sharding: does not fit"
    assert "names mesh axis" in next(line for line in lines if line.startswith("problem: "))
    whole = next(line for line in lines if line.startswith("whole: "))
    assert whole.startswith("whole: model/lm_head/kernel: large, and only the catch-all rule '.*'")
