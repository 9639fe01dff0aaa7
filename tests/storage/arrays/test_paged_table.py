"""Tables whose pages are read as they are needed, each checked: any rows, and no wrong one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import CorruptionError
from cairn.storage.arrays.paged_table import PagedTable, TableLocation, table_location
from tests.storage.seams import paged_table

NUMBER = np.dtype("<u8")
PAIR = np.dtype([("file", "<u4"), ("name", "u1", (16,))])
ROWS_OF_PAGE = 8


class Stored:
    """A table in a file, and what is read of that."""

    def __init__(self, rows, *, before=13):
        self.rows = rows
        self.data = bytearray(b"x" * before + rows.tobytes() + b"behind")
        self.place = table_location(rows, before)
        self.reads = []
        self._lock = threading.Lock()

    def fetch(self, start, stop):
        with self._lock:
            self.reads.append((start, stop))
        return bytes(self.data[start:stop])

    def table(self, place=None, fetch=None):
        place, fetch = place or self.place, fetch or self.fetch
        return PagedTable(place, self.rows.dtype, fetch, end=1 << 62, path="run/cairn.index")

    def pages(self):
        """(first, last) of the pages that were read in one go."""
        size = ROWS_OF_PAGE * self.rows.dtype.itemsize
        return [
            ((start - self.place.offset) // size, -(-(stop - self.place.offset) // size) - 1)
            for start, stop in sorted(self.reads)
        ]


@pytest.fixture
def small(monkeypatch):
    """A page holds eight numbers."""
    monkeypatch.setattr(paged_table, "PAGE_BYTES", ROWS_OF_PAGE * NUMBER.itemsize)


def numbers(count):
    return np.random.default_rng(count).integers(0, 2**63, count).astype(NUMBER)


@pytest.mark.parametrize("dtype", [NUMBER, PAIR])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_rows_are_those_that_were_written(dtype, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_table, "PAGE_BYTES", 100)
        count = data.draw(st.integers(0, 60))
        raw = np.random.default_rng(count).bytes(count * dtype.itemsize)
        stored = Stored(np.frombuffer(raw, dtype))
        table = stored.table()
        assert len(table) == count
        for _ in range(data.draw(st.integers(1, 5))):
            start = data.draw(st.integers(0, count))
            stop = data.draw(st.integers(start, count))
            if data.draw(st.booleans()):
                table.prefetch([(start, stop), (0, min(3, count))])
            found = table.rows(start, stop)
            assert (found.dtype, found.shape) == (dtype, (stop - start,))
            assert found.tobytes() == stored.rows[start:stop].tobytes()


def test_a_page_is_read_once_and_only_when_it_is_needed(small):
    stored = Stored(numbers(100))
    table = stored.table()
    assert stored.reads == []
    for _ in range(3):
        table.rows(9, 15)
        table.rows(8, 16)
    assert stored.pages() == [(1, 1)]
    table.rows(0, 100)
    size = ROWS_OF_PAGE * NUMBER.itemsize
    assert sum(stop - start for start, stop in stored.reads) <= len(stored.rows) * 8 + 2 * size
    reads = len(stored.reads)
    table.prefetch([(0, 100)])
    assert len(stored.reads) == reads


def test_no_rows_need_no_read(small):
    stored = Stored(numbers(20))
    table = stored.table()
    assert table.rows(7, 7).shape == (0,)
    table.prefetch([(3, 3), (20, 20)])
    assert stored.reads == []
    empty = Stored(numbers(0))
    assert empty.place.pages == ()
    assert empty.table().rows(0, 0).shape == (0,)


def test_pages_that_lie_near_are_read_in_one_go(small):
    stored = Stored(numbers(8 * 400))
    table = stored.table()
    table.prefetch([(8 * page, 8 * page + 1) for page in (0, 1, 3, 50, 52, 90)])
    assert stored.pages() == [(0, 3), (50, 52), (90, 90)]
    stored.reads.clear()
    table.prefetch([(8 * 2, 8 * 3)])  # came along
    assert stored.reads == []


def test_what_is_read_in_one_go_has_an_end(small):
    stored = Stored(numbers(8 * 200))
    stored.table().prefetch([(0, 8 * 200)])
    assert stored.pages() == [(0, 63), (64, 127), (128, 191), (192, 199)]


def test_a_page_is_large_enough_for_few_requests_and_small_enough_to_be_read_for_one_leaf():
    stored = Stored(numbers(3 * paged_table.PAGE_BYTES // 8))
    assert len(stored.place.pages) == 3
    stored.table().rows(paged_table.PAGE_BYTES // 8, paged_table.PAGE_BYTES // 8 + 1)
    ((start, stop),) = stored.reads
    assert stop - start == paged_table.PAGE_BYTES


@pytest.mark.parametrize("dtype", [NUMBER, PAIR])
def test_damage_of_each_page_is_an_error_for_its_rows_and_for_no_others(small, dtype):
    count = 29
    stored = Stored(np.frombuffer(np.random.default_rng(0).bytes(count * dtype.itemsize), dtype))
    step = paged_table.PAGE_BYTES // dtype.itemsize
    for bit in range(0, 8 * count * dtype.itemsize, 7):
        at = stored.place.offset + bit // 8
        stored.data[at] ^= 1 << bit % 8
        hit = bit // 8 // dtype.itemsize // step
        for page in range(len(stored.place.pages)):
            rows = (page * step, min(count, page * step + step))
            table = stored.table()
            if page == hit:
                with pytest.raises(CorruptionError, match=rf"run/cairn\.index: .* of page {page} "):
                    table.rows(*rows)
                with pytest.raises(CorruptionError, match="run/cairn"):
                    table.rows(*rows)  # again
            else:
                assert table.rows(*rows).tobytes() == stored.rows[slice(*rows)].tobytes()
        with pytest.raises(CorruptionError):
            stored.table().rows(0, count)
        stored.data[at] ^= 1 << bit % 8
    assert stored.table().rows(0, count).tobytes() == stored.rows.tobytes()


def test_a_damaged_page_among_many_runs_is_an_error(small):
    stored = Stored(numbers(8 * 40))
    stored.data[stored.place.offset + 8 * 8 * 20] ^= 1
    with pytest.raises(CorruptionError, match="of page 20 "):
        stored.table().prefetch([(8 * page, 8 * page + 8) for page in (0, 10, 20, 30)])


def test_pages_that_changed_places_are_errors(small):
    stored = Stored(numbers(32), before=0)
    stored.data[:64], stored.data[64:128] = stored.data[64:128], stored.data[:64]
    for page in (0, 1):
        with pytest.raises(CorruptionError, match=f"of page {page} "):
            stored.table().rows(8 * page, 8 * page + 8)
    assert stored.table().rows(16, 32).tobytes() == stored.rows[16:].tobytes()


@pytest.mark.parametrize("lost", [1, 8, 70, 10_000])
def test_a_file_cut_short_is_an_error(small, lost):
    stored = Stored(numbers(29), before=0)
    del stored.data[max(0, 29 * 8 - lost) :]
    with pytest.raises(CorruptionError, match=r"expected \d+ bytes at \d+, found \d+ bytes"):
        stored.table().rows(24, 29)


def test_another_number_of_rows_is_an_error(small):
    stored = Stored(numbers(29), before=0)
    offset, rows, pages = stored.place
    for wrong in (24, 33, 0, 1 << 40):
        with pytest.raises(CorruptionError, match=rf"pages of {wrong} rows, found 4"):
            stored.table(TableLocation(offset, wrong, pages))
    with pytest.raises(CorruptionError, match="pages of 29 rows, found 3"):
        stored.table(TableLocation(offset, rows, pages[:-1]))
    for wrong in (25, 28, 30, 32):  # the last page has others
        table = stored.table(TableLocation(offset, wrong, pages))
        assert table.rows(0, 24).tobytes() == stored.rows[:24].tobytes()
        with pytest.raises(CorruptionError, match=r"of page 3 |bytes at"):
            table.rows(24, 25)


@pytest.mark.parametrize("rows", [(0, 30), (-1, 3), (30, 31), (5, 4)])
def test_rows_that_are_not_there_are_an_error(small, rows):
    stored = Stored(numbers(29))
    with pytest.raises(CorruptionError, match=rf"rows {rows[0]} to {rows[1]}, found 29 rows"):
        stored.table().rows(*rows)


def test_a_table_at_another_offset_is_an_error(small):
    stored = Stored(numbers(29))
    with pytest.raises(CorruptionError, match="of page 0 "):
        stored.table(stored.place._replace(offset=stored.place.offset + 8)).rows(0, 1)


def test_many_threads_read_each_page_once(small):
    stored = Stored(numbers(8 * 100))
    table = stored.table()
    barrier = threading.Barrier(8)

    def read_all(seed):
        barrier.wait()
        for start in np.random.default_rng(seed).permutation(np.arange(0, 800, 5)).tolist():
            rows = table.rows(start, start + 5)
            assert rows.tobytes() == stored.rows[start : start + 5].tobytes()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(read_all, seed) for seed in range(8)]:
            done.result()
    read = [page for first, last in stored.pages() for page in range(first, last + 1)]
    assert read == [*range(100)]


def test_an_error_of_the_store_is_told_as_it_is_and_the_page_read_again(small):
    stored = Stored(numbers(29))
    failing = [True]

    def fetch(start, stop):
        if failing:
            raise TimeoutError("no answer")
        return stored.fetch(start, stop)

    table = stored.table(fetch=fetch)
    with pytest.raises(TimeoutError):
        table.rows(0, 29)
    failing.clear()
    assert table.rows(0, 29).tobytes() == stored.rows.tobytes()
