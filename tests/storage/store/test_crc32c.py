import google_crc32c
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.store.checksums import CRC_AND_DATA_CRC32C, combine_crc32c


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_crc_of_two_parts_follows_from_theirs(first, second):
    crcs = google_crc32c.value(first), google_crc32c.value(second)
    assert combine_crc32c(*crcs, len(second)) == google_crc32c.value(first + second)


def test_long_parts_are_combined_as_short_ones_are():
    first, second = bytes(range(256)) * 300, b"\x00\x07" * (3 << 20)
    crcs = google_crc32c.value(first), google_crc32c.value(second)
    assert combine_crc32c(*crcs, len(second)) == google_crc32c.value(first + second)


@given(st.binary(max_size=300))
def test_bytes_that_end_in_their_own_crc_have_the_same_crc_whatever_they_are(data):
    checked = data + google_crc32c.value(data).to_bytes(4, "little")
    assert google_crc32c.value(checked) == CRC_AND_DATA_CRC32C
