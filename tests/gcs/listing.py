"""Listing: prefix, delimiter, offsets, glob and pages over a bucket's sorted names."""

from __future__ import annotations

import base64
import bisect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tests.gcs.errors import InvalidRequestError, NotFoundError
from tests.gcs.objects import Bucket
from tests.gcs.resources import StoredObject

MAX_RESULTS = 1000
LAST_CHARACTER = "\U0010ffff"


class Listed(Protocol):
    """A bucket as far as listings look at it."""

    def batch(self, start: str, *, after: bool, limit: int = 256) -> list[StoredObject]: ...


class FrozenBucket:
    """The names and resources of a bucket at one moment, without the bytes."""

    def __init__(self, objects: Iterable[StoredObject]) -> None:
        self._objects = list(objects)
        self._names = [stored.name for stored in self._objects]

    def batch(self, start: str, *, after: bool, limit: int = 256) -> list[StoredObject]:
        """As `Bucket.batch`."""
        find = bisect.bisect_right if after else bisect.bisect_left
        index = find(self._names, start)
        return self._objects[index : index + limit]


class Snapshot:
    """All buckets at one moment; stands for the store where only listings are asked for."""

    def __init__(self, buckets: Iterable[Bucket] = ()) -> None:
        self._buckets = {bucket.name: FrozenBucket(bucket.all()) for bucket in buckets}

    def bucket(self, name: str) -> FrozenBucket:
        """As `Store.bucket`.

        Raises:
            NotFoundError: if there was none.
        """
        found = self._buckets.get(name)
        if found is None:
            raise NotFoundError("The specified bucket does not exist.")
        return found


@dataclass
class Page:
    """One page of a listing, and the token of the next (None at the end)."""

    items: list[StoredObject] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    next_token: str | None = None


@dataclass(frozen=True)
class Query:
    """What a listing asks for."""

    prefix: str = ""
    delimiter: str = ""
    start: str = ""
    end: str = ""
    glob: re.Pattern[str] | None = None
    after: str | None = None
    include_trailing_delimiter: bool = False
    limit: int = MAX_RESULTS

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Query:
        limit = query.get("maxResults", str(MAX_RESULTS))
        if not limit.isdecimal() or int(limit) == 0:
            raise InvalidRequestError(f"Invalid value for maxResults: {limit!r}")
        token = query.get("pageToken")
        glob = query.get("matchGlob")
        return cls(
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            start=query.get("startOffset", ""),
            end=query.get("endOffset", ""),
            glob=glob_pattern(glob) if glob else None,
            after=decode_token(token) if token else None,
            include_trailing_delimiter=query.get("includeTrailingDelimiter") == "true",
            limit=min(int(limit), MAX_RESULTS),
        )


def encode_token(last: str) -> str:
    """A page token that says: go on after this name."""
    return base64.urlsafe_b64encode(last.encode("utf-8", "surrogatepass")).decode()


def decode_token(token: str) -> str:
    """The name in a page token.

    Raises:
        InvalidRequestError: if it is none of ours.
    """
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode(
            "utf-8", "surrogatepass"
        )
    except ValueError:
        raise InvalidRequestError(f"Invalid page token: {token!r}") from None


def glob_pattern(glob: str) -> re.Pattern[str]:
    """GCS globs: `*` and `?` stop at "/", `**` does not, `{a,b}` and `[x]` as in a shell."""
    parts: list[str] = []
    depth = 0
    index = 0
    while index < len(glob):
        character = glob[index]
        if glob.startswith("**", index):
            parts.append(".*")
            index += 1
        elif character == "*":
            parts.append("[^/]*")
        elif character == "?":
            parts.append("[^/]")
        elif character == "{":
            depth += 1
            parts.append("(?:")
        elif character == "}" and depth:
            depth -= 1
            parts.append(")")
        elif character == "," and depth:
            parts.append("|")
        elif character == "[" and "]" in glob[index + 1 :]:
            end = glob.index("]", index + 1)
            parts.append("[" + glob[index + 1 : end].replace("!", "^", 1) + "]")
            index = end
        else:
            parts.append(re.escape(character))
        index += 1
    try:
        return re.compile("".join(parts) + r"\Z", re.DOTALL)
    except re.error as error:
        raise InvalidRequestError(f"Invalid matchGlob {glob!r}: {error}") from None


def list_page(bucket: Listed, query: Query) -> Page:
    """One page. Items and prefixes count alike towards the limit, in one order of names."""
    page = Page()
    position, after = max(query.prefix, query.start), False
    if query.after is not None and query.after >= position:
        position, after = query.after, True
    last = ""
    while batch := bucket.batch(position, after=after):
        for stored in batch:
            name = stored.name
            if not name.startswith(query.prefix) or (query.end and name >= query.end):
                return page
            position, after = name, True
            group = _group(name, query)
            if query.glob is not None and not query.glob.match(name):
                continue
            if len(page.items) + len(page.prefixes) == query.limit:
                page.next_token = encode_token(last)
                return page
            if group is None:
                page.items.append(stored)
                last = name
                continue
            page.prefixes.append(group)
            if query.include_trailing_delimiter and name == group:
                page.items.append(stored)
            # All names of the group are said with its prefix: go on behind them.
            position = last = group + LAST_CHARACTER
            break
    return page


def _group(name: str, query: Query) -> str | None:
    """The prefix that stands for this name, if the delimiter comes again after `prefix`."""
    if not query.delimiter:
        return None
    cut = name.find(query.delimiter, len(query.prefix))
    return None if cut < 0 else name[: cut + len(query.delimiter)]
