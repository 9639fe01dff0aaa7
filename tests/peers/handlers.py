"""Handlers for Orbax's own tests of its handlers, which save and restore by Cairn's manager.

A handler saves one item into a folder. Here the item becomes a step of a run beside that folder,
and the step's files are linked in the folder, so that a test that looks for files sees ours.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import orbax.checkpoint as ocp

import cairn
from cairn import Run, parse_uri
from tests.peers.private_parts import private

_HANDLERS = "orbax.checkpoint._src.handlers"


class Handler:
    """Interface of Orbax's handlers over a manager of one run for each folder.

    Options of the constructor say how Orbax lays out its files, and have no meaning here.
    """

    calls: ClassVar[int] = 0
    """Saves and restores by any handler."""

    save_args: ClassVar[Callable[..., Any]] = ocp.args.PyTreeSave
    restore_args: ClassVar[Callable[..., Any]] = ocp.args.PyTreeRestore

    def __init__(self, *_names: Any, **_options: Any) -> None:
        self._items: dict[str, Any] = {}

    def save(self, directory: Any, *values: Any, args: Any = None, **more: Any) -> None:
        """Save a step, and link its files in the folder."""
        args = _arguments(self.save_args, values, args, more)
        with self._manager(directory) as manager:
            step = (manager.latest_step() or 0) + 1
            manager.save(step, args=args, force=True)
            manager.wait_until_finished()
        _link_files(directory, args)

    async def async_save(self, directory: Any, *values: Any, **more: Any) -> list[Future[None]]:
        """Save in a thread."""
        await asyncio.sleep(0)
        pool = ThreadPoolExecutor(1)
        return [pool.submit(partial(self.save, directory, *values, **more))]

    def restore(self, directory: Any, *values: Any, args: Any = None, **more: Any) -> Any:
        """Restore the latest step."""
        if values or more:
            args = _arguments(self.restore_args, values, args, more)
        with self._manager(directory) as manager:
            return manager.restore(None, args=args)

    def metadata(self, directory: Any) -> Any:
        """Return the item's metadata."""
        with self._manager(directory) as manager:
            return manager.item_metadata(manager.latest_step())

    def finalize(self, directory: Any) -> None:
        """Do nothing: a save ends by itself."""

    def close(self) -> None:
        """Do nothing: each call closes its manager."""

    def _manager(self, directory: Any) -> cairn.CheckpointManager:
        Handler.calls += 1
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
        return cairn.CheckpointManager(_run(directory), options=options, **self._items)


class JsonHandler(Handler):
    """Handler of an item of JSON."""

    save_args = ocp.args.JsonSave
    restore_args = ocp.args.JsonRestore


class StandardHandler(Handler):
    """Handler of a tree, with the arguments of `StandardSave`."""

    save_args = ocp.args.StandardSave
    restore_args = ocp.args.StandardRestore


class CompositeHandler(Handler):
    """Handler of items with names."""

    def __init__(
        self,
        *names: str,
        composite_options: Any = None,
        handler_registry: Any = None,
        item_handlers: Any = None,
        **handlers: Any,
    ) -> None:
        given = {**dict.fromkeys(names), **(item_handlers or {}), **handlers}
        self._items = {"handler_registry": handler_registry}
        if given:
            self._items["item_handlers"] = {
                name: make() if (make := _FOR_MANAGER.get(type(handler))) else handler
                for name, handler in given.items()
            }

    def metadata(self, directory: Any) -> Any:
        """Return the step's metadata."""
        with self._manager(directory) as manager:
            return manager.metadata(manager.latest_step())


_BY_NAME = {
    "json_checkpoint_handler.JsonCheckpointHandler": JsonHandler,
    "random_key_checkpoint_handler.JaxRandomKeyCheckpointHandler": Handler,
    "random_key_checkpoint_handler.NumpyRandomKeyCheckpointHandler": Handler,
    "array_checkpoint_handler.ArrayCheckpointHandler": Handler,
    "standard_checkpoint_handler.StandardCheckpointHandler": StandardHandler,
    "pytree_checkpoint_handler.PyTreeCheckpointHandler": Handler,
    "composite_checkpoint_handler.CompositeCheckpointHandler": CompositeHandler,
}
_FOR_MANAGER: dict[type, Callable[[], Any]] = {
    JsonHandler: ocp.JsonCheckpointHandler,
    StandardHandler: ocp.StandardCheckpointHandler,
}
"""Orbax's handlers, which tell the manager what an item is."""


def replace_handlers(module: ModuleType) -> None:
    """Put Cairn's handlers in a test's module, for Orbax's and for classes made of them."""
    for name, replacement in _BY_NAME.items():
        file, _, class_name = name.partition(".")
        handler = private(f"{_HANDLERS}.{file}", class_name)
        for attribute, member in list(vars(module).items()):
            if isinstance(member, type) and issubclass(member, handler):
                setattr(module, attribute, replacement)


def _arguments(make: Callable[..., Any], values: Any, args: Any, more: Any) -> Any:
    if args is not None:
        return args
    if values and isinstance(values[0], ocp.args.CheckpointArgs):
        return values[0]
    return make(*values, **more)


def _run(directory: Any) -> Path:
    return Path(directory).parent / f"run-of-{Path(directory).name}"


def _link_files(directory: Any, args: Any) -> None:
    """Link the step's files where a handler would have put them.

    An item of JSON lies in the step's `meta`: an empty folder has a test go on to its values.
    """
    run = Run.open(parse_uri(_run(directory)))
    step = Path(run.orbax_uri(run.latest()).local_path)
    items = dict(args.items()) if isinstance(args, ocp.args.Composite) else {}
    item = step / "state" if not items and (step / "state").is_dir() else step
    for path in item.iterdir():
        link = Path(directory) / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    for name in items:
        (Path(directory) / name).mkdir(exist_ok=True)
