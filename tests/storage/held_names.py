"""Which names a disk would still know after a power failure, as far as `os.fsync` tells."""

import os


class HeldNames:
    """The names that each folder had when it was last synced through `os.fsync`."""

    def __init__(self, monkeypatch):
        self._names: dict[str, dict[str, str | None]] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._synced)

    def _synced(self, descriptor):
        self._fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                self._names[path] = {
                    one.name: os.readlink(one.path) if one.is_symlink() else None for one in entries
                }

    def forget(self):
        """As if everything had been synced only before now, and not since."""
        self._names.clear()

    def names(self, folder):
        """What a power failure would leave in `folder`: names, and where those that are links lead;
        None if it was not synced."""
        return self._names.get(str(folder))

    def lost(self, folder, *, below):
        """Folders that a power failure would take: `folder` and those above it, under `below`."""
        lost = []
        while folder != below:
            if folder.name not in self._names.get(str(folder.parent), ()):
                lost.append(folder)
            folder = folder.parent
        return lost
