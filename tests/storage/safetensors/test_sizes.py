import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import UnsupportedFormatError
from cairn.storage.safetensors.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("1.5 kb", 1500),
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("3TB", 3 * 10**12),
        ("1TiB", 1 << 40),
        (17, 17),
        ("9", 9),
        ("9B", 9),
        (" 9 ", 9),
        ("9007199254740993", 2**53 + 1),  # not by way of a float
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_sizes_are_decimal_unless_binary_is_asked_for(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "GB", "-5GB", "0", "5 parsecs", "1e9", "5ib", "5G B", "٣GB", "0.4B", "inf", "nan"),
        *("9" * 400 + "GB", "9223372036854775808", "5 GB GB", "5\nGB"),
        *(0, -1, True, None, 2**63),
    ],
)
def test_what_is_no_size_is_refused_with_the_forms_that_are(text):
    with pytest.raises(UnsupportedFormatError, match=r"not a size.*5GB.*512MiB.*KiB") as caught:
        parse_size(text)
    assert caught.value.found == repr(text)


@given(st.integers(1, 10**6), st.sampled_from(["kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_a_size_is_its_number_of_units(number, unit):
    power = "kmgt".index(unit[0].lower()) + 1
    assert parse_size(f"{number}{unit}") == number * (1024 if "i" in unit else 1000) ** power


def test_reading_a_size_needs_no_arrays():
    program = (
        "import sys; from cairn.storage.safetensors.sizes import parse_size; parse_size('5GB');"
        "print(*{'numpy', 'tensorstore'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\n", "")
