"""JAX's translations of programs for XLA share what each makes and loads anew: an MLIR context.

A context with its dialects takes 4 ms of CPU, a fourth of what a small program takes to translate
and compile, and half where its compilation is read. This is a private part of JAX, and only tests
use it so: a context keeps every constant that it has seen, which a job that trains need not have.
"""

import threading

from jax._src.interpreters import mlir

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


def share_contexts() -> None:
    """Have JAX use one context per thread for many programs, in this process and its forks."""
    mlir.make_ir_context = _context
