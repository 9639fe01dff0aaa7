import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.service.client.addresses import Address
from cairn.service.errors import AddressError

RUNS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,20}", fullmatch=True)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
METRICS = st.text(min_size=1).filter(lambda metric: metric not in (":min", ":max"))
STEPS = st.integers(0, 10**16 - 1)


@given(
    st.one_of(
        st.builds(Address, RUNS),
        st.builds(Address, RUNS, alias=NAMES),
        st.builds(Address, RUNS, step=STEPS),
        st.builds(Address, RUNS, best=METRICS),
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
        "run/1",
        "../run",
        "a/run",
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
