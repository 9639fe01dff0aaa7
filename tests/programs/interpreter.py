"""An interpreter that has imported everything and used nothing of it, and forks programs.

A child becomes the program: environment, folder, arguments and standard streams are the program's
own, and it ends as an interpreter ends, exit handlers included. What it does not do is import JAX
and Cairn, which takes longer than most of what tests have their programs do, and take all that
apart in the end: copying the pages takes 0.3 s of CPU, and all else of an empty program 0.07.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

from tests.lowering import compile_quickly, share_contexts
from tests.made_once import make_now, make_once

IMPORTED = (
    "cairn.service.app",
    "cairn.service.command.cli",
    "cairn.state",
    "cairn.state.models.decoder.decoder",
    "cairn.state.states.checkpoint",
    "cairn.state.checkpointing.checkpointer",
    "flax.linen",
    "gcsfs",
    "grain.experimental",
    "jax",
    "orbax.checkpoint",
    "scipy.optimize",
    "tensorstore",
    "torch",
    "torch._dynamo",
    "uvicorn",
)
"""Not what reads variables of a program when it is imported, as `huggingface_hub` does: of what
`transformers` imports, `torch._dynamo` and SciPy take most of the time."""
PYTHON = "TESTS_PYTHON"
"""The variable that names what a program finds as `sys.executable`, if it is another."""
FINALIZED = "TESTS_FINALIZED"
"""The variable of a program that takes itself apart in the end, where that is what is tested."""
MESSAGE_BYTES = 200_000
"""Of the longest request: a program's whole environment is in it."""


def main() -> None:
    """Answers requests on connections to the socket whose descriptor is the first argument.

    It ends when the last of those that have connected is gone.
    """
    listening = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # what is imported stays
    importlib.import_module("cairn").EasyDeLState  # noqa: B018 (public names are imported late)
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # not installed: the programs do without it
            importlib.import_module(name)
    compile_quickly()
    share_contexts()
    make_once()
    make_now()
    gc.collect()
    gc.freeze()  # the children share these pages
    gc.enable()
    program = _serve(listening)
    if program is None:
        return
    if FINALIZED in program["environment"]:
        _become(**program)
    else:
        _end(_status(program))


def _status(program: dict[str, Any]) -> int:
    """What a program's exit status is, before its exit handlers; negative for a signal."""
    try:
        _become(**program)
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return (exc.code or 0) & 0xFF
        print(exc.code, file=sys.stderr)
        return 1
    except BaseException as exc:
        sys.excepthook(type(exc), exc, exc.__traceback__)
        return -signal.SIGINT if isinstance(exc, KeyboardInterrupt) else 1
    return 0


def _end(status: int) -> None:
    """What an interpreter does in the end, in its order, but for taking its modules apart."""
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        if not sys.stdout.closed:
            sys.stdout.flush()
    except OSError as exc:  # nobody reads, or the disk is full
        print(f"Exception ignored in {sys.stdout!r}: {exc!r}", file=sys.stderr)
        status = 120
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    if importlib.import_module("jax").distributed.is_initialized():
        sys.exit(status)  # the others of its job are told so by what is taken apart
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _serve(listening: socket.socket) -> dict[str, Any] | None:
    """Forks a child for each request; in the child, what it is to become."""
    # By pidfd: pid, where its status goes, and who asked for it.
    under_way: dict[int, tuple[int, socket.socket, socket.socket]] = {}
    asking: dict[int, socket.socket] = {}
    ready = selectors.DefaultSelector()
    ready.register(listening, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fd == listening.fileno():
                asks, _ = listening.accept()
                asking[asks.fileno()] = asks
                ready.register(asks, selectors.EVENT_READ)
                continue
            if key.fd in under_way:
                ready.unregister(key.fd)
                os.close(key.fd)
                pid, line, _ = under_way.pop(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with line, contextlib.suppress(OSError):  # nobody asks any more
                    line.send(json.dumps(status).encode())
                continue
            asks = asking[key.fd]
            message, files, _, _ = socket.recv_fds(asks, MESSAGE_BYTES, 4)
            if not message:
                for pid, _, who in under_way.values():
                    if who is asks:
                        os.kill(pid, signal.SIGKILL)
                ready.unregister(asks)
                del asking[key.fd]
                asks.close()
                if not asking:
                    return None
                continue
            line = socket.socket(fileno=files[0])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # JAX's: nothing of it has been used here
                pid = os.fork()
            if pid == 0:
                ready.close()
                for one in (listening, line, *asking.values()):
                    one.close()
                for pidfd, (_, other, _) in under_way.items():
                    os.close(pidfd)
                    other.close()
                return {**json.loads(message), "streams": files[1:]}
            for file in files[1:]:
                os.close(file)
            line.send(json.dumps(pid).encode())
            pidfd = os.pidfd_open(pid)
            under_way[pidfd] = (pid, line, asks)
            ready.register(pidfd, selectors.EVENT_READ)


def _become(
    arguments: list[str], environment: dict[str, str], folder: str, streams: list[int]
) -> None:
    for target, file in enumerate(streams):
        os.dup2(file, target)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = environment.get(PYTHON, sys.executable)
    if environment.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    kind, *rest = arguments
    added = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if kind == "-m":
        sys.path[:0] = [folder, *added]
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[:0] = ["", *added]
        sys.argv[:] = ["-c", *rest[1:]]
        _run(compile(rest[0], "<string>", "exec"))
    else:
        path = Path(kind)
        sys.path[:0] = [str(path.resolve().parent), *added]
        sys.argv[:] = arguments
        _run(compile(path.read_text(encoding="utf-8"), kind, "exec"))


def _run(code: types.CodeType) -> None:
    """Runs code as the main module, which stays until the interpreter has ended."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(code, vars(module))


if __name__ == "__main__":
    main()
