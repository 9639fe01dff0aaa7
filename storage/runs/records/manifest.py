"""Manifest of a step: what was saved. It is written once Orbax has committed the step.

A step is verified complete once its manifest exists. The manifest holds what readers need often,
and stays small however large the step is. Leaves and files are listed in the step's index, whose
SHA-256 the manifest holds. The manifest also has a checksum of itself, so that readers can rely on
it.

The manifest of a step that Cairn did not save lists every leaf and every file itself, because Cairn
writes nothing into that step's folder. `step_contents` reads both kinds.
"""

from typing import Annotated, ClassVar, Final, NamedTuple, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    model_validator,
)
from typing_extensions import override

from cairn.storage.arrays.data_files import Compression
from cairn.storage.errors import UnsupportedFormatError
from cairn.storage.runs.records.layout import MAX_NUMBER
from cairn.storage.store.bounds import FreeJson, max_entries
from cairn.storage.store.clock import Moment, from_rfc3339
from cairn.storage.store.records import Record, RecordLocation, sha256_of

__all__ = [
    "CONTENT_FIELDS",
    "MOST_FILES",
    "MOST_LEAVES",
    "AssetRecord",
    "IndexRef",
    "LeafRecord",
    "Leaves",
    "Manifest",
    "ManifestSummary",
    "ModelInfo",
    "ObjectRecord",
    "Objects",
    "PlainStep",
    "SharedFiles",
    "refuse_crowded_step",
]

MOST_LEAVES: Final = 100_000
"""Most leaves of a step. Each takes some 4 kB of memory while it is read."""

MOST_FILES: Final = 250_000
"""Most files of a step. Each takes some 1 kB of memory while it is read."""

_MOST_ITEMS: Final = 1000

_MOST_AXES: Final = 64
"""Most axes of an array; the same as NumPy's limit."""

MAX_BYTES: Final = 2**53 - 1
"""Most bytes of a step: the largest integer that every reader of JSON keeps exact."""

