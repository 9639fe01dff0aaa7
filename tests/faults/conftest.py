"""The counts of the fault trials reach the terminal, whatever pytest captures."""

import sys

import pytest

from tests.faults import report


@pytest.fixture(params=report.buckets())
def double(request):
    """The double of a bucket, as one test sees it."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session", autouse=True)
def _counts_are_shown(request):
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def tell(line):
        with capture.global_and_fixture_disabled():
            print(line, file=sys.stderr, flush=True)

    report.tell, before = tell, report.tell
    yield
    report.tell = before
