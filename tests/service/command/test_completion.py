"""What the shell completes, with the script that `cairn --show-completion` gives it."""

import os
import subprocess
import sys

import pytest

from cairn import promote_step
from cairn.interop.conversion.tensor_streams import FLOAT_NAMES
from tests.service.commands import cairn_here, environment
from tests.service.planes import running_plane
from tests.service.seams import completion
from tests.service.servers import silent_server
from tests.service.stores import make_run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    run = make_run(root / "llama-sft", [1, 2, 10])
    promote_step(run, 2, "production", by="me", reason="", expect=None)
    make_run(root / "other", [1])
    return root


@pytest.fixture(scope="module")
def url(root, tmp_path_factory):
    with running_plane(root, tmp_path_factory.mktemp("plane")) as (url, _):
        yield url


def complete(*words, url):
    """What is offered to Bash once the words are typed, the last of which is not finished."""
    done = cairn_here(
        url=url,
        _CAIRN_COMPLETE="complete_bash",
        COMP_WORDS="\n".join(("cairn", *words)),
        COMP_CWORD=str(len(words)),
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_bash_completes_by_the_script_that_the_command_shows(url, tmp_path):
    (tmp_path / "cairn").write_text(f'#!/bin/sh\nexec {sys.executable} -m cairn "$@"\n')
    (tmp_path / "cairn").chmod(0o755)
    script = (
        'eval "$(cairn --show-completion bash)"\n'
        "COMP_WORDS=(cairn path llama-sft @ pro); COMP_CWORD=4\n"
        '_cairn_completion cairn\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    variables = environment(
        url,
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=os.pathsep.join(sys.path),
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1",
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=variables, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "production\n", "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["che"], ["checkpoints"]),
        (["checkpoints", "ll"], ["llama-sft"]),
        (["checkpoints", ""], ["llama-sft", "other"]),
        (["checkpoints", "other", "--state", "li"], ["listed"]),
        (["checkpoints", "other", "--state", "=", "li"], ["listed"]),
        (["checkpoints", "other", "--root", ""], ["default"]),
        (["promote", "llama-sft", "1"], ["10", "1"]),
        (["promote", "llama-sft", "1", "p"], ["production"]),
        (["convert", "llama-sft", "--dtype", "bf"], ["bfloat16"]),
        (["convert", "ot"], ["other"]),
        (["path", "llama-sft/st"], [f"llama-sft/steps/{step}" for step in (10, 2, 1)]),
        (["path", "llama-sft@pro"], ["llama-sft@production"]),
        (["path", "llama-sft", "@", "pro"], ["production"]),  # as Bash takes it apart
        (["path", "llama-sft", "@"], ["production"]),
        (["delete", "other/"], ["other/steps/1"]),
        (["operations", "--state", "s"], ["succeeded"]),
        (["watch", "op-"], []),
        (["workers", "take-over", ""], []),
        (["checkpoints", "nobody@"], []),
        (["promote", "nobody", ""], []),
    ],
)
def test_names_are_completed_from_the_control_plane(url, words, offered):
    assert complete(*words, url=url) == offered


def test_without_a_control_plane_nothing_is_said_and_the_rest_is_completed():
    assert complete("checkpoints", "", url="http://127.0.0.1:9") == []
    assert complete("checkpoints", "x", "--state", "tr", url="http://127.0.0.1:9") == ["trashed"]


def test_a_silent_control_plane_keeps_nobody_waiting():
    with silent_server() as (url, was_left):
        assert complete("checkpoints", "", url=url) == []
        assert was_left()


def test_dtypes_are_those_that_an_export_can_have():
    assert set(completion.DTYPES) == set(FLOAT_NAMES)


@pytest.mark.parametrize(
    ("words", "cword", "joined", "known"),
    [
        ("cairn\npath\na\n@\nb", "4", ("cairn\npath\na@b", "2"), "a@"),
        ("cairn\npath\na", "2", None, ""),
        ("cairn\nruns\n--url\n=\nx", "4", ("cairn\nruns\n--url=x", "2"), ""),
        ("cairn", "x", None, ""),
    ],
)
def test_words_are_put_together_that_bash_took_apart(words, cword, joined, known):
    given = {"_CAIRN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": cword}
    before = dict(given)
    assert completion.rejoin_words(given) == known
    if joined is None:
        assert given == before
    else:
        assert (given["COMP_WORDS"], given["COMP_CWORD"]) == joined
    assert completion.rejoin_words({"COMP_WORDS": words, "COMP_CWORD": cword}) == ""
