"""Table of fixed-size rows in pages, each of which is checked when it is read.

A reader loads only the pages that it needs, and never uses unchecked bytes.
"""

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np

from cairn.storage.errors import CorruptionError

__all__ = ["PAGE_BYTES", "PagedTable", "TableLocation", "damaged_index", "table_location"]

PAGE_BYTES: Final = 64 << 10
"""Maximum size of a page, in bytes."""

_RUN_PAGES: Final = 64
"""Maximum number of pages per read."""

_GAP_PAGES: Final = 1
"""Number of unneeded pages in a gap that is read too, to save another request."""

_READS_AT_ONCE: Final = 8

Rows = np.ndarray[Any, np.dtype[Any]]
Fetch = Callable[[int, int], bytes | memoryview]
"""Function that returns a file's bytes between two offsets. The table keeps the returned object."""


class TableLocation(NamedTuple):
    """Location of a table in its file.

    Attributes:
        offset: offset of its first byte in the file.
        rows: number of rows.
        pages: SHA-256 of each page, in hexadecimal digits.
    """

    offset: int
    rows: int
    pages: tuple[str, ...]


def table_location(rows: Rows, offset: int) -> TableLocation:
    """Return the location and page digests of a table whose bytes are written at `offset`."""
    step = _page_rows(rows.dtype)
    pages = (rows[at : at + step] for at in range(0, len(rows), step))
    return TableLocation(offset, len(rows), tuple(_sha256(page.tobytes()) for page in pages))


class PagedTable:
    """Rows of a table, read on first use and then cached. Safe for use by many threads."""

    def __init__(
        self, place: TableLocation, row: np.dtype[Any], fetch: Fetch, *, end: int, path: object
    ) -> None:
        """Check the location of a table, without reading from the file.

        Args:
            place: location of the table.
            row: dtype of a row.
            fetch: returns bytes of the file.
            end: offset at which the file's tables end.
            path: the file, for errors.

        Raises:
            CorruptionError: the number of pages does not match the rows, or the table is too long.
        """
        self._place, self._row, self._fetch, self._path = place, row, fetch, path
        self._step = _page_rows(row)
        self._pages: dict[int, Rows] = {}
        self._lock = threading.Lock()
        size = place.rows * row.itemsize
        if place.rows < 0 or not 0 <= place.offset <= end - size:
            raise self._damaged(f"tables within {end} bytes", f"{size} bytes at {place.offset}")
        expected = -(-place.rows // self._step)
        if expected != len(place.pages):
            raise self._damaged(f"{expected} pages of {place.rows} rows", str(len(place.pages)))

    def __len__(self) -> int:
        return self._place.rows

    def rows(self, start: int, stop: int) -> Rows:
        """Return the rows from `start` up to, not including, `stop`.

        Raises:
            CorruptionError: there are no such rows, or their bytes are not what was written.
            StoreUnavailableError: the store gives no answer.
        """
        if not 0 <= start <= stop <= len(self):
            raise self._damaged(f"rows {start} to {stop}", f"{len(self)} rows")
        first, last = start // self._step, max(start, stop - 1) // self._step
        if start == stop:
            return np.empty(0, self._row)
        if any(number not in self._pages for number in range(first, last + 1)):
            self.prefetch([(start, stop)])
        parts = [self._pages[number] for number in range(first, last + 1)]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        skipped = first * self._step
        return rows[start - skipped : stop - skipped]

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Return the rows with these ascending numbers as Python values; cheapest for many at once.

        Raises:
            CorruptionError, StoreUnavailableError: as `rows`.
        """
        self.prefetch((number, number + 1) for number in numbers)
        taken_rows: list[Any] = []
        for page, group in itertools.groupby(numbers, lambda number: number // self._step):
            within = [number - page * self._step for number in group]
            taken_rows += self._pages[page][within].tolist()
        return taken_rows

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read the pages of these ranges of rows that are not cached yet, many at a time.

        Raises:
            CorruptionError: their bytes are not what was written.
            StoreUnavailableError: the store gives no answer.
        """
        pages = {
            number
            for start, stop in ranges
            if start < stop
            for number in range(start // self._step, (stop - 1) // self._step + 1)
        }
        with self._lock:
            runs = list(_runs(sorted(pages.difference(self._pages))))
            if len(runs) == 1:
                self._read(*runs[0])
            elif runs:
                with ThreadPoolExecutor(min(_READS_AT_ONCE, len(runs)), "cairn-index") as pool:
                    for done in [pool.submit(self._read, *run) for run in runs]:
                        done.result()

    def _read(self, first: int, last: int) -> None:
        """Read and check the pages from `first` to `last`."""
        size = self._row.itemsize
        begin = self._place.offset + first * self._step * size
        rows = min((last + 1) * self._step, len(self)) - first * self._step
        data = memoryview(self._fetch(begin, begin + rows * size))
        if len(data) != rows * size:
            raise self._damaged(f"{rows * size} bytes at {begin}", f"{len(data)} bytes")
        for number in range(first, last + 1):
            at = (number - first) * self._step * size
            page = data[at : at + self._step * size]
            digest = _sha256(page)
            if digest != self._place.pages[number]:
                expected = f"SHA-256 {self._place.pages[number]} of page {number} at {begin + at}"
                raise self._damaged(expected, digest)
            self._pages[number] = np.frombuffer(page, self._row)

    def _damaged(self, expected: str, found: str) -> CorruptionError:
        return damaged_index(self._path, expected, found)


def damaged_index(path: object, expected: str, found: str) -> CorruptionError:
    """Return the error for a step's index that is not what was written."""
    return CorruptionError(
        "the index of the step is not what was written",
        path=path,
        expected=expected,
        found=found,
        next_step="Restore the file from a backup, or use another step.",
    )


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each group of pages to read with one request."""
    run: tuple[int, int] | None = None
    for number in numbers:
        if run and (number - run[1] - 1 > _GAP_PAGES or number - run[0] >= _RUN_PAGES):
            yield run
            run = None
        run = (run[0] if run else number, number)
    if run:
        yield run


def _page_rows(row: np.dtype[Any]) -> int:
    return PAGE_BYTES // row.itemsize


def _sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
