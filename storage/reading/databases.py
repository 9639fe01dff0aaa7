"""Reader of all entries of an item's OCDBT database, from its root through the whole tree."""

from typing import Any

import tensorstore as ts

from cairn.storage.arrays.ocdbt import ValueRef
from cairn.storage.errors import as_no_answer
from cairn.storage.store.deadlines import Progress, wait_for
from cairn.storage.store.disk.confinement import check_tree
from cairn.storage.store.objects import store_context
from cairn.storage.store.uri import StoreURI

__all__ = ["database_entries"]


def database_entries(item: StoreURI) -> dict[str, ValueRef | bytes]:
    """Return the small values of an item's database, and the locations of the others, by key.

    Raises:
        ConfinementError: a link in the folder leads out of the allowed root.
        ValueError: there is no database, or it is damaged; the text is TensorStore's.
        StoreUnavailableError: the store gives no answer.
    """
    progress = Progress()

    def answered(future: Any) -> Any:
        try:
            return wait_for(future, progress)
        except (ValueError, OSError) as exc:
            if (silence := as_no_answer(exc, path=item)) is not None:
                raise silence from exc
            raise

    check_tree(item)
    base = answered(ts.KvStore.open(item.kvstore_spec(), context=store_context()))
    entries: dict[str, ValueRef | bytes] = {}
    top = answered(ts.ocdbt.dump(base, context=store_context()))
    # The last version is the current one.
    nodes = [("", version["root"]["location"]) for version in top["versions"][-1:]]
    while nodes:
        prefix, location = nodes.pop()
        node = answered(ts.ocdbt.dump(base, node=location, context=store_context()))
        for entry in node["entries"]:
            key = prefix + entry["key"].decode()
            if "location" in entry:
                # Keys in the child node lack the prefix that its whole subtree has in common.
                shared = entry.get("subtree_common_prefix", b"").decode()
                nodes.append((prefix + shared, entry["location"]))
            elif "indirect_value" in entry:
                # "value:<base path>:<path>:<offset>:<length>"
                _, database, rest = entry["indirect_value"].split(":", 2)
                path, offset, length = rest.rsplit(":", 2)
                entries[key] = ValueRef(database + path, int(offset), int(length))
            else:
                entries[key] = bytes(entry["inline_value"])
    return entries
