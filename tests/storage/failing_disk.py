"""A disk that fails at chosen calls: of those that Python makes of the system, as a server does."""

import errno
import os
import threading

CALLS = ("open", "fsync", "replace", "unlink", "pwrite", "ftruncate")


class FailingDisk:
    """Counts calls while it is entered, and fails those whose numbers are in `fails`.

    Calls count of the thread that enters it, and of those that sync folders for it: what threads of
    earlier tests still do would shift the numbers.
    """

    def __init__(self, monkeypatch, fails=range(0)):
        self._context = monkeypatch.context()
        self._fails = fails
        self.calls = []
        self._counting = threading.Lock()

    def __enter__(self):
        patch = self._context.__enter__()
        self._thread = threading.current_thread()
        for name in CALLS:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        return self

    def __exit__(self, *raised):
        self._context.__exit__(*raised)

    def _counted(self, name, call):
        def counted(*args, **options):
            thread = threading.current_thread()
            if thread is not self._thread and not thread.name.startswith("cairn-sync"):
                return call(*args, **options)
            with self._counting:  # folders are synced at the same time
                number = len(self.calls)
                self.calls.append(name)
            if number in self._fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*args, **options)

        return counted
