"""What a process that loads asks of a store does not grow with the number of processes."""

import pytest

from tests.multi_process.loading import ask


@pytest.fixture(scope="module")
def asked(launch, tmp_path_factory):
    return ask(launch, tmp_path_factory.mktemp("loaded"), 2)


def test_a_process_that_is_not_the_first_reads_few_objects_and_lists_nothing(asked):
    _, second = asked
    assert second.lists == 0
    assert len(second.objects) <= 4, second.objects
    assert second.requests <= 4, second.objects


def test_the_first_reads_the_index_instead_of_what_orbax_wrote(asked):
    first, _ = asked
    read = {name.partition("/attempts/1/")[2] for name in first.objects}
    step = {name for name in read if "/" in name}
    assert {name.partition("/")[2] for name in step} == {"cairn.index", "meta/data.json"}
