"""The operators of tiles: promote as the compiler does, broadcast, compute on torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from .internals import is_arithmetic, is_boolean, is_float, is_integral, is_signed, is_unrestricted_float, promote
from .tiles import Tile, common_dtype, convert, integer_scalar, narrow_integers, operand, operand_tensor


def _broadcast(function: Callable[[Any, Any], Any], x: Any, y: Any) -> torch.Tensor:
    try:
        return function(x, y)
    except RuntimeError as error:
        shapes = tuple(tuple(operand.shape) for operand in (x, y) if isinstance(operand, torch.Tensor))
        try:
            torch.broadcast_shapes(*shapes)
        except RuntimeError:
            raise ct.TileTypeError(f"shapes {shapes} are not broadcastable") from error
        raise


_NEAREST = (None, ct.RoundingMode.RN, ct.RoundingMode.FULL, ct.RoundingMode.APPROX)


def check_rounding(dtype: ct.DType, rounding_mode: ct.RoundingMode | None, flush_to_zero: bool = False) -> None:
    """Raise for a rounding mode that the compiler rejects or that torch cannot follow."""
    if rounding_mode not in _NEAREST:
        raise NotImplementedError(f"the cuTile interpreter rounds to nearest, not as {rounding_mode}")
    if rounding_mode is not None and not is_unrestricted_float(dtype):
        raise ct.TileTypeError(f"a rounding mode applies to floats, got {dtype}")
    single_only = flush_to_zero or rounding_mode in (ct.RoundingMode.FULL, ct.RoundingMode.APPROX)
    if single_only and dtype != ct.float32:
        raise ct.TileTypeError(f"flush_to_zero and the rounding modes full and approx apply to float32, got {dtype}")


_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
    "atan2": math.atan2,
}
# Operators rather than torch functions, because one operand may be a Python number.
_FLOATS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": lambda x, y: torch.floor(x / y),
    "mod": operator.mod,
    "max": lambda x, y: torch.fmax(*_tensors(x, y)),
    "min": lambda x, y: torch.fmin(*_tensors(x, y)),
    "max_nan": lambda x, y: torch.maximum(*_tensors(x, y)),
    "min_nan": lambda x, y: torch.minimum(*_tensors(x, y)),
    "atan2": lambda x, y: torch.atan2(*_tensors(x, y)),
}
_INTEGERS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": lambda x, y: torch.maximum(*_tensors(x, y)),
    "min": lambda x, y: torch.minimum(*_tensors(x, y)),
}


def _tensors(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = (x if isinstance(x, torch.Tensor) else y).dtype
    return torch.as_tensor(x, dtype=dtype), torch.as_tensor(y, dtype=dtype)


def arithmetic(name: str, x: Any, y: Any, propagate_nan: bool = False) -> Any:
    """A binary operation of cuTile: promote, broadcast, compute in the common dtype."""
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        return _NUMBERS[name](x, y)
    dtype = common_dtype(x, y, force_float=name == "truediv")
    if is_boolean(dtype):
        raise ct.TileTypeError(f"{name} does not support bool, please cast bool to int")
    if not is_arithmetic(dtype):
        raise ct.TileTypeError(f"{name} does not support the non-arithmetic dtype {dtype}")
    if not is_float(dtype):
        return _integer_arithmetic(name, x, y, dtype)
    function = _FLOATS[f"{name}_nan" if propagate_nan else name]
    return Tile(dtype, _broadcast(function, operand_tensor(x, dtype), operand_tensor(y, dtype)))


def _integer_arithmetic(name: str, x: Any, y: Any, dtype: ct.DType) -> Tile:
    if name not in _INTEGERS:
        raise ct.TileTypeError(f"{name} does not support {dtype}")
    left, right = _wide_integers(x), _wide_integers(y)
    if isinstance(left, int) and isinstance(right, int):
        return integer_scalar(_NUMBERS[name](left, right), dtype)
    return Tile.of(dtype, narrow_integers(_broadcast(_INTEGERS[name], left, right), dtype))


def _wide_integers(x: Any) -> Any:
    # Every integer dtype computes in int64, where the overflow of a narrower one can be seen.
    if not isinstance(x, Tile):
        return int(x)
    return x.tensor.to(torch.int64) if x.value is None else int(x.value)


def divide(name: str, x: Any, y: Any) -> tuple[Any, Any]:
    """The quotient and the remainder of integers, as Python has them."""
    if (isinstance(x, Tile) or isinstance(y, Tile)) and is_float(common_dtype(x, y)):
        raise ct.TileTypeError(f"{name} does not support floats")
    return arithmetic("floordiv", x, y), arithmetic("mod", x, y)


def power(name: str, x: Any, y: Any) -> Any:
    """x ** y; an integer exponent leaves the base's dtype, an integer base needs a float exponent."""
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        return x**y
    base, exponent = operand(x), promote(operand(y), operand(y))
    if isinstance(base, ct.DType) and is_unrestricted_float(base) and is_integral(exponent):
        dtype = base
    else:
        dtype = common_dtype(x, y)
    if not is_float(dtype):
        raise ct.TileTypeError(f"pow does not support {dtype}")
    return Tile(dtype, _broadcast(operator.pow, operand_tensor(x, dtype), operand_tensor(y, dtype)))


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}


