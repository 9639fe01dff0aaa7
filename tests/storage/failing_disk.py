"""A disk that fails at chosen calls: of those that Python makes of the system, as a server does."""

import errno
import os

CALLS = ("open", "fsync", "replace", "unlink", "pwrite", "ftruncate")


class FailingDisk:
    """Counts calls while it is entered, and fails those whose numbers are in `fails`."""

    def __init__(self, monkeypatch, fails=range(0)):
        self._context = monkeypatch.context()
        self._fails = fails
        self.calls = []

    def __enter__(self):
        patch = self._context.__enter__()
        for name in CALLS:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        return self

    def __exit__(self, *raised):
        self._context.__exit__(*raised)

    def _counted(self, name, call):
        def counted(*args, **options):
            self.calls.append(name)
            if len(self.calls) - 1 in self._fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*args, **options)

        return counted
