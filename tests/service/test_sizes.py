import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.service.sizes import Size, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_951, "1.0 MB"),
        (269_060_000, "269.1 MB"),
        (1_500_000_000, "1.5 GB"),
        (2 * 10**12, "2.0 TB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_size_is_told_in_the_largest_unit_that_leaves_a_number(size, text):
    assert size_text(size) == text


@given(st.integers(0, 10**15 - 10**11))
def test_number_has_at_most_three_digits_before_the_point(size):
    assert len(size_text(size).split(" ")[0].split(".")[0]) <= 3


def test_size_is_a_number_that_reads_well():
    assert Size(1500) == 1500
    assert str(Size(1500)) == "1.5 kB"
