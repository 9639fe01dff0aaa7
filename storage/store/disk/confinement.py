"""Confinement: which files an untrusted run may make a server open.

Whoever writes a run can put symbolic links anywhere in it, and name any folder in a record. So a
server opens its root with `with_confinement` and runs with `safe_join`. Every address below
inherits the bound, and `Files`, `ObjectStore` and the array readers check each file against it
through an `PathHandle`, which a rename can't redirect. A training job acts for its own user and
needs no bound. See ADR 47.
"""

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, Self

from cairn.storage.errors import ConfinementError, SourceRefusedError
from cairn.storage.store.uri import Confinement, StoreURI, check_name, parse_uri

__all__ = [
    "HAS_PATH_HANDLES",
    "PathHandle",
    "check_below",
    "check_tree",
    "is_within",
    "open_below",
    "open_folder_handle",
    "real_prefix",
    "safe_join",
    "source_folder",
    "with_confinement",
]

HAS_PATH_HANDLES: Final = sys.platform == "linux"
"""Only Linux can open a path through a descriptor. Elsewhere we check a name, then open it."""

_DESCRIPTORS: Final = "/proc/self/fd"


def with_confinement(folder: StoreURI, sources: Iterable[StoreURI] = ()) -> StoreURI:
    """Return `folder` with a bound: paths below may lead only into it and into `sources`.

    Args:
        folder: the root of a server.
        sources: further folders that hold the files of imported steps.
    """
    bare = replace(folder, confinement=None)
    confinement = Confinement(folder.path, real_prefix(bare), (bare, *sources))
    return replace(folder, confinement=confinement)


def safe_join(root: StoreURI, *segments: str) -> StoreURI:
    """Return the child of `root` at untrusted `segments`; paths below may not lead out of it.

    The files of a run's imported steps may be anywhere in `root`, and in the sources of `root`.

    Raises:
        InvalidURIError: a segment is not a plain name.
        ConfinementError: a symbolic link leads out of `root`.
    """
    child = root
    for segment in segments:
        child = child / check_name(segment)
    if root.confinement is None:
        return safe_join(with_confinement(root), *segments)
    prefix = real_prefix(child)
    if not prefix.startswith(root.confinement.real_prefix):
        raise _leads_out(child, root)
    confinement = Confinement(child.path, prefix, root.confinement.sources, root.confinement)
    return replace(child, confinement=confinement)


def source_folder(uri: StoreURI, source: str) -> StoreURI:
    """Return the folder that holds the files of an imported step, confined to itself.

    Args:
        uri: the run or the step.
        source: the folder that the step's manifest names.

    Raises:
        SourceRefusedError: the folder is neither in the root of the run nor in a folder that an
            administrator of the server allows.
        InvalidURIError: `source` is no address.
    """
    folder = parse_uri(source)
    if uri.confinement is None:
        return folder
    prefix = real_prefix(folder)
    if not _starts_within(prefix, folder.scheme, uri.confinement.sources):
        raise SourceRefusedError(
            "the files of an adopted step lie outside the root of its run",
            path=uri,
            expected="a folder in the root, or in one that an administrator allows for it",
            found=source,
            next_step="Start the server with --adopt-from FOLDER (or set CAIRN_ADOPT_FROM), or "
            "fork the run with `cairn fork`, which copies the files.",
        )
    return replace(folder, confinement=Confinement(folder.path, prefix, (folder,)))


def real_prefix(uri: StoreURI) -> str:
    """Return a folder's address with a slash at its end; on a disk, all links resolved."""
    if uri.scheme != "file":
        return f"{uri}/"
    return f"{os.path.realpath(uri.local_path).rstrip('/')}/"


def is_within(uri: StoreURI, folders: Iterable[StoreURI]) -> bool:
    """Return True if an address is one of these folders, or below one."""
    return _starts_within(real_prefix(uri), uri.scheme, folders)


def _starts_within(prefix: str, scheme: str, folders: Iterable[StoreURI]) -> bool:
    return any(
        folder.scheme == scheme and prefix.startswith(real_prefix(folder)) for folder in folders
    )


def check_below(uri: StoreURI, path: str) -> None:
    """Raise ConfinementError if a disk path may not be opened.

    Args:
        uri: the folder that the path was built from.
        path: the absolute path, which need not exist.

    Raises:
        ConfinementError: a link leads out of the folder's confinement, or, if it has none, out of
            the folder. In a confined folder also: it is neither a file nor a folder.
    """
    try:
        real = os.path.realpath(path)
    except OSError:  # a link on the path changed while it was resolved
        real = ""
    if not f"{real}/".startswith(_allowed_prefix(uri)):
        raise _leads_out(path, uri)
    if uri.confinement is not None:
        _check_kind(path)


