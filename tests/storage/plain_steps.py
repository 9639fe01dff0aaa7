"""Steps as copies of adopted ones lie: the manifest itself names leaves and files."""

import numpy as np

from cairn import ObjectStore
from cairn.storage.arrays.chunk_digests import FILE_PREFIX, ChunkDigests, DigestedBox
from cairn.storage.arrays.data_files import stored_file
from cairn.storage.runs.records.layout import INDEX_FILE, manifest_file
from cairn.storage.runs.records.manifest import ObjectRecord, PlainStep
from tests.storage.records import put_record, shard_grid

META_FILE = "meta/data.json"


def as_plain_step(run, info, *, digest_files=1):
    """Rewrite a step that has an index as if it were a copy of an adopted one.

    Args:
        run: its run.
        info: the step.
        digest_files: how many processes wrote digests; each has those of some rows of chunks.

    Returns:
        The step's manifest, as it is read now.
    """
    manifest, contents = run.manifest(info), run.contents(info)
    step_uri = run.step_uri(info)
    records = {record.name: record for record in contents.objects}
    for item in sorted({leaf.item for leaf in contents.leaves if leaf.shards is not None}):
        leaves = [leaf for leaf in contents.leaves if leaf.item == item]
        for name, data in digest_files_of(contents, leaves, digest_files).items():
            ObjectStore(step_uri).write(name, data)
            records[name] = record_of(name, data)
    ObjectStore(step_uri).delete(INDEX_FILE)
    keys = {}
    for leaf in contents.leaves:
        if leaf.is_key:
            keys.setdefault(leaf.item, {})[leaf.path] = leaf.dtype
    trees = {item: item for item in manifest.items if item != "meta"}
    json_files = {"meta": META_FILE} if META_FILE in records else {}
    plain = PlainStep(trees=trees, json_files=json_files, keys=keys)
    write_manifest(
        run,
        manifest.model_copy(
            update={
                "index": None,
                "inline_leaves": contents.leaves,
                "inline_objects": tuple(records[name] for name in sorted(records)),
                "plain": plain,
            }
        ),
    )
    return run.manifest(run.step(info.step))


def write_manifest(run, manifest):
    """Store a manifest in its place, whatever is there."""
    put_record(run.objects, manifest_file(manifest.step, manifest.attempt), manifest)


def record_of(name, data):
    """What a manifest has of a file."""
    return ObjectRecord(**stored_file(name, data)._asdict())


def digest_files_of(contents, leaves, count):
    """The files of digests of an item, by name, as `count` processes would have written them."""
    files = [{} for _ in range(count)]
    for leaf in leaves:
        if leaf.shards is None:
            continue
        digests = chunk_digests(contents, leaf)
        for number, (origin, part) in enumerate(_parts(digests, leaf.chunks, count)):
            files[number].setdefault(leaf.path, []).append(DigestedBox(origin, part.shape, part))
    return {
        f"{leaves[0].item}/{FILE_PREFIX}{number}.json": ChunkDigests(boxes).to_bytes()
        for number, boxes in enumerate(files)
    }


def chunk_digests(contents, leaf):
    """The digests of a leaf's chunks, as the step's index has them, by the chunk's index."""
    places = contents.item(leaf.item)
    shape = tuple(a * b for a, b in zip(*shard_grid(leaf), strict=True))
    digests = np.zeros(shape, np.uint64)
    for index in np.ndindex(shape):
        digests[index] = places.expected(leaf.path, leaf.chunks, index)
    return digests


def _parts(digests, chunks, count):
    """(index of the first element, digests) of rows of chunks that lie together."""
    if not digests.ndim:
        yield (), digests
        return
    for rows in np.array_split(np.arange(len(digests)), count):
        if rows.size:
            origin = (int(rows[0]) * chunks[0], *(0,) * (digests.ndim - 1))
            yield origin, digests[rows[0] : rows[-1] + 1]
