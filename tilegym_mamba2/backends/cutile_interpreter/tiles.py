"""Tiles as thin wrappers over torch tensors, and how values convert between their dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from .internals import (
    Number,
    check_implicit_cast_to,
    integer_range,
    is_boolean,
    is_float,
    is_integral,
    is_signed,
    promote,
)

_TORCH_DTYPES: dict[ct.DType, torch.dtype] = {
    ct.bool_: torch.bool,
    ct.int8: torch.int8,
    ct.int16: torch.int16,
    ct.int32: torch.int32,
    ct.int64: torch.int64,
    ct.uint8: torch.uint8,
    ct.uint16: torch.uint16,
    ct.uint32: torch.uint32,
    ct.uint64: torch.uint64,
    ct.float16: torch.float16,
    ct.bfloat16: torch.bfloat16,
    ct.float32: torch.float32,
    ct.float64: torch.float64,
    ct.tfloat32: torch.float32,
    ct.float8_e4m3fn: torch.float8_e4m3fn,
    ct.float8_e5m2: torch.float8_e5m2,
}
_WIDE_FLOATS = (ct.float32, ct.float64)


def torch_dtype(dtype: ct.DType) -> torch.dtype:
    """The torch dtype that holds a tile of this dtype; tfloat32 is a float32 whose low 13 mantissa bits are zero."""
    try:
        return _TORCH_DTYPES[dtype]
    except KeyError:
        raise NotImplementedError(f"the cuTile interpreter has no tiles of dtype {dtype}") from None


def is_number(x: object) -> bool:
    """Whether x is a Python number, which cuTile treats as a constant without a dtype of its own."""
    return isinstance(x, (int, float))


class Tile:
    """An immutable tile: a dtype and a tensor, or for an integer or boolean scalar a Python number.

    Scalars are Python numbers because kernels compute indices with them, where torch would cost most of the run time.
    """

    __slots__ = ("_tensor", "_value", "dtype")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, dtype: ct.DType, tensor: torch.Tensor | None = None, value: int | None = None):
        self.dtype = dtype
        self._tensor = tensor
        self._value = value

    @staticmethod
    def of(dtype: ct.DType, tensor: torch.Tensor) -> Tile:
        """A tile of a tensor that has the dtype already and that nothing will write to."""
        if tensor.ndim == 0 and not tensor.is_floating_point():
            return Tile(dtype, None, tensor.item())  # type: ignore[arg-type]
        return Tile(dtype, tensor)

    @property
    def tensor(self) -> torch.Tensor:
        """The elements."""
        if self._tensor is None:
            self._tensor = torch.tensor(self._value, dtype=torch_dtype(self.dtype))
        return self._tensor

    @property
    def value(self) -> int | None:
        """The Python number of an integer or boolean scalar, None for every other tile."""
        return self._value

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self._tensor is None else tuple(self._tensor.shape)

    @property
    def ndim(self) -> int:
        return 0 if self._tensor is None else self._tensor.ndim

    def item(self) -> Tile:
        return self.reshape(())

    def reshape(self, shape: Any) -> Tile:
        if not isinstance(shape, tuple):
            raise ct.TileTypeError(f"reshape expects a constant tuple of integers, got {shape!r}")
        for extent in shape:
            if type(extent) is not int:
                raise ct.TileTypeError(f"reshape expects a constant tuple of integers, got {extent!r} in {shape}")
        try:
            return Tile.of(self.dtype, self.tensor.reshape(shape))
        except RuntimeError as error:
            raise ct.TileTypeError(f"cannot reshape {self.shape} to {shape}") from error

    def permute(self, axes: Any) -> Tile:
        normalized = [normalize_axis(axis, self.ndim) for axis in axes]
        if sorted(normalized) != list(range(self.ndim)):
            raise ct.TileTypeError(f"axes {tuple(axes)} are not a permutation of a tile of rank {self.ndim}")
        return Tile.of(self.dtype, self.tensor.permute(normalized))

    def transpose(self, axis0: int | None = None, axis1: int | None = None) -> Tile:
        if self.ndim < 2:
            raise ct.TileTypeError("cannot transpose a tile with fewer than 2 dimensions")
        if axis0 is None and axis1 is None and self.ndim == 2:
            return Tile(self.dtype, self.tensor.t())
        if axis0 is None or axis1 is None:
            raise ct.TileTypeError(f"transpose of a tile of rank {self.ndim} needs both axes, got {axis0} and {axis1}")
        first, second = normalize_axis(axis0, self.ndim), normalize_axis(axis1, self.ndim)
        return Tile(self.dtype, self.tensor.transpose(first, second))

    def astype(self, dtype: Any, *, rounding_mode: ct.RoundingMode | None = None) -> Tile:
        return ct.astype(self, dtype, rounding_mode=rounding_mode)  # type: ignore[arg-type]

    def extract(self, index: Any, shape: Any) -> Tile:
        return ct.extract(self, index, shape)  # type: ignore[arg-type]

    def insert(self, index: Any, value: Any) -> Tile:
        return ct.insert(self, index, value)  # type: ignore[arg-type]

    def __matmul__(self, other: Any) -> Tile:
        return ct.matmul(self, other)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Tile:
        items = (None,) if index is None else index
        if not isinstance(items, tuple):
            raise ct.TileTypeError("a tile is not indexed directly; use extract or item")
        slices = ellipses = 0
        for item in items:
            if isinstance(item, slice) and item == slice(None):
                slices += 1
            elif item is Ellipsis:
                ellipses += 1
            elif item is not None:
                raise ct.TileTypeError(f"a tile is indexed with None, ... and `:`, not {item!r}; use extract or item")
        if slices > self.ndim or ellipses > 1:
            raise ct.TileTypeError(f"a tile of rank {self.ndim} cannot be indexed with {items}")
        return Tile.of(self.dtype, self.tensor[items])

    def __setitem__(self, index: Any, value: Any) -> None:
        raise ct.TileTypeError("tiles are immutable: item assignment is not supported")

    def __iter__(self) -> Any:
        raise ct.TileTypeError("a tile is not iterable")

    def __bool__(self) -> bool:
        if self.ndim:
            raise ct.TileTypeError(
                f"the truth of a tile of shape {self.shape} is undefined: `if`, `while`, `and`, `or` and the builtins "
                "min and max take scalars; use ct.where, the operators & and |, ct.minimum and ct.maximum"
            )
        return bool(self.tensor) if self._value is None else bool(self._value)

    def __index__(self) -> int:
        if self._value is None or is_boolean(self.dtype):
            raise ct.TileTypeError(f"only an integer scalar is an index, got {self!r}")
        return self._value

    def __int__(self) -> int:
        raise ct.TileTypeError("int() takes a constant; use astype")

    def __float__(self) -> float:
        raise ct.TileTypeError("float() takes a constant; use astype")

    def __repr__(self) -> str:
        return f"Tile[{self.dtype}, {self.shape}]"

    def __str__(self) -> str:
        return format(self, "")

    def __format__(self, spec: str) -> str:
        return nested_text(self, lambda element: format(element, spec or ("f" if is_float(self.dtype) else "d")))


def normalize_axis(axis: Any, rank: int) -> int:
    """The non-negative index of a constant axis."""
    if type(axis) is not int:
        raise ct.TileTypeError(f"an axis must be a constant integer, got {axis!r}")
    if not -rank <= axis < rank:
        raise ct.TileTypeError(f"axis {axis} is out of range for rank {rank}")
    return axis % rank


def nested_text(tile: Tile, element_text: Callable[[Any], str]) -> str:
    """The elements in nested brackets."""

    def text(elements: Any) -> str:
        return f"[{', '.join(map(text, elements))}]" if isinstance(elements, list) else element_text(elements)

    return text(tile.tensor.tolist())


def round_to_tfloat32(tensor: torch.Tensor) -> torch.Tensor:
    """Round a float32 tensor to the 10 mantissa bits of tfloat32, ties to even."""
    bits = tensor.contiguous().view(torch.int32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(tensor), rounded, tensor)


def convert_tensor(tensor: torch.Tensor, source: ct.DType, target: ct.DType) -> torch.Tensor:
    """The elements of a `source` tile as `target`, floats rounded to nearest."""
    if source == target:
        return tensor
    if target == ct.tfloat32:
        return round_to_tfloat32(tensor.to(torch.float32))
    if target == ct.bool_:
        return tensor != 0
    return tensor.to(torch_dtype(target))


def convert(x: Tile | Number, target: ct.DType) -> Tile:
    """x as a tile of the target dtype; a Python number becomes a scalar tile."""
    if isinstance(x, Tile):
        if x.dtype == target:
            return x
        return Tile.of(target, convert_tensor(x.tensor, x.dtype, target))
    if is_integral(target):
        return integer_scalar(int(x), target)
    if is_boolean(target):
        return Tile(target, None, bool(x))
    tensor = torch.tensor(x, dtype=torch_dtype(target))
    return Tile(target, round_to_tfloat32(tensor) if target == ct.tfloat32 else tensor)


def integer_scalar(value: int, dtype: ct.DType) -> Tile:
    """An integer scalar; a signed value out of range raises, where the GPU would wrap."""
    low, high = integer_range(dtype)
    if not low <= value <= high:
        if is_signed(dtype):
            raise OverflowError(f"{value} is out of range of {dtype}, in which the GPU would wrap")
        value &= high
    return Tile(dtype, None, value)


def implicit_cast(x: Tile | Number, target: ct.DType, what: str) -> Tile:
    """x as a tile of the target dtype, if cuTile converts it without astype."""
    try:
        check_implicit_cast_to(x.dtype if isinstance(x, Tile) else x, target)
    except ct.TileTypeError as error:
        raise ct.TileTypeError(f"{what}: {error.message}") from None
    except ct.TileValueError as error:
        raise ct.TileValueError(f"{what}: {error.message}") from None
    return convert(x, target)


def require_tile(x: Any, what: str) -> Tile:
    """x as a tile; a Python number takes its default dtype."""
    if isinstance(x, Tile):
        return x
    if is_number(x):
        return convert(x, promote(x, x))
    raise ct.TileTypeError(f"{what} must be a tile or a number, got {type(x).__name__}")


def common_dtype(x: Any, y: Any, force_float: bool = False) -> ct.DType:
    """The dtype to which cuTile promotes two operands, at least one of them a tile."""
    left, right = operand(x), operand(y)
    if left is right and not force_float:
        return left  # type: ignore[return-value]
    return promote(left, right, force_float)


def operand(x: Any) -> ct.DType | Number:
    """What promotion looks at: a tile's dtype, or the number itself, which has none of its own."""
    if isinstance(x, Tile):
        return x.dtype
    if is_number(x):
        return x
    raise ct.TileTypeError(f"expected a tile or a number, got {type(x).__name__}")