def compare(name: str, x: Any, y: Any) -> Any:
    """A comparison of cuTile: promote, broadcast, compare in the common dtype."""
    function = _COMPARISONS[name]
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        return function(x, y)
    dtype = common_dtype(x, y)
    if is_float(dtype):
        left, right = operand_tensor(x, dtype), operand_tensor(y, dtype)
    else:
        left, right = _wide_integers(x), _wide_integers(y)
        if isinstance(left, int) and isinstance(right, int):
            return Tile(ct.bool_, None, function(left, right))
    return Tile.of(ct.bool_, _broadcast(function, left, right))


_BITWISE: dict[str, Callable[..., Any]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_SHIFTS: dict[str, Callable[..., Any]] = {"lshift": operator.lshift, "rshift": operator.rshift}


def bitwise(name: str, x: Any, y: Any) -> Any:
    """A bitwise operation of two integers or two booleans of one dtype."""
    function = _BITWISE[name]
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        return function(x, y)
    left, right = operand(x), operand(y)
    if any(is_float(promote(kind, kind)) for kind in (left, right)):
        raise ct.TileTypeError("bitwise operations require integers or booleans; bitcast other dtypes first")
    if isinstance(x, Tile) and isinstance(y, Tile) and x.dtype != y.dtype:
        raise ct.TileTypeError(f"bitwise operands must have the same dtype, got {x.dtype} and {y.dtype}")
    return _integer_logic(function, x, y, promote(left, right))


def shift(name: str, x: Any, y: Any) -> Any:
    """A shift of integers; a right shift of a signed dtype keeps the sign."""
    function = _SHIFTS[name]
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        return function(x, y)
    for kind in (operand(x), operand(y)):
        if not is_integral(promote(kind, kind)):
            raise ct.TileTypeError(f"a bitwise shift requires integers, got {promote(kind, kind)}")
    return _integer_logic(function, x, y, common_dtype(x, y))


def _integer_logic(function: Callable[..., Any], x: Any, y: Any, dtype: ct.DType) -> Tile:
    left, right = _wide_integers(x), _wide_integers(y)
    if isinstance(left, int) and isinstance(right, int):
        result = function(left, right)
        return Tile(dtype, None, bool(result)) if is_boolean(dtype) else integer_scalar(result, dtype)
    wide = _broadcast(function, left, right)
    return Tile.of(dtype, wide != 0 if is_boolean(dtype) else narrow_integers(wide, dtype))


def negative(x: Any) -> Any:
    """-x; a boolean becomes an int32."""
    if not isinstance(x, Tile):
        return -x
    if is_boolean(x.dtype):
        x = convert(x, ct.int32)
    if is_float(x.dtype):
        return Tile(x.dtype, -x.tensor)
    return _integer_arithmetic("sub", 0, x, x.dtype)


def positive(x: Any) -> Any:
    """+x; a boolean becomes an int32."""
    return convert(x, ct.int32) if is_boolean(x.dtype) else x


def absolute(x: Any) -> Any:
    """abs(x)."""
    if not isinstance(x, Tile):
        return abs(x)
    if is_float(x.dtype):
        return Tile(x.dtype, x.tensor.abs())
    if is_boolean(x.dtype) or not is_signed(x.dtype):
        return x
    return Tile.of(x.dtype, narrow_integers(x.tensor.to(torch.int64).abs(), x.dtype))


def invert(x: Any) -> Any:
    """~x; of a boolean, its negation."""
    if isinstance(x, bool):
        return not x
    if not isinstance(x, Tile):
        return ~x
    if is_float(x.dtype):
        raise ct.TileTypeError("bitwise not requires an integer or a boolean")
    if is_boolean(x.dtype):
        return Tile.of(x.dtype, ~x.tensor)
    return Tile.of(x.dtype, narrow_integers(~x.tensor.to(torch.int64), x.dtype))


def _install(function: Callable[[str, Any, Any], Any], names: dict[str, str]) -> None:
    """Make Tile's binary operators of a function that is called with the operation's name."""
    for method, name in names.items():
        setattr(Tile, f"__{method}__", lambda self, other, name=name: function(name, self, other))
        setattr(Tile, f"__r{method}__", lambda self, other, name=name: function(name, other, self))


_install(arithmetic, {name: name for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")})
_install(divide, {"divmod": "divmod"})
_install(bitwise, {"and": "and", "or": "or", "xor": "xor"})
_install(shift, {"lshift": "lshift", "rshift": "rshift"})
_install(power, {"pow": "pow"})
for _name in _COMPARISONS:
    setattr(Tile, f"__{_name}__", lambda self, other, name=_name: compare(name, self, other))
for _name, _unary in {"neg": negative, "pos": positive, "abs": absolute, "invert": invert}.items():
    setattr(Tile, f"__{_name}__", _unary)
