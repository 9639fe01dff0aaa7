"""Stored forms of leaves: unchanged, converted to another dtype without loss, or the shape only.

Orbax and TensorStore store most leaves unchanged. This module converts the others to a lossless
form; the checkpoint records which, so that reading can undo it. Leaves that have no such form are
refused before anything is written. Imports JAX.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from cairn.storage.arrays.four_bits import FOUR_BITS, pack, packing_axis
from cairn.storage.arrays.orbax_tree import StoredForm
from cairn.storage.errors import UnsupportedLeafError

__all__ = [
    "STORED_DTYPES",
    "dtype_name",
    "is_computed",
    "is_key_dtype",
    "store_form",
    "why_no_plain_array",
]

STORED_DTYPES: Final = frozenset(
    {
        *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "complex64", "complex128"),
        *("float16", "bfloat16", "float32", "float64", "float4_e2m1fn", "float8_e3m4"),
        *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
        *("float8_e5m2fnuz", "float8_e8m0fnu"),
    }
)
"""Dtypes that TensorStore's zarr3 driver writes and reads bit for bit (each is tested). It stores
an int4 in a whole byte, so arrays of int4 are packed where possible."""

WIDENED: Final = frozenset({"uint2", "uint4"})
"""Dtypes stored as uint8 of equal value, unless packed: zarr3 has no such unsigned dtype."""

BITCAST: Final = frozenset({"float8_e4m3"})
"""Dtypes stored as uint8 of equal bits: zarr3 has no such type."""

_NUMBERS: Final = (bool, int, float, complex)
_INT64: Final = range(-(2**63), 2**63)


@functools.lru_cache(maxsize=256)
def is_key_dtype(dtype: Any) -> bool:
    """Return True for the dtype of typed PRNG keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """Return the name by which checkpoints record a dtype, such as "bfloat16" or "key<fry>"."""
    return str(dtype) if is_key_dtype(dtype) else np.dtype(dtype).name


def why_no_plain_array(array: np.ndarray[Any, Any]) -> str | None:
    """Return why a NumPy array can't be stored as its elements alone; None if it can.

    Masked arrays and instances of other subclasses of `np.ndarray` can't.
    """
    if isinstance(array, np.ma.MaskedArray):
        return "a masked array, whose mask would be lost; store its data and its mask"
    if type(array) in (np.ndarray, np.memmap):
        return None
    return f"{type(array).__name__} is more than an array; store np.asarray of it"


def is_computed(leaf: Any) -> bool:
    """Return True if an array is converted for storage: packed, widened or stored as its bits."""
    form = _form_of(leaf)
    return form is not None and form.kind not in ("key", "empty")


def store_form(
    leaves: Mapping[str, Any], without: Collection[str] = frozenset()
) -> tuple[dict[str, Any], dict[str, StoredForm]]:
    """Return (the leaves to hand to Orbax, the forms of those that are converted), both by path.

    Args:
        leaves: the leaves of a tree, by path.
        without: paths of leaves that are checked and whose form is returned, but not the leaf.

    Raises:
        UnsupportedLeafError: leaves that can't be stored; lists all of them with the reason.
    """
    stored: dict[str, Any] = {}
    forms: dict[str, StoredForm] = {}
    problems: list[str] = []
    for path, leaf in leaves.items():
        value, reason = _plain(leaf)
        if reason is not None:
            problems.append(f"{path}: {reason}")
            continue
        form = _form_of(value)
        if form is not None:
            forms[path] = form
        if path in without:
            continue
        if form is None or form.kind == "key":
            stored[path] = value
        elif form.kind != "empty":
            stored[path] = _carried(value, form)
    if problems:
        raise UnsupportedLeafError(
            "leaves that can't be stored",
            path="; ".join(problems),
            expected="arrays and Python numbers",
            found=f"{len(problems)} others",
            next_step="Convert them to arrays, or keep them in the extras of the save.",
        )
    return stored, forms


def _carried(value: Any, form: StoredForm) -> Any:
    """Return `value` converted to its form, as uint8; a jax.Array is converted on its devices."""
    axis = _axis_to_pack(value) if form.kind == "packed" else None
    if axis is not None:
        if isinstance(value, jax.Array):
            return _packing(value.sharding)(value, axis)
        return pack(value, axis)
    if form.kind == "widened":
        return value.astype(jnp.uint8 if isinstance(value, jax.Array) else np.uint8)
    if isinstance(value, jax.Array):
        return jax.lax.bitcast_convert_type(value, jnp.uint8)
    return value.view(np.uint8)


def _form_of(value: Any) -> StoredForm | None:
    shape = tuple(value.shape)
    if is_key_dtype(value.dtype):
        return StoredForm("key", shape, str(jax.random.key_impl(value)))
    name = dtype_name(value.dtype)
    if value.size == 0:
        return StoredForm("empty", shape, name)
    if name in FOUR_BITS and _axis_to_pack(value) is not None:
        return StoredForm("packed", shape, name)
    if name in WIDENED:
        return StoredForm("widened", shape, name)
    return StoredForm("bits", shape, name) if name in BITCAST else None


def _axis_to_pack(value: Any) -> int | None:
    shape = tuple(value.shape)
    return packing_axis(
        value.sharding.shard_shape(shape) if isinstance(value, jax.Array) else shape
    )


@functools.lru_cache(maxsize=256)
def _packing(place: jax.sharding.Sharding) -> Any:
    """Return `pack` under jit, with results of this sharding; cached for each sharding."""
    return jax.jit(pack, static_argnames="axis", out_shardings=place)


def _plain(leaf: Any) -> tuple[Any, str | None]:
    """Return the leaf as a jax.Array or NumPy array, and the reason why it can't be stored.

    The reason is None if it can. If there is a reason, the array may be None and must not be used.
    NumPy arrays are in native byte order. Python numbers become NumPy arrays of shape (): as
    scalars they would lose their dtype in Orbax, and bools would break its metadata.
    """
    if isinstance(leaf, jax.Array):
        return leaf, _why_not_array(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        reason = why_no_plain_array(leaf) if isinstance(leaf, np.ndarray) else None
        if reason is not None:
            return None, reason
        array = np.asarray(leaf)
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        return native, _why_not_dtype(native.dtype)
    if isinstance(leaf, int | float | complex) and type(leaf) not in _NUMBERS:
        return None, f"{type(leaf).__name__} is more than a number; store its value"
    match leaf:
        case bool():
            return np.asarray(leaf, np.bool_), None
        case int():
            if leaf not in _INT64:
                return None, "an integer outside of int64"
            return np.asarray(leaf, np.int64), None
        case float():
            return np.asarray(leaf, np.float64), None
        case complex():
            return np.asarray(leaf, np.complex128), None
        case _:
            return None, f"{type(leaf).__name__} is neither an array nor a number"


def _why_not_array(array: jax.Array) -> str | None:
    if isinstance(array, jax.core.Tracer):
        return "a traced value; save outside of jit"
    if array.is_deleted():
        return "its buffer was deleted or donated before the save"
    if is_key_dtype(array.dtype):
        return "a key array without elements" if array.size == 0 else None
    return _why_not_dtype(array.dtype)


@functools.lru_cache(maxsize=256)
def _why_not_dtype(dtype: Any) -> str | None:
    name = np.dtype(dtype).name
    if name in STORED_DTYPES or name in WIDENED or name in BITCAST:
        return None
    return f"no lossless way to store dtype {name}"
