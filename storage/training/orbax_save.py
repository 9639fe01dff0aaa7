"""Start an asynchronous Orbax save of one step, with our own handler of trees.

Imports JAX and Orbax.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

import jax
from orbax.checkpoint import v1 as ocp

from cairn.storage.errors import InvalidURIError
from cairn.storage.store import StoreURI, canonical_json, sha256_of
from cairn.storage.training import processes
from cairn.storage.training.leaf_forms import LeafForm
from cairn.storage.training.tree_handler import HeldItem, HeldTree, HeldTreeHandler

__all__ = [
    "CUSTOM_KEY",
    "META_ITEM",
    "SaveResponse",
    "StoredItem",
    "meta_digest",
    "orbax_folder",
    "start_save",
]

META_ITEM: Final = "meta"
"""The item that holds JSON; all others are trees."""

CUSTOM_KEY: Final = "cairn"
"""Our part of Orbax's custom metadata: which items there are, and leaves stored in another form."""

_TIMEOUT_SECONDS: Final = 3600


class StoredItem(NamedTuple):
    """One tree as it is stored.

    Attributes:
        leaves: by path, without those that have no elements.
        forms: of the leaves that are stored differently, by path.
    """

    leaves: Mapping[str, Any]
    forms: Mapping[str, LeafForm]


class SaveResponse(Protocol):
    """Orbax's handle of a save."""

    def result(self, timeout: float | None = None) -> None:
        """Return once Orbax has committed; raise what failed."""


def meta_digest(meta: Mapping[str, Any]) -> str:
    """SHA-256 of the meta item's canonical JSON: Orbax keeps JSON without a checksum."""
    return sha256_of(canonical_json(dict(meta)))


def orbax_folder(uri: StoreURI) -> str:
    """The folder in the form that Orbax takes.

    Raises:
        InvalidURIError: Orbax would write arrays elsewhere: it knows local disks and GCS only.
    """
    if uri.scheme not in ("file", "gs"):
        raise InvalidURIError(
            "no arrays can be stored here",
            path=uri,
            expected="a file:// or gs:// URI",
            found=f"{uri.scheme}://",
            next_step="Save to a local disk or to Google Cloud Storage.",
        )
    return uri.orbax_path()


def start_save(
    folder: StoreURI, items: Mapping[str, HeldItem], meta: Mapping[str, Any]
) -> SaveResponse:
    """Begin to write a step into `folder`, which must not exist; all processes call this.

    With several processes this waits for the others and uses devices: call it where their order
    is the same in all of them.
    """
    save = processes.save_key(folder)
    trees: dict[str, Any] = {
        name: HeldTree(item, save=save) for name, item in items.items() if item.held
    }
    trees[META_ITEM] = dict(meta)
    custom = {
        "version": 1,
        "items": sorted([*items, META_ITEM]),
        "meta_digest": meta_digest(meta),
        "forms": {
            name: {
                path: [form.kind, list(form.shape), form.dtype] for path, form in item.forms.items()
            }
            for name, item in items.items()
            if item.forms
        },
    }
    # From here on devices are used for all: one that failed on the way must not be waited for.
    processes.meet(save, "start")
    with _context(items):
        response: SaveResponse = ocp.save_checkpointables_async(
            orbax_folder(folder), trees, custom_metadata={CUSTOM_KEY: custom}
        )
    return response


def _context(items: Mapping[str, HeldItem]) -> Any:
    context = ocp.Context()
    # The folder is new by construction: attempts are numbered, and a step is tried once in each.
    context.file.skip_sync_file_validations = True
    context.asynchronous.timeout_secs = _TIMEOUT_SECONDS
    if jax.process_count() > 1:
        # Orbax's own waits for other processes take 300 s to notice that one has failed. Ours are
        # in `processes.meet` and `processes.share_outcome`; Orbax saves as if each were alone.
        context.multiprocessing.active_processes = {int(jax.process_index())}
    registry = ocp.handlers.local_registry(include_global_registry=True)
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=META_ITEM)
    for name in items:
        registry.add(HeldTreeHandler, checkpointable_name=name)
    context.checkpointables.registry = registry
    return context
