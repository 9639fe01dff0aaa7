"""Runs that many tests begin with, made once in each kind of store and copied for each test."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

from cairn import StoreURI, parse_uri
from tests.gcs.server import GcsServer

BUCKET = "made-once"
_NUMBERS = itertools.count()
"""Of what a process makes, whoever asks: the bucket is one for all."""

Make = Callable[[StoreURI], object]


class Copies:
    """What `make` makes, at the places of tests.

    Args:
        folder: for what is made on a disk; a bucket of the double is for the others.
        server: starts the double of a scheme.
    """

    def __init__(self, folder: Path, server: Callable[[str], GcsServer]) -> None:
        self._folder = folder
        self._server = server
        self._made: dict[tuple[Make, str], StoreURI] = {}

    def put(self, make: Make, uri: StoreURI) -> None:
        """Have a folder hold what `make(uri)` makes; its name is the same in every copy."""
        kind = (make, uri.scheme)
        if kind not in self._made:
            source = self._root(uri.scheme) / str(next(_NUMBERS)) / uri.name
            make(source)
            self._made[kind] = source
        source = self._made[kind]
        if uri.scheme == "file":
            shutil.copytree(source.local_path, uri.local_path)
            return
        store = self._server(uri.scheme).store
        here, there = store.bucket(BUCKET), store.bucket(uri.bucket)
        for stored in here.all():
            if stored.name.startswith(f"{source.path}/"):
                name = stored.name.removeprefix(source.path)
                there.link(stored, here, uri.path + name, fields=stored.fields)

    def _root(self, scheme: str) -> StoreURI:
        if scheme == "file":
            return parse_uri(self._folder)
        store = self._server(scheme).store
        if BUCKET not in (bucket.name for bucket in store.buckets()):
            store.create_bucket(BUCKET)
        return parse_uri(f"{scheme}://{BUCKET}")
