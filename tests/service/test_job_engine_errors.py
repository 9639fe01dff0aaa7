import inspect

import pytest
from dbos import error as dbos_errors

from cairn.service.errors import ProblemError
from cairn.service.http.problems import problem_from
from cairn.service.jobs.dbos_engine.jobs import Jobs
from tests.service.seams import engine_errors

KINDS = [
    kind
    for _, kind in inspect.getmembers(dbos_errors, inspect.isclass)
    if issubclass(kind, dbos_errors.DBOSException | dbos_errors.DBOSBaseException)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_of_the_engine_is_a_problem_of_its_own(kind):
    exc = kind.__new__(kind)
    exc.message, exc.dbos_error_code = "told by the engine", None  # as its base class sets them

    @engine_errors.translated
    def fail():
        raise exc

    with pytest.raises(ProblemError, match="told by the engine") as caught:
        fail()
    problem = problem_from(caught.value, instance="/x")
    assert problem.type != "urn:cairn:problem:internal"
    assert problem.status in (404, 409, 500, 503)


def test_whatever_asks_the_engine_is_translated():
    public = [
        name
        for name, function in inspect.getmembers(Jobs, inspect.isfunction)
        if not name.startswith("_") and name != "close"
    ]
    assert len(public) > 8
    assert [name for name in public if not hasattr(getattr(Jobs, name), "__wrapped__")] == []
