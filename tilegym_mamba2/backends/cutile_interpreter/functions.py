"""The tile functions of cuTile by name."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from . import arrays, elements, operators
from .internals import (
    check_conversion,
    is_boolean,
    is_float,
    is_integral,
    mma_accumulator_dtype,
    to_dtype,
)
from .operators import arithmetic, check_rounding
from .reductions import arg_reduction, cumulative, reduce, reduction, scan
from .tiles import (
    Tile,
    common_dtype,
    convert,
    convert_tensor,
    is_number,
    narrow_integers,
    nested_text,
    normalize_axis,
    operand_tensor,
    require_shape,
    require_tile,
    torch_dtype,
)


def _binary(name: str) -> Callable[..., Any]:
    def function(
        x: Any,
        y: Any,
        /,
        *,
        rounding_mode: ct.RoundingMode | None = None,
        flush_to_zero: bool = False,
        propagate_nan: bool = False,
    ) -> Any:
        if rounding_mode is not None or flush_to_zero:
            check_rounding(common_dtype(x, y, name == "truediv"), rounding_mode, flush_to_zero)
        return arithmetic(name, x, y, propagate_nan)

    return function


def _float_unary(on_tensor: Callable[[torch.Tensor], torch.Tensor], on_number: Callable[[Any], float]) -> Any:
    def function(x: Any, /, *, rounding_mode: ct.RoundingMode | None = None, flush_to_zero: bool = False) -> Any:
        if is_number(x):
            return on_number(x)
        x = require_tile(x, "an operand")
        if not is_float(x.dtype):
            x = convert(x, ct.float32)
        if rounding_mode is not None or flush_to_zero:
            check_rounding(x.dtype, rounding_mode, flush_to_zero)
        return Tile(x.dtype, on_tensor(x.tensor))

    return function


def _rounding_unary(on_tensor: Callable[[torch.Tensor], torch.Tensor], on_number: Callable[[Any], float]) -> Any:
    def function(x: Any, /) -> Any:
        if is_number(x):
            return on_number(x)
        if not is_float(require_tile(x, "an operand").dtype):
            raise ct.TileTypeError(f"floor and ceil take floats, got {x.dtype}")
        return Tile(x.dtype, on_tensor(x.tensor))

    return function


def isnan(x: Any, /) -> Any:
    if is_number(x):
        return math.isnan(x)
    if not is_float(require_tile(x, "an operand").dtype):
        raise ct.TileTypeError(f"isnan takes floats, got {x.dtype}")
    return Tile.of(ct.bool_, torch.isnan(x.tensor))


def where(cond: Any, x: Any, y: Any, /) -> Tile:
    cond = convert(require_tile(cond, "the condition"), ct.bool_)
    dtype = common_dtype(x, y)
    left, right = operand_tensor(x, dtype), operand_tensor(y, dtype)
    if not isinstance(left, torch.Tensor) and not isinstance(right, torch.Tensor):
        left = torch.tensor(left, dtype=torch_dtype(dtype))
    try:
        return Tile.of(dtype, torch.where(cond.tensor, left, right))
    except RuntimeError as error:
        shapes = [cond.shape, *(operand.shape for operand in (x, y) if isinstance(operand, Tile))]
        raise ct.TileTypeError(f"shapes {shapes} are not broadcastable") from error


def full(shape: Any, fill_value: Any, dtype: Any) -> Tile:
    shape, dtype = require_shape(shape), to_dtype(dtype)
    if isinstance(fill_value, Tile):
        if fill_value.ndim:
            raise ct.TileTypeError(f"full takes a scalar, got a tile of shape {fill_value.shape}")
        return Tile.of(dtype, convert(fill_value, dtype).tensor.expand(shape))
    if is_float(dtype) and dtype != ct.tfloat32:
        return Tile(dtype, torch.full(shape, float(fill_value), dtype=torch_dtype(dtype)))
    return Tile.of(dtype, convert(fill_value, dtype).tensor.expand(shape))


def zeros(shape: Any, dtype: Any) -> Tile:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any) -> Tile:
    return full(shape, 1, dtype)


def arange(size: Any, /, *, dtype: Any, start: Any = 0, step: Any = 1) -> Tile:
    (size,) = require_shape(size)
    dtype = to_dtype(dtype)
    counter = torch.arange(size)
    result: Any = Tile.of(
        dtype, narrow_integers(counter, dtype) if is_integral(dtype) else convert_tensor(counter, ct.int64, dtype)
    )
    if isinstance(step, Tile) or step != 1:
        result = arithmetic("mul", result, convert(step, dtype))
    if isinstance(start, Tile) or start != 0:
        result = arithmetic("add", result, convert(start, dtype))
    return result


def astile(value: Any, /, *, dtype: Any) -> Tile:
    dtype = to_dtype(dtype)

    def stack(item: Any) -> torch.Tensor:
        if not isinstance(item, tuple):
            scalar = convert(item, dtype)
            if scalar.ndim:
                raise ct.TileTypeError(f"astile takes scalars, got a tile of shape {scalar.shape}")
            return scalar.tensor
        require_shape((len(item),))
        inner = [stack(element) for element in item]
        if len({element.shape for element in inner}) != 1:
            raise ct.TileTypeError("astile takes a tuple with a uniform inner shape")
        return torch.stack(inner)

    return Tile.of(dtype, stack(value))


def astype(x: Any, dtype: Any, /, *, rounding_mode: ct.RoundingMode | None = None) -> Tile:
    dtype = to_dtype(dtype)
    if is_number(x) and rounding_mode is None:
        return convert(x, dtype)
    x = require_tile(x, "an operand")
    check_conversion(x.dtype, dtype, rounding_mode)
    if rounding_mode not in (None, ct.RoundingMode.RN):
        raise NotImplementedError(f"the cuTile interpreter rounds to nearest, not as {rounding_mode}")
    return convert(x, dtype)


def bitcast(x: Any, /, dtype: Any) -> Tile:
    x, dtype = require_tile(x, "an operand"), to_dtype(dtype)
    if ct.bool_ in (x.dtype, dtype) or x.dtype.bitwidth != dtype.bitwidth:
        raise ct.TileTypeError(f"cannot bitcast {x.dtype} to {dtype}")
    return Tile.of(dtype, x.tensor.view(torch_dtype(dtype)))


def pack_to_bytes(x: Any, /) -> Tile:
    x = require_tile(x, "an operand")
    if is_boolean(x.dtype):
        raise ct.TileTypeError("pack_to_bytes does not take booleans")
    return Tile(ct.uint8, x.tensor.reshape(-1).contiguous().view(torch.uint8))


def unpack_from_bytes(x: Any, /, dtype: Any) -> Tile:
    x, dtype = require_tile(x, "an operand"), to_dtype(dtype)
    if x.dtype != ct.uint8 or x.ndim != 1 or is_boolean(dtype) or 8 * x.shape[0] % dtype.bitwidth:
        raise ct.TileTypeError(f"cannot unpack {x!r} to {dtype}")
    return Tile(dtype, x.tensor.contiguous().view(torch_dtype(dtype)))


def expand_dims(x: Any, /, axis: Any) -> Tile:
    x = require_tile(x, "an operand")
    return Tile(x.dtype, x.tensor.unsqueeze(normalize_axis(axis, x.ndim + 1)))


def broadcast_to(x: Any, /, shape: Any) -> Tile:
    x = require_tile(x, "an operand")
    return Tile.of(x.dtype, arrays.broadcast_tensor(x, require_shape(shape), "tile"))


def cat(items: Any, /, axis: Any) -> Tile:
    if not isinstance(items, tuple) or not 1 <= len(items) <= 2:
        raise ct.TileTypeError("cat takes a tuple of one or two tiles")
    if len(items) == 1:
        return items[0]
    x, y = items
    if x.dtype != y.dtype:
        raise ct.TileTypeError(f"cat takes tiles of one dtype, got {x.dtype} and {y.dtype}")
    axis = normalize_axis(axis, x.ndim)
    if x.ndim != y.ndim or any(a != b for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if i != axis):
        raise ct.TileTypeError(f"cat along axis {axis} does not take tiles of shapes {x.shape} and {y.shape}")
    require_shape(tuple(a + b if i == axis else a for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True))))
    return Tile(x.dtype, torch.cat((x.tensor, y.tensor), dim=axis))


def _subtile(x: Tile, index: Any, extents: tuple[int, ...]) -> tuple[slice, ...]:
    items = index if isinstance(index, tuple) else (index,)
    if len(items) != x.ndim:
        raise ct.TileTypeError(f"index of size {len(items)} does not match the tile rank {x.ndim}")
    slices = []
    for item, extent, size in zip(items, extents, x.shape, strict=True):
        position = arrays.index_value(item)
        if size % extent:
            raise ct.TileTypeError(f"a tile of shape {x.shape} is not divisible into tiles of shape {extents}")
        if not 0 <= position < size // extent:
            raise IndexError(f"index {items} is outside a tile of shape {x.shape} cut into tiles of shape {extents}")
        slices.append(slice(position * extent, (position + 1) * extent))
    return tuple(slices)


def extract(x: Any, /, index: Any, shape: Any) -> Tile:
    shape = require_shape(shape, x.ndim, scalar_allowed=True)
    part = x.tensor[_subtile(x, index, shape or (1,) * x.ndim)]
    return Tile.of(x.dtype, part if shape else part.reshape(()))


def insert(x: Any, /, index: Any, value: Any) -> Tile:
    value = require_tile(value, "the value")
    if value.dtype != x.dtype or value.ndim not in (0, x.ndim):
        raise ct.TileTypeError(f"cannot insert {value!r} into {x!r}")
    extents = value.shape or (1,) * x.ndim
    result = x.tensor.clone()
    result[_subtile(x, index, extents)] = value.tensor.reshape(extents)
    return Tile(x.dtype, result)


def _batch_shape(x: Tile, y: Tile) -> tuple[int, ...]:
    if x.ndim <= 2 and y.ndim <= 2:
        return ()
    return tuple(torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]))


def _product(x: torch.Tensor, y: torch.Tensor, acc: torch.Tensor | None, dtype: ct.DType) -> torch.Tensor:
    """x @ y + acc, accumulated in float32 for 16-bit and 8-bit floats; integers are exact in float64."""
    if not is_float(dtype):
        wide = torch.matmul(x.to(torch.float64), y.to(torch.float64)).to(torch.int64)
        return narrow_integers(wide if acc is None else wide + acc, dtype)
    inner = torch.float64 if dtype == ct.float64 else torch.float32
    result = torch.matmul(x.to(inner), y.to(inner))
    if acc is not None:
        result += acc
    return result.to(torch_dtype(dtype))


def _check_product_shapes(x: Tile, y: Tile) -> None:
    rows, columns = x.shape[-1], y.shape[-2] if y.ndim > 1 else y.shape[0]
    if rows != columns:
        raise ct.TileTypeError(f"cannot multiply tiles of shapes {x.shape} and {y.shape}")
    try:
        _batch_shape(x, y)
    except RuntimeError:
        raise ct.TileTypeError(f"cannot multiply tiles of shapes {x.shape} and {y.shape}") from None


def mma(x: Any, y: Any, /, acc: Any, *, use_fast_acc: bool = False) -> Tile:
    for operand in (x, y, acc):
        if not isinstance(operand, Tile) or operand.ndim < 2:
            raise ct.TileTypeError(f"mma takes tiles of rank 2 or 3, got {operand!r}")
    dtype = mma_accumulator_dtype(x.dtype, y.dtype, acc.dtype)
    _check_product_shapes(x, y)
    shape = (*_batch_shape(x, y), x.shape[-2], y.shape[-1])
    if acc.shape != shape:
        raise ct.TileTypeError(f"mma expects an accumulator of shape {shape}, got {acc.shape}")
    return Tile(dtype, _product(x.tensor, y.tensor, acc.tensor, dtype))


def matmul(x: Any, y: Any, /) -> Tile:
    for operand in (x, y):
        if not isinstance(operand, Tile) or not operand.ndim:
            raise ct.TileTypeError(f"matmul takes tiles of rank 1 to 3, got {operand!r}")
    dtype = common_dtype(x, y)
    acc_dtype = mma_accumulator_dtype(dtype, dtype)
    _check_product_shapes(x, y)
    result = _product(operand_tensor(x, dtype), operand_tensor(y, dtype), None, acc_dtype)
    return Tile.of(dtype, convert_tensor(result, acc_dtype, dtype))


def assume_divisible_by(x: Any, divisor: int) -> Any:
    if arrays.index_value(x) % divisor:
        raise ValueError(f"{arrays.index_value(x)} was assumed to be divisible by {divisor}")
    return x


def printf(format: str, *args: Any) -> None:
    values = iter(args)

    def text(match: re.Match[str]) -> str:
        specifier = match.group()
        if specifier == "%%":
            return "%"
        return nested_text(require_tile(next(values), "an argument of printf"), lambda element: specifier % element)

    sys.stdout.write(re.sub(r"%%|%[^%a-zA-Z]*(?:hh|h|ll|l|L|q|j|z|t)?[diuoxXeEfFgGaA]", text, format))


def print_(*args: Any, sep: str = " ", end: str = "\n") -> None:
    sys.stdout.write(sep.join(map(str, args)) + end)


def assert_(cond: Any, /, message: str | None = None) -> None:
    cond = require_tile(cond, "the condition")
    if not is_boolean(cond.dtype):
        raise ct.TileTypeError(f"assert_ takes a boolean tile, got {cond.dtype}")
    if not bool(cond.tensor.all()):
        raise AssertionError(message or "ct.assert_ failed")


def static_assert(condition: Any, message: Any = None, /) -> None:
    if not isinstance(condition, bool):
        raise ct.TileTypeError(f"static_assert takes a compile-time boolean, got {condition!r}")
    if not condition:
        raise ct.TileStaticAssertionError("" if message is None else str(message))


def static_eval(expr: Any, /) -> Any:
    return expr


def ensure_constant(value: Any, /) -> Any:
    if isinstance(value, (Tile, arrays.Array)):
        raise ct.TileStaticAssertionError(f"{value!r} is not a compile-time constant")
    return value


def make_slice(self: Any, start: Any, length: Any, /) -> None:
    self.start, self.length = start, length


def _nothing() -> None:
    return None


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Slice.__init__": make_slice,
    "abs": operators.absolute,
    "arange": arange,
    "argmax": arg_reduction(torch.argmax, -math.inf),
    "argmin": arg_reduction(torch.argmin, math.inf),
    "assert_": assert_,
    "assume_divisible_by": assume_divisible_by,
    "astile": astile,
    "astype": astype,
    "atomic_cas": elements.atomic_cas,
    "bitcast": bitcast,
    "bitwise_lshift": functools.partial(operators.shift, "lshift"),
    "bitwise_not": operators.invert,
    "bitwise_rshift": functools.partial(operators.shift, "rshift"),
    "broadcast_to": broadcast_to,
    "cat": cat,
    "ceil": _rounding_unary(torch.ceil, math.ceil),
    "cos": _float_unary(torch.cos, math.cos),
    "cosh": _float_unary(torch.cosh, math.cosh),
    "cumprod": cumulative("mul", torch.cumprod),
    "cumsum": cumulative("add", torch.cumsum),
    "divmod": functools.partial(operators.divide, "divmod"),
    "ensure_constant": ensure_constant,
    "exp": _float_unary(torch.exp, math.exp),
    "exp2": _float_unary(torch.exp2, lambda x: 2**x),
    "expand_dims": expand_dims,
    "extract": extract,
    "floor": _rounding_unary(torch.floor, math.floor),
    "full": full,
    "gather": elements.gather,
    "grid_dependency_control_launch_dependents": _nothing,
    "grid_dependency_control_wait": _nothing,
    "insert": insert,
    "isnan": isnan,
    "load": arrays.load,
    "load_advanced_indexing": elements.load_advanced_indexing,
    "log": _float_unary(torch.log, math.log),
    "log2": _float_unary(torch.log2, math.log2),
    "matmul": matmul,
    "max": reduction("max"),
    "maximum": _binary("max"),
    "min": reduction("min"),
    "minimum": _binary("min"),
    "mma": mma,
    "negative": operators.negative,
    "num_tiles": arrays.num_tiles,
    "ones": ones,
    "pack_to_bytes": pack_to_bytes,
    "permute": lambda x, /, axes: require_tile(x, "an operand").permute(axes),
    "pow": functools.partial(operators.power, "pow"),
    "print": print_,
    "printf": printf,
    "prod": reduction("mul"),
    "reduce": reduce,
    "reshape": lambda x, /, shape: require_tile(x, "an operand").reshape(shape),
    "rsqrt": _float_unary(torch.rsqrt, lambda x: x**-0.5),
    "scan": scan,
    "scatter": elements.scatter,
    "sin": _float_unary(torch.sin, math.sin),
    "sinh": _float_unary(torch.sinh, math.sinh),
    "sqrt": _float_unary(torch.sqrt, math.sqrt),
    "static_assert": static_assert,
    "static_eval": static_eval,
    "store": arrays.store,
    "store_advanced_indexing": elements.store_advanced_indexing,
    "sum": reduction("add"),
    "tan": _float_unary(torch.tan, math.tan),
    "tanh": _float_unary(torch.tanh, math.tanh),
    "transpose": lambda x, /, axis0=None, axis1=None: require_tile(x, "an operand").transpose(axis0, axis1),
    "unpack_from_bytes": unpack_from_bytes,
    "where": where,
    "zeros": zeros,
    **{name: _binary(name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "atan2")},
    **{f"bitwise_{name}": functools.partial(operators.bitwise, name) for name in ("and", "or", "xor")},
    **{f"atomic_{name}": functools.partial(elements.atomic_update, name) for name in ("xchg", "add", "max", "min")},
    **{f"atomic_{name}": functools.partial(elements.atomic_update, name) for name in ("and", "or", "xor")},
    "equal": functools.partial(operators.compare, "eq"),
    "not_equal": functools.partial(operators.compare, "ne"),
    "less": functools.partial(operators.compare, "lt"),
    "less_equal": functools.partial(operators.compare, "le"),
    "greater": functools.partial(operators.compare, "gt"),
    "greater_equal": functools.partial(operators.compare, "ge"),
}
