"""The tests' programs are lowered in contexts that many share, as JAX by itself does not do it."""

import threading

import jax

from tests import lowering


def context(number):
    """That of a program with this number in it."""
    lowered = jax.jit(lambda x: x + number).lower(jax.ShapeDtypeStruct((), "float32"))
    assert f"{float(number):e}" in lowered.as_text()
    return lowered.compiler_ir("stablehlo").context


def test_a_thread_lowers_many_programs_in_one_context_and_then_in_another():
    found = []

    def lower():
        found.extend(context(number) for number in range(lowering.USES + 1))

    thread = threading.Thread(target=lower)
    thread.start()
    thread.join()
    assert len(found) == lowering.USES + 1
    first, *others, last = found
    assert all(one == first for one in others)
    assert last != first
    assert context(0) not in (first, last)
