"""The einsum by which a layer multiplies its inputs by its kernel (`Product`)."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

from flax import nnx

__all__ = ["Product", "contracted_axes", "product_of"]


@dataclass(frozen=True)
class Product:
    """Einsum `inputs,kernel->outputs` of a layer; each attribute has one letter per dimension."""

    inputs: str
    kernel: str
    outputs: str

    @property
    def equation(self) -> str:
        """Equation `inputs,kernel->outputs`, for `jnp.einsum`."""
        return f"{self.inputs},{self.kernel}->{self.outputs}"

    @property
    def contracted(self) -> str:
        """Letters of the kernel that are summed over."""
        return "".join(letter for letter in self.kernel if letter not in self.outputs)

    @property
    def contracted_axes(self) -> tuple[int, ...]:
        """Dimensions of the kernel that are summed over."""
        return tuple(self.kernel.index(letter) for letter in self.contracted)

    @property
    def rank(self) -> str:
        """Letter for the adapters' rank; neither inputs nor kernel use it."""
        used = self.inputs + self.kernel
        return next(letter for letter in "r" + string.ascii_letters if letter not in used)

    @property
    def adapters(self) -> tuple[str, str]:
        """Letters of the adapters A and B.

        A has the kernel's letters that the inputs share, then the rank. B has those of them that
        are in the outputs too (batch dimensions), the rank, then the kernel's other letters.
        """
        shared = "".join(letter for letter in self.kernel if letter in self.inputs)
        batch = "".join(letter for letter in shared if letter in self.outputs)
        rest = "".join(letter for letter in self.kernel if letter not in self.inputs)
        return shared + self.rank, batch + self.rank + rest

    @property
    def through_adapters(self) -> tuple[str, str]:
        """Equations `inputs,A->narrow` and `narrow,B->outputs`: apply A, then B, to the inputs."""
        a, b = self.adapters
        kept = "".join(letter for letter in self.inputs if letter not in self.contracted)
        narrow = kept + self.rank
        return f"{self.inputs},{a}->{narrow}", f"{narrow},{b}->{self.outputs}"

    @property
    def adapters_to_kernel(self) -> str:
        """Equation `A,B->kernel`: the change of the kernel with the same effect as the adapters."""
        a, b = self.adapters
        return f"{a},{b}->{self.kernel}"


def product_of(layer: Any, ndim: int | None = None) -> Product | None:
    """Return the einsum that a layer computes from its inputs and its kernel.

    Args:
        layer: the layer.
        ndim: number of dimensions of the inputs; None: the fewest that the layer accepts.

    Returns:
        The einsum. None if the layer is not an `nnx.Linear`, `nnx.LinearGeneral` or `nnx.Einsum`,
        or if its equation does more than multiply and sum, such as one with a repeated letter.
    """
    if isinstance(layer, nnx.Linear):
        free = string.ascii_uppercase[: (1 if ndim is None else ndim) - 1]
        return Product(f"{free}i", "io", f"{free}o")
    if isinstance(layer, nnx.LinearGeneral):
        return _of_linear_general(layer, ndim)
    if isinstance(layer, nnx.Einsum):
        return None if layer.einsum_str is None else _of_einsum(layer.einsum_str, ndim)
    return None


def contracted_axes(layer: Any) -> tuple[int, ...]:
    """Return the dimensions of the kernel that a layer sums over; `product_of` must not be None."""
    product = product_of(layer)
    assert product is not None
    return product.contracted_axes


def _of_linear_general(layer: Any, ndim: int | None) -> Product:
    batches, taken = len(layer.batch_axis), len(layer.axis)
    letters = string.ascii_lowercase[: batches + taken + len(layer.out_features)]
    if ndim is None:
        # The kernel's letters don't depend on where the axes are in the inputs.
        inputs = letters[: batches + taken]
        return Product(inputs, letters, letters[:batches] + letters[batches + taken :])
    placed = dict(zip(sorted(axis % ndim for axis in layer.batch_axis), letters, strict=False))
    placed |= dict(zip(sorted(axis % ndim for axis in layer.axis), letters[batches:], strict=False))
    free = {axis: string.ascii_uppercase[axis] for axis in range(ndim) if axis not in placed}
    inputs = "".join((placed | free)[axis] for axis in range(ndim))
    outputs = letters[:batches] + "".join(free.values()) + letters[batches + taken :]
    return Product(inputs, letters, outputs)


def _of_einsum(equation: str, ndim: int | None) -> Product | None:
    operands, outputs = equation.replace(" ", "").split("->")
    inputs, kernel = operands.split(",")
    used = set(inputs + kernel + outputs)
    free = [letter for letter in string.ascii_letters if letter not in used]
    named = len(inputs.replace("...", ""))
    ellipsis = "".join(free[: 0 if ndim is None else ndim - named])
    inputs, outputs = inputs.replace("...", ellipsis), outputs.replace("...", ellipsis)
    product = Product(inputs, kernel, outputs)
    plain = (
        "..." not in kernel
        and len(set(kernel)) == len(kernel)
        and len(set(inputs)) == len(inputs)
        and set(product.contracted) <= set(inputs)
        and set(outputs) <= set(inputs + kernel)
        and {letter for letter in inputs if letter not in outputs} <= set(kernel)
    )
    return product if plain and product.contracted else None
