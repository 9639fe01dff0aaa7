"""What `memory` says of an export, held against what the process really takes for it."""

import json

import pytest

from tests.programs.program import REPOSITORY, run
from tests.service.export_memory import EXPORTS

MARGIN = 1.25
"""Of what is allowed: threads of other things in the process, and an allocator's rests."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    ended = run(["-m", "tests.service.export_memory", folder], cwd=REPOSITORY)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("export", EXPORTS)
def test_an_export_takes_no_more_memory_than_the_least_that_it_accepts(measured, export):
    """`allowed` is that, for as many files as are written at a time; and more is refused."""
    allowed, taken = measured[export]["allowed"], measured[export]["taken"]
    assert isinstance(taken, int), taken
    assert taken > 16 << 20, "nothing was measured"
    assert taken <= MARGIN * allowed, f"{taken >> 20} MiB taken, {allowed >> 20} allowed"


def test_every_export_that_is_measured_is_judged(measured):
    assert sorted(measured) == sorted(EXPORTS)
    assert len(measured) >= 2