Natural = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Number = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Shape = Annotated[tuple[Natural, ...], Field(max_length=_MOST_AXES)]
Spec = Annotated[tuple[str | tuple[str, ...] | None, ...], Field(max_length=_MOST_AXES)]
Processes = Annotated[int, Field(ge=1, le=10**6)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

_BITS = {"bool": 8, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "float4_e2m1fn": 4}


_KEY_WORD_BYTES: Final = 4

_KEY_WORDS: Final = {"key<fry>": 2, "key<threefry2x32>": 2, "key<rbg>": 4, "key<urbg>": 4}
"""Words of a key, by dtype; "key<threefry2x32>" is how earlier imports called "key<fry>"."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LeafRecord(_Part):
    """Array (or other leaf) of an item.

    Attributes:
        item: name of the item, such as "model" or "optimizer".
        path: keys joined by "/"; see `leaf_paths`.
        shape: the global shape; () for a scalar.
        dtype: name of the dtype, such as "bfloat16".
        spec: for each axis a mesh axis, a list of them, or None; None instead of a list if the leaf
            has no named sharding.
        chunks: shape of the smallest part that can be read; None if the leaf is not an array.
        shards: shape of the part in one stored value; None if the leaf is not an array.
        digest: digest of the leaf's elements, "algorithm:hex"; None if it was not computed.
        compression: compression of the stored chunks; None, and not in the JSON, without one.
    """

    item: str
    path: str
    shape: Shape
    dtype: str
    spec: Spec | None = None
    chunks: Shape | None = None
    shards: Shape | None = None
    digest: str | None = None
    compression: Compression | None = Field(default=None, exclude_if=lambda field: field is None)

    @property
    def is_key(self) -> bool:
        """True if the elements are typed PRNG keys."""
        return self.dtype.startswith("key<")

    @property
    def key_words(self) -> tuple[int, ...]:
        """Trailing axis of words that each typed PRNG key has beyond its logical shape."""
        if not self.is_key:
            return ()
        if self.shards is not None:
            return self.shards[len(self.shape) :]
        return (_KEY_WORDS.get(self.dtype, max(_KEY_WORDS.values())),)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the whole array in memory, packed for dtypes below one byte."""
        count = 1
        for size in (*self.shape, *self.key_words):
            count *= size
        if self.is_key:
            return count * _KEY_WORD_BYTES
        return (count * dtype_bits(self.dtype) + 7) // 8


class ObjectRecord(_Part):
    """File or object of the step's folder.

    Attributes:
        name: path relative to the step's folder.
        size: size in bytes.
        crc32c: eight hexadecimal digits.
        content: result of `ContentSum.text`; None if it was not computed because the bytes were not
            in memory.
        modified_ns: time of the last modification of a file outside of the run, in nanoseconds
            since the epoch; None if unknown.
    """

    name: str
    size: Natural
    crc32c: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    content: Annotated[str, Field(pattern=r"^words-64:[0-9a-f]{16}$")] | None = None
    modified_ns: int | None = Field(default=None, exclude_if=lambda field: field is None)


class SharedFiles(_Part):
    """Files that a step shares with an earlier one, by links or by copies that the store made.

    Attributes:
        step: the step that wrote the files; it may be deleted.
        attempt: the attempt that wrote that step.
        files: names of the files, the same in both steps' folders.
    """

    step: Number
    attempt: Number
    files: tuple[str, ...]


class AssetRecord(_Part):
    """Small file that goes with the model, such as a tokenizer's.

    Attributes:
        name: file name for exports.
        sha256: SHA-256 of its bytes, which are stored at `layout.asset_file(sha256)`.
        size: size in bytes.
    """

    name: str
    sha256: Sha256
    size: Natural


class ModelInfo(_Part):
    """Model to which the leaves belong.

    Attributes:
        model_type: name of the family, such as "llama".
        model_class: name of the model's class.
        config: the model's config as JSON.
    """

    model_type: str | None = None
    model_class: str | None = None
    config: FreeJson = Field(default_factory=dict)


_T = TypeVar("_T")
_OfItems = Annotated[dict[str, _T], max_entries(_MOST_ITEMS)]
_OfLeaves = Annotated[dict[str, _T], max_entries(MOST_LEAVES)]

Leaves = Annotated[tuple[LeafRecord, ...], Field(max_length=MOST_LEAVES), FailFast()]
Objects = Annotated[tuple[ObjectRecord, ...], Field(max_length=MOST_FILES), FailFast()]


class PlainStep(_Part):
    """Layout of a step that plain Orbax wrote and Cairn imported.

    Attributes:
        source: the step's folder, in which Cairn never writes; None for a copy, whose files are in
            the run.
        trees: item -> folder of its tree; "" is the step's own folder.
        json_files: JSON item -> its file.
        arrays: for items that are a part of a tree: item -> path -> Orbax's name of the leaf.
            Another item of the same folder that is not listed here has the remaining leaves.
        keys: PRNG implementation of leaves that are typed keys, by item and path.
    """

    source: str | None = Field(default=None, exclude_if=lambda field: field is None)
    trees: _OfItems[str]
    json_files: _OfItems[str] = Field(default_factory=dict)
    arrays: _OfItems[_OfLeaves[str]] = Field(default_factory=dict)
    keys: _OfItems[_OfLeaves[str]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_items(self) -> "PlainStep":
        unknown = {*self.arrays, *self.keys} - {*self.trees}
        if unknown:
            raise ValueError(f"arrays and keys of its trees, found some of {sorted(unknown)[:5]}")
        return self


class IndexRef(_Part):
    """Reference of a manifest to its step's index.

    Attributes:
        size: size of the file in bytes.
        sha256: SHA-256 of the file.
        directory: offset and size in bytes of its directory.
        directory_sha256: SHA-256 of the directory as stored.
        nbytes: sum of the sizes in bytes of all files of the step.
        files: number of the step's files.
        leaves: number of the step's leaves.
        leaves_digest: digest over all leaves and their values, see `digest_of_leaves`; None if a
            leaf has no digest.
    """

    size: Natural
    sha256: Sha256
    directory: tuple[Natural, Natural]
    directory_sha256: Sha256
    nbytes: Natural
    files: Natural
    leaves: Natural
    leaves_digest: Sha256 | None = Field(default=None, exclude_if=lambda field: field is None)


CONTENT_FIELDS: Final = {"index", "inline_leaves", "inline_objects", "plain"}
"""Fields of a manifest that describe leaves and files. All other fields are in the index too."""


class Manifest(Record):
    """Description of a committed step, except for its leaves and files.

    Attributes:
        step: step number.
        attempt: the attempt that wrote the step.
        created: time of the save, RFC 3339 in UTC.
        writer: id of the writer.
        items: names of the stored items.
        iterators: data iterators whose position was saved -> number of processes that saved it; not
            in the JSON if it is empty.
        index: reference to the step's index; None if Cairn did not save the step.
        inline_leaves: every leaf of every item, if there is no index.
        inline_objects: every file of the step, if there is no index.
        assets: small files stored in the run.
        model: the model; None if none was saved.
        environment: versions and hosts, for people.
        plain: layout and folder of a step that Cairn did not save; None for others.
    """

    FORMAT: ClassVar[str] = "cairn.manifest"
    step: Number
    attempt: Number
    created: Moment
    writer: str
    items: tuple[str, ...]
    iterators: dict[str, Processes] = Field(
        default_factory=dict, exclude_if=lambda field: not field
    )
    index: IndexRef | None = Field(default=None, exclude_if=lambda field: field is None)
    inline_leaves: Leaves = Field(default=(), alias="leaves")
    inline_objects: Objects = Field(default=(), alias="objects")
    assets: tuple[AssetRecord, ...] = ()
    model: ModelInfo | None = None
    environment: FreeJson = Field(default_factory=dict)
    plain: PlainStep | None = Field(default=None, exclude_if=lambda field: field is None)

    @model_validator(mode="after")
    def _check_contents(self) -> "Manifest":
        has_inline = bool(self.inline_leaves or self.inline_objects)
        if has_inline and self.plain is None:
            raise ValueError("leaves and objects only of a plain step")
        if self.plain is not None and (self.index is not None or not self.inline_objects):
            raise ValueError("every file of a plain step, and no index")
        if self.nbytes > MAX_BYTES:
            raise ValueError(f"at most {MAX_BYTES} bytes in all, found {self.nbytes}")
        return self

    @classmethod
    @override
    def parse(cls, data: bytes, path: object, place: RecordLocation | None = None) -> Self:
        manifest = super().parse(data, path, place)
        if manifest.index is None and manifest.plain is None:
            raise UnsupportedFormatError(
                "a manifest of no files",
                path=path,
                expected="an index, or a plain step",
                found="neither",
                next_step="Restore it from a backup, or see what `cairn repair` can do.",
            )
        return manifest

    @property
    def source(self) -> str | None:
        """Folder of the step's files outside of the run; None if they are in the run."""
        return None if self.plain is None else self.plain.source

    @property
    def leaf_count(self) -> int:
        """Number of leaves of all items."""
        return len(self.inline_leaves) if self.index is None else self.index.leaves

    @property
    def nbytes(self) -> int:
        """Sum of the sizes in bytes of the step's files."""
        if self.index is not None:
            return self.index.nbytes
        return sum(record.size for record in self.inline_objects)


def refuse_crowded_step(leaves: int, files: int, *, path: object) -> None:
    """Raise UnsupportedFormatError if a step has more leaves or files than readers accept.

    Raises:
        UnsupportedFormatError: there are too many.
    """
    if leaves > MOST_LEAVES or files > MOST_FILES:
        raise UnsupportedFormatError(
            "too many leaves or files for one step",
            path=path,
            expected=f"at most {MOST_LEAVES} leaves and {MOST_FILES} files",
            found=f"{leaves} leaves and {files} files",
            next_step="Stack small leaves into larger ones, or store arrays in a database (OCDBT).",
        )


class ManifestSummary(NamedTuple):
    """Part of a manifest that listings need.

    Attributes:
        created: time of the save, RFC 3339 in UTC.
        nbytes: the same as `Manifest.nbytes`.
        digest: the same as `Manifest.digest()`.
        source: the same as `Manifest.source`.
    """

    created: str
    nbytes: int
    digest: str
    source: str | None = None

    @classmethod
    def parse(
        cls, data: bytes, path: object, place: RecordLocation | None = None
    ) -> "ManifestSummary":
        """Return the summary of a stored manifest, without validating each leaf.

        Raises:
            UnsupportedFormatError: the bytes are no manifest of this format and version, or the
                manifest names neither an index nor a plain step.
            CorruptionError: the manifest is not what was written.
        """
        # Read without the model, which would validate every inline leaf and file: listings parse
        # many.
        body = Manifest.body(data, path, place)
        created, plain, index = (body.get(name) for name in ("created", "plain", "index"))
        try:
            if isinstance(created, str) and (plain or index):
                sizes = [record["size"] for record in body.get("objects") or ()]
                nbytes = sum(sizes) if index is None else index["nbytes"]
                source = (plain or {}).get("source")
                is_size = type(nbytes) is int and 0 <= nbytes <= MAX_BYTES
                from_rfc3339(created)
                if is_size and (source is None or isinstance(source, str)):
                    return cls(created, nbytes, sha256_of(data), source)
        except (TypeError, KeyError, ValueError, AttributeError):
            pass  # the full check below says what is wrong
        manifest = Manifest.parse(data, path, place)
        return cls(manifest.created, manifest.nbytes, sha256_of(data), manifest.source)


def dtype_bits(dtype: str) -> int:
    """Return the bits per element that the dtype's name ends in; 8 if it has no number."""
    if dtype in _BITS:
        return _BITS[dtype]
    kind = dtype.partition("_")[0]
    digits = kind.lstrip("abcdefghijklmnopqrstuvwxyz")
    return int(digits) if digits.isdigit() else 8