def operand_tensor(x: Any, dtype: ct.DType) -> Any:
    """x's elements as dtype, for a torch operation that has a tensor of dtype for its other operand."""
    if isinstance(x, Tile):
        return convert_tensor(x.tensor, x.dtype, dtype)
    if dtype in _WIDE_FLOATS:
        return float(x)
    # torch would use an unrounded Python number beside a 16-bit tensor, cuTile rounds the constant first.
    return convert(x, dtype).tensor


def narrow_integers(wide: torch.Tensor, dtype: ct.DType) -> torch.Tensor:
    """int64 results as dtype; a signed overflow raises, where the GPU would wrap, an unsigned one wraps."""
    if dtype.bitwidth < 64:
        low, high = integer_range(dtype)
        if is_signed(dtype):
            smallest, largest = torch.aminmax(wide)
            if smallest < low or largest > high:
                value = (largest if largest > high else smallest).item()
                raise OverflowError(f"{value} is out of range of {dtype}, in which the GPU would wrap")
        else:
            wide = wide & high
    return wide.to(torch_dtype(dtype))


def require_shape(shape: Any, rank: int | None = None, scalar_allowed: bool = False) -> tuple[int, ...]:
    """A tile shape as the compiler demands it: constant, positive, every extent a power of two."""
    extents: tuple[Any, ...] = shape if isinstance(shape, tuple) else (shape,)
    for extent in extents:
        if type(extent) is not int:
            raise ct.TileTypeError(f"a tile's shape must be constant integers, got {extent!r} in {shape}")
        if extent <= 0:
            raise ct.TileTypeError(f"tile shape {extents} has the extent {extent}, which is not positive")
        if extent & (extent - 1):
            raise ct.TileTypeError(f"tile shape {extents} has the extent {extent}, which is not a power of two")
    if rank is not None and len(extents) != rank and not (scalar_allowed and not extents):
        raise ct.TileTypeError(f"tile shape {extents} has rank {len(extents)}, the array has rank {rank}")
    return extents
