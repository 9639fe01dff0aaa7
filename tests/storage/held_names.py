"""Which names a disk would still know after a power failure, as far as `os.fsync` tells."""

import os


class HeldNames:
    """The names that each folder had when it was last synced through `os.fsync`."""

    def __init__(self, monkeypatch):
        self._names: dict[str, set[str]] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._synced)

    def _synced(self, descriptor):
        self._fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            self._names[path] = set(os.listdir(path))

    def forget(self):
        """As if everything had been synced only before now, and not since."""
        self._names.clear()

    def lost(self, folder, *, below):
        """Folders that a power failure would take: `folder` and those above it, under `below`."""
        lost = []
        while folder != below:
            if folder.name not in self._names.get(str(folder.parent), ()):
                lost.append(folder)
            folder = folder.parent
        return lost
