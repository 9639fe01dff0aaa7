import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import Client
from cairn.service.client.addresses import Address
from cairn.service.client.lookup import find_step
from cairn.service.errors import AddressError, NoCheckpointError
from tests.service.servers import serve
from tests.service.stores import make_run

RUNS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,20}", fullmatch=True)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
ROOTS = st.none() | NAMES
METRICS = st.text(min_size=1).filter(lambda metric: metric not in (":min", ":max"))
STEPS = st.integers(0, 10**16 - 1)


@given(
    st.one_of(
        st.builds(Address, RUNS, root=ROOTS),
        st.builds(Address, RUNS, alias=NAMES.filter(lambda alias: alias != "latest"), root=ROOTS),
        st.builds(Address, RUNS, step=STEPS, root=ROOTS),
        st.builds(Address, RUNS, best=METRICS, root=ROOTS),
    )
)
def test_address_reads_back_as_it_was_written(address):
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@production",
        "run@",
        "run@a@b",
        "run@production/steps/1",
        "run/steps/",
        "run/steps/-1",
        "run/steps/007",
        "run/steps/٣",
        "run/steps/" + "9" * 5000,
        "../run",
        "a/b/run",
        "a/run/1",
        "run\n",
        "gs://bucket/run",
        "run@best:",
        "run@best::max",
        "run/steps/1@best:loss",
    ],
)
def test_text_that_names_no_checkpoint_is_refused_with_the_forms(text):
    with pytest.raises(AddressError, match="expected RUN, RUN@ALIAS, RUN@best:METRIC or"):
        Address.parse(text)


def test_what_an_address_means_is_found_and_what_it_does_not_is_named(app, root):
    make_run(root / "run", [1, 2])
    make_run(root / "empty", [])
    with serve(app) as url, Client(url) as client:

        def found(text):
            return find_step(client, Address.parse(text), "default")

        client.promote("run", 2, "production", expect=None)
        client.annotate("run", 1, metrics={"loss": 0.5})
        assert [found(text) for text in ("run", "run@production")] == [("run", 2)] * 2
        assert [found(text) for text in ("run/steps/1", "run@best:loss:min")] == [("run", 1)] * 2
        with pytest.raises(NoCheckpointError, match="Did you mean 'loss'"):
            found("run@best:lose")
        with pytest.raises(NoCheckpointError, match="empty"):
            found("empty")
