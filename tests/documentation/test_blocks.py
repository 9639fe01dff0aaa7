"""What no test runs of the documentation is marked so, and is linted."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys

import pytest
import typer
import yaml

from tests.documentation.pages import NOT_RUN, ROOT, blocks, pages
from tests.service.commands import whole_command
from tests.test_docs import NOTEBOOKS, OWN_TESTS
from tests.test_docs import RUN as RUN_PAGES

BLOCKS = [block for page in pages() for block in blocks(page)]
RUN = {"python", "sh"}
SHOWN = {"text", "json", "yaml", "diff", "http", "toml", "mermaid"}
"""What is looked at and not typed in: layouts, files, output."""
RUN_ELSEWHERE = {"README.md"}  # tests/test_readme.py, tests/service/test_readme_tour.py
MARKED = "Not run by the tests"
PROGRAM = re.compile(r"^(cairn|curl|docker|gcloud|gsutil|kubectl|make|pip|python) ", re.MULTILINE)
COMMAND = whole_command()
BEGINNINGS = {"!", "--", "do", "if", "then", "until", "while"}
"""Words after which a command stands."""


def of(*kinds):
    return [block for block in BLOCKS if block.kind in kinds]


def test_every_block_says_what_it_is():
    unknown = [block.place for block in BLOCKS if block.kind not in RUN | SHOWN | {NOT_RUN}]
    assert unknown == [], f"each is one of {', '.join(sorted(RUN | SHOWN))}, {NOT_RUN}"


def test_commands_are_never_shown_without_being_run_or_marked():
    found = [one.place for one in BLOCKS if one.kind == "text" and PROGRAM.search(one.text)]
    assert found == [], f"call them sh if the page's test can run them, {NOT_RUN} if it can't"


def test_every_program_is_one_that_a_test_runs_or_says_that_it_is_not():
    run = {f"docs/{name}" for name in [*RUN_PAGES, *OWN_TESTS, *NOTEBOOKS]} | RUN_ELSEWHERE
    left = [
        block.place
        for block in BLOCKS
        if block.kind in RUN
        and not block.title.startswith(MARKED)
        and block.place.partition(":")[0] not in run
    ]
    assert left == []


def test_a_title_is_a_file_or_says_that_the_block_is_not_run():
    titles = {block.place: block.title for block in BLOCKS if block.kind in RUN and block.title}
    file = re.compile(r"[\w.]+\.py")
    wrong = [one for one in titles.items() if not file.fullmatch(one[1]) and MARKED not in one[1]]
    assert wrong == []


def test_the_shell_understands_every_script(tmp_path):
    for number, block in enumerate(of("sh", NOT_RUN)):
        (tmp_path / f"{number}-{block.place.replace('/', '-')}").write_text(block.text)
    every = 'for script in *; do bash -n "$script"; done'
    done = subprocess.run(
        ["bash", "-c", every], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_python_understands_every_program():
    for block in of("python"):
        ast.parse(block.text, block.place)


def test_every_name_of_ours_that_a_program_imports_is_there():
    lost = []
    for block in of("python"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cairn":
                module = importlib.import_module(node.module)
                names = [one.name for one in node.names if not hasattr(module, one.name)]
                lost += [f"{block.place}: {node.module}.{name}" for name in names]
    assert lost == []


def test_a_program_uses_no_name_that_it_does_not_have(tmp_path):
    """Also of the pages whose code only the long run runs."""
    programs = {}
    for block in of("python"):
        if block.title.startswith(MARKED):  # a part of a program
            continue
        page = block.place.partition(":")[0]
        place = block.place if block.title else page  # the blocks without a file are one program
        programs[place] = f"{programs.get(place, '')}\n{block.text}"
    for place, text in programs.items():
        (tmp_path / f"{place.replace('/', '-')}.py").write_text(text)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "."]
    done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout


def test_a_file_that_is_shown_can_be_read():
    for block in of("json", "yaml"):
        try:
            json.loads(block.text) if block.kind == "json" else list(yaml.safe_load_all(block.text))
        except (ValueError, yaml.YAMLError) as error:
            pytest.fail(f"{block.place}: {error}")


def test_a_block_with_the_path_of_a_file_is_that_file():
    shown = [block for block in BLOCKS if "/" in block.title]
    assert shown
    assert [one.place for one in shown if one.text != (ROOT / one.title).read_text()] == []


def lines(text):
    """The words of each line, which goes on where it ends with a backslash or in a text."""
    begun = ""
    for line in text.replace("\\\n", " ").splitlines():
        begun += f"{line}\n"
        lexer = shlex.shlex(begun, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a text that has not ended
            continue
        yield words
        begun = ""


def calls(text):
    """The words of every call of `cairn` in a script."""
    for line in lines(text):
        current, begins = None, True
        for word in [*line, ";"]:
            if set(word) <= set("|&;<>()$") or word in BEGINNINGS:
                if current is not None:
                    yield current
                current, begins = None, not set(word) <= set("<>")  # a file stands behind these
            elif current is not None:
                current.append(word)
            elif begins and word == "cairn":
                current = []
            else:
                begins = begins and "=" in word  # a variable of the command's own


def parse(words):
    """Have the command look at its arguments, without doing anything."""
    command, names = COMMAND, ["cairn"]
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if words[0] not in command.commands:
            raise ValueError(f"no command {words[0]!r}")
        names.append(words[0])
        command, words = command.commands[words[0]], words[1:]
    # As below `cairn`: a command keeps the help option that its first context had.
    command.make_context(" ".join(names), list(words), **COMMAND.context_settings)


def test_every_call_of_the_command_is_one_that_it_takes():
    refused = []
    for block in of("sh", NOT_RUN):
        for words in calls(block.text):
            try:
                parse(words)
            except typer.Exit:  # it has said what it was asked, such as its version
                continue
            except Exception as error:  # of click, or of its copy in typer
                if "does not exist" not in str(error):  # a file of the reader's
                    refused.append(f"{block.place}: cairn {shlex.join(words)}: {error}")
    assert refused == []


@pytest.mark.parametrize(
    "line", ["cairn promte my-run 1 production", "cairn promote my-run --creat", "cairn verify"]
)
def test_a_call_that_the_command_does_not_take_is_found(line):
    ((words),) = calls(line)
    with pytest.raises(Exception, match=r"no command|No such option|Missing parameter"):
        parse(words)


def test_calls_are_found_wherever_they_stand():
    script = (
        "if cairn runs; then exit 1; fi\nx=1 cairn gc a \\\n  --delete # c\necho | cairn path b"
    )
    assert list(calls(script)) == [["runs"], ["gc", "a", "--delete"], ["path", "b"]]


def test_what_is_not_run_is_marked_where_people_read_it(hooks):
    page = f"```{NOT_RUN}\ncairn runs\n```\n"
    marked = hooks.on_page_markdown(page, page=None, config=None, files=None)
    assert marked.startswith(f'```sh title="{MARKED}"\n')