class PathHandle:
    """Handle of a checked file or folder on a disk, with a path that a rename can't redirect.

    Whoever writes a run can replace any name in it by a link after the check. In a confined folder
    the path therefore leads through a descriptor (`O_PATH`), which reads nothing and never blocks.
    Elsewhere, and on systems without such paths, it is the name itself.

    Attributes:
        path: path for any system call, valid until `close`.
    """

    def __init__(self, uri: StoreURI, path: str, flags: int = 0) -> None:
        """Check a path, and open it if the folder is confined and the system has such paths.

        Args:
            uri: the folder that the path was built from.
            path: the absolute path.
            flags: further flags for `os.open`.

        Raises:
            FileNotFoundError, NotADirectoryError: the path was to be opened, and does not exist.
            ConfinementError: as `check_below`.
        """
        self.path = path
        self._descriptor: int | None = None
        if uri.confinement is None or not HAS_PATH_HANDLES:
            check_below(uri, path)
            return
        try:
            self._descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
        except OSError:
            check_below(uri, path)  # report nothing about paths outside the bound
            raise
        try:
            self.path = f"{_DESCRIPTORS}/{self._descriptor}"
            if not f"{os.readlink(self.path)}/".startswith(uri.confinement.real_prefix):
                raise _leads_out(path, uri)
            _check_kind(self.path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the descriptor, after which `path` is invalid: its number may be reused."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        """Return the handle."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the handle."""
        self.close()


def open_folder_handle(uri: StoreURI, folder: str, *, create: bool = False) -> PathHandle:
    """Return a handle of the folder at a path, for writes, moves and deletions in it.

    Args:
        uri: the store's folder that it is, or is in.
        folder: the absolute path.
        create: create it, and the folders above it, if missing.

    Raises:
        FileNotFoundError, NotADirectoryError: the path does not exist.
        ConfinementError: as `check_below`.
    """
    confinement = uri.confinement if HAS_PATH_HANDLES else None
    if create and (confinement is None or folder == f"/{confinement.folder}"):
        os.makedirs(folder, exist_ok=True)
    try:
        return PathHandle(uri, folder, os.O_DIRECTORY)
    except FileNotFoundError:
        if not create or confinement is None:
            raise
        # One level at a time, each in a handle: `os.makedirs` would follow a link on the way.
    above, name = os.path.split(folder)
    with open_folder_handle(uri, above, create=True) as handle:
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{handle.path}/{name}")
        return PathHandle(uri, f"{handle.path}/{name}", os.O_DIRECTORY)


def open_below(uri: StoreURI, rel: str) -> int:
    """Open the file `rel` below the disk folder `uri` for reading; return the descriptor.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        InvalidURIError: `rel` is no path below a folder.
        ConfinementError: in a confined folder, as `check_below`.
    """
    path = (uri / rel).local_path
    with contextlib.ExitStack() as stack:
        if uri.confinement is not None:
            path = stack.enter_context(PathHandle(uri, path)).path
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(uri / rel))
    return descriptor


def check_tree(uri: StoreURI) -> None:
    """Raise ConfinementError if anything in a disk folder may not be opened.

    It is for libraries that open files themselves (TensorStore).

    Raises:
        ConfinementError: a link in the folder leads out of its confinement, or to a folder; or
            something in it is neither a file nor a folder.
    """
    if uri.confinement is None or uri.scheme != "file":
        return
    check_below(uri, uri.local_path)
    folders = [uri.local_path]
    while folders:
        try:
            entries = [*os.scandir(folders.pop())]
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif not entry.is_file(follow_symlinks=False):
                check_below(uri, entry.path)
                if entry.is_dir():
                    raise _leads_out(entry.path, uri)


def _allowed_prefix(uri: StoreURI) -> str:
    """Return the address in which everything that is opened in a folder must be."""
    return real_prefix(uri) if uri.confinement is None else uri.confinement.real_prefix


def _check_kind(path: str) -> None:
    """Raise ConfinementError for pipes, sockets and devices: opening one may block forever."""
    try:
        mode = os.stat(path).st_mode
    except OSError as exc:
        if exc.errno != errno.ELOOP:  # the caller's `open` reports it
            return
        mode = stat.S_IFLNK
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ConfinementError(
            "not a file",
            path=path,
            expected="a file or a folder",
            found="a named pipe, a socket, a device, or a link to itself",
            next_step="Remove it.",
        )


def _leads_out(path: object, uri: StoreURI) -> ConfinementError:
    return ConfinementError(
        "leads out of its root",
        path=path,
        expected=f"a path below {_allowed_prefix(uri)}",
        found="a symbolic link to somewhere else",
        next_step="Replace the link by what it leads to.",
    )
