"""The only module that touches cuda-tile's private names: the dispatch mode, the typing rules, a kernel's function.

The typing rules are the compiler's own (promotion, implicit casts, operand types of a matrix product), so that an
interpreted kernel accepts and rejects what the compiler does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cuda.tile as ct

Number = bool | int | float


def _moved(what: object) -> RuntimeError:
    version = getattr(ct, "__version__", "of unknown version")
    return RuntimeError(
        f"cuda-tile {version} lacks a private name that the cuTile interpreter needs ({what}); it was written for "
        "cuda-tile 1.7.0. Install cuda-tile==1.7.0, or run without TILEGYM_MAMBA2_CUTILE_INTERPRET."
    )


try:
    from cuda.tile._cext import foreign_dtype_object_to_native
    from cuda.tile._datatype import (
        _resolve_mma_supported_dtype,  # pyright: ignore[reportPrivateUsage]
        integer_dtype_max,
        integer_dtype_min,
        is_arithmetic,
        is_boolean,
        is_float,
        is_integral,
        is_signed,
        is_unrestricted_float,
    )
    from cuda.tile._dispatch_mode import DispatchMode
    from cuda.tile._execution import is_stub
    from cuda.tile._ir.cast_ops import check_implicit_cast
    from cuda.tile._ir.ops_utils import get_ftof_rounding_min_version
    from cuda.tile._ir.ops_utils import promote_dtypes as _promote_dtypes
    from cuda.tile._ir.type import LooselyTypedScalar, TileTy

    for method in ("as_current", "call_tile_function_from_host"):
        getattr(DispatchMode, method)
except (ImportError, AttributeError) as error:
    raise _moved(error) from error

__all__ = [
    "DispatchMode",
    "Number",
    "check_conversion",
    "check_implicit_cast_to",
    "integer_range",
    "is_arithmetic",
    "is_boolean",
    "is_float",
    "is_integral",
    "is_signed",
    "is_stub",
    "is_unrestricted_float",
    "kernel_function",
    "mma_accumulator_dtype",
    "parameter_annotations",
    "promote",
    "to_dtype",
]


def to_dtype(dtype: Any) -> ct.DType:
    """The cuTile dtype that a cuTile or torch dtype names."""
    if isinstance(dtype, ct.DType):
        return dtype
    native = foreign_dtype_object_to_native(dtype)
    if native is None:
        raise ct.TileTypeError(f"{dtype!r} is not a dtype")
    return native


@functools.cache
def integer_range(dtype: ct.DType) -> tuple[int, int]:
    """The smallest and the largest value of an integer dtype."""
    return integer_dtype_min(dtype), integer_dtype_max(dtype)


@functools.lru_cache(maxsize=4096, typed=True)
def promote(x: ct.DType | Number, y: ct.DType | Number, force_float: bool = False) -> ct.DType:
    """The common dtype of two operands; a Python number stands for a constant that has no dtype of its own."""
    left = x if isinstance(x, ct.DType) else LooselyTypedScalar(x)
    right = y if isinstance(y, ct.DType) else LooselyTypedScalar(y)
    return _promote_dtypes(left, right, force_float)


@functools.lru_cache(maxsize=4096, typed=True)
def check_implicit_cast_to(source: ct.DType | Number, target: ct.DType) -> None:
    """Raise where a value may not be stored as `target` without `astype`."""
    check_implicit_cast(TileTy(source) if isinstance(source, ct.DType) else LooselyTypedScalar(source), target)


@functools.cache
def check_conversion(source: ct.DType, target: ct.DType, rounding_mode: ct.RoundingMode | None) -> None:
    """Raise where `astype` does not convert `source` to `target` with this rounding mode."""
    if is_float(source) and is_float(target):
        get_ftof_rounding_min_version(source, target, rounding_mode)
    elif rounding_mode is not None:
        raise ct.TileTypeError("rounding_mode is only valid for float to float conversions")


@functools.cache
def mma_accumulator_dtype(x: ct.DType, y: ct.DType, acc: ct.DType | None = None) -> ct.DType:
    """The accumulator's dtype of a matrix product; raises for operands that no matrix instruction takes."""
    return _resolve_mma_supported_dtype(x, y, acc)


def kernel_function(kernel: Any) -> Callable[..., None]:
    """The Python function under `@ct.kernel`."""
    try:
        return kernel._pyfunc
    except AttributeError as error:
        raise _moved(error) from error


def parameter_annotations(kernel: Any) -> tuple[Any, ...]:
    """One annotation node for each parameter of a kernel: whether it is constant, and its index or scalar dtype."""
    try:
        return tuple(kernel._annotated_function.parameter_annotations)
    except AttributeError as error:
        raise _moved(error) from error
