"""Counts the floating point operations of a function from its jaxpr: matrix products only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from cairn.state.errors import ArgumentError

__all__ = ["matmul_flops"]


def matmul_flops(function: Callable[..., Any], *args: Any) -> int:
    """Operations of all matrix products and convolutions in one call; a multiply-add is two.

    The function is only traced, on `jax.ShapeDtypeStruct`s if wanted. A scan's body counts once
    for each of its steps, of a conditional's branches the largest one.

    Raises:
        ArgumentError: a product in a loop whose number of steps is only known when it runs, or in
            a kernel that can't be looked into.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Any) -> int:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name in _PRODUCTS:
        return _PRODUCTS[name](equation)
    inner = [_count(jaxpr) for jaxpr in _jaxprs_in(params)]
    if name == "cond":
        return max(inner)
    total = sum(inner)
    if name == "scan":
        return total * int(params["length"])
    if name == "shard_map":
        shape = params["mesh"].shape
        return total * int(prod(shape[axis] for axis in params["newly_manual_axes"]))
    if name in ("while", "pallas_call") and (total or name == "pallas_call"):
        raise ArgumentError(
            path="matmul_flops",
            expected="matrix products whose number is known before the function runs",
            found=f"a {name} equation",
            next_step="override _flop in the model class",
        )
    return total


def _jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
    """The functions that an equation calls; JAX exports this itself from 0.10 on."""
    for value in params.values():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, Jaxpr):
                yield one


def _outputs(equation: Any) -> int:
    return int(prod(equation.outvars[0].aval.shape))


def _dot_general(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * _outputs(equation) * int(prod(left[axis] for axis in contracted))


def _convolution(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    features_out = equation.params["dimension_numbers"].rhs_spec[0]
    each = int(prod(size for axis, size in enumerate(kernel) if axis != features_out))
    return 2 * _outputs(equation) * each


def _ragged_dot(equation: Any) -> int:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    left = equation.invars[0].aval.shape
    return 2 * _outputs(equation) * int(prod(left[axis] for axis in contracted))


_PRODUCTS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged_dot,
}
