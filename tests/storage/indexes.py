"""Indexes of steps taken apart, and made again with something else in them."""

import hashlib
import itertools
import operator
import zlib

import numpy as np

from cairn.storage.runs.records.index_writer import PlacedShard, make_index
from cairn.storage.runs.records.layout import INDEX_FILE, manifest_file, step_dir
from cairn.storage.runs.records.placed import place_of
from tests.storage.records import END, MAGIC, shard_grid, write_record


def parts_of(contents):
    """What `make_index` made an index of."""
    directory = contents.directory
    return {
        "leaves": directory.leaves,
        "forms": directory.forms,
        "meta_digest": directory.meta_digest,
        "shards": {
            (leaf.item, leaf.path): shards_of(contents, leaf)
            for leaf in directory.leaves
            if leaf.shards is not None
        },
        "objects": contents.objects,
        "origins": {
            name: (one.step, one.attempt) for one in contents.shared_files for name in one.files
        },
    }


def shards_of(contents, leaf):
    """The shards of a leaf, as an index has them."""
    places, (_, counts) = contents.item(leaf.item), shard_grid(leaf)
    found = []
    for cell, ref in places.refs(leaf.path).items():
        digests = np.zeros(counts, np.uint64)
        for inner in np.ndindex(counts):
            at = tuple(a * n + b for a, n, b in zip(cell, counts, inner, strict=True))
            digests[inner] = places.expected(leaf.path, leaf.chunks, at)
        origin = tuple(map(operator.mul, cell, leaf.shards))
        file = ref._replace(file=f"{leaf.item}/{ref.file}")
        found.append(PlacedShard(origin, file, digests))
    return found


def forged(data, indexed, plain=b"", *, zipped=None):
    """An index with another directory, and a manifest that knows all its sums.

    Args:
        data: the index.
        indexed: its manifest.
        plain: the directory.
        zipped: the same, compressed.
    """
    offset = indexed.index.directory[0]
    zipped = zlib.compress(plain) if zipped is None else zipped
    digest = hashlib.sha256(zipped)
    data = data[:offset] + zipped + END.pack(offset, len(zipped), digest.digest(), MAGIC)
    ref = indexed.index.model_copy(
        update={
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "directory": (offset, len(zipped)),
            "directory_sha256": digest.hexdigest(),
        }
    )
    return data, indexed.model_copy(update={"index": ref})


def publish_index(run, info, **changes):
    """Replace the index of a step, and its manifest, by ones that fit and say something else.

    Returns:
        What the step holds now.
    """
    manifest, contents = run.manifest(info), run.contents(info)
    name = f"{step_dir(info.attempt, info.step)}/{INDEX_FILE}"
    data, indexed = make_index(
        manifest.model_copy(update={"index": None}),
        place_of(run.objects, name),
        **parts_of(contents) | changes,
    )
    run.objects.write(name, data)
    kept = manifest_file(info.step, info.attempt)
    write_record(run.objects, kept, indexed, generation=run.objects.read(kept).generation)
    return run.contents(run.step(info.step))


def regions_of(contents_ref, directory):
    """(first, last) byte of each part of an index, by name; a table without rows has none.

    Args:
        contents_ref: what the manifest knows of it.
        directory: its directory.
    """
    begin, length = contents_ref.directory
    bounds = [directory.files.offset, directory.values.offset, directory.digests.offset, begin]
    bounds += [begin + length, contents_ref.size]
    names = ("files", "values", "digests", "directory", "end")
    return {
        name: (first, last - 1)
        for name, (first, last) in zip(names, itertools.pairwise(bounds), strict=True)
        if last > first
    }
