"""How JAX makes programs in tests: they share what each makes and loads anew, an MLIR context.

A context with its dialects takes 4 ms of CPU, a fourth of what a small program takes to translate
and compile, and half where its compilation is read. A context keeps every constant that it has
seen, which a job that trains need not have. These are private parts of JAX, and only tests use them
so (ADR 16).
"""

import os
import threading
from typing import Any

from jax._src import xla_bridge
from jax._src.interpreters import mlir

from tests.devices import QUICKLY

USES = 200
"""Of one context; then another is made, and what it kept goes with it."""

_make = mlir.make_ir_context
_thread = threading.local()


def _context() -> mlir.ir.Context:
    """This thread's."""
    found, uses = getattr(_thread, "context", (None, USES))
    if uses >= USES:
        found, uses = _make(), 0
    _thread.context = found, uses + 1
    return found


def compile_quickly() -> None:
    """Have programs compiled as `QUICKLY` says, also where they set XLA_FLAGS of their own.

    XLA reads its flags when JAX makes a backend; by then a program has set its own. JAX has a
    public name for another backend's maker, and none for this one's: it is wrapped.
    """
    made = xla_bridge.make_cpu_client

    def make() -> Any:
        own = os.environ.get("XLA_FLAGS", "").split()
        named = {flag.partition("=")[0] for flag in own}
        more = [flag for flag in QUICKLY if flag.partition("=")[0] not in named]
        os.environ["XLA_FLAGS"] = " ".join([*own, *more])
        return made()

    xla_bridge.register_backend_factory("cpu", make, priority=0, fail_quietly=False)


def share_contexts() -> None:
    """Have JAX use one context per thread for many programs, in this process and its forks."""
    mlir.make_ir_context = _context
