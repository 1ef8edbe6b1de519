"""Global arrays, and the tiles that kernels load from them and store to them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import cuda.tile as ct
import torch

from .internals import integer_range, is_integral, is_signed, promote, to_dtype
from .tiles import Tile, implicit_cast, integer_scalar, normalize_axis, require_shape

_PADDING = {
    ct.PaddingMode.ZERO: 0.0,
    ct.PaddingMode.NEG_ZERO: -0.0,
    ct.PaddingMode.NAN: math.nan,
    ct.PaddingMode.POS_INF: math.inf,
    ct.PaddingMode.NEG_INF: -math.inf,
}


class Array:
    """A global array: a torch tensor whose shape and strides a kernel reads as integers of `index_dtype`."""

    def __init__(
        self,
        tensor: torch.Tensor,
        index_dtype: ct.DType = ct.int32,
        static_shape_dims: Sequence[int] = (),
        static_stride_dims: Sequence[int] = (),
    ):
        self.tensor = tensor
        self.dtype = to_dtype(tensor.dtype)
        self.ndim = tensor.ndim
        self.index_dtype = index_dtype
        self.shape = self._extents(tensor.shape, static_shape_dims)
        self.strides = self._extents(tensor.stride(), static_stride_dims)

    def _extents(self, extents: Sequence[int], static: Sequence[int]) -> tuple[Tile | int, ...]:
        constant = {normalize_axis(axis, self.ndim) for axis in static}
        try:
            scalars = [integer_scalar(extent, self.index_dtype) for extent in extents]
        except OverflowError as error:
            raise OverflowError(
                f"an array of shape {tuple(self.tensor.shape)} and strides {self.tensor.stride()} needs "
                f"ct.IndexedWithInt64: {error}"
            ) from None
        return tuple(extents[axis] if axis in constant else scalar for axis, scalar in enumerate(scalars))

    def slice(self, axis: Any, start: Any, stop: Any) -> Array:
        """The view from start to stop along one axis."""
        axis = normalize_axis(axis, self.ndim)
        first, last = index_value(start), index_value(stop)
        size = self.tensor.shape[axis]
        if not (0 <= first < size and first <= last <= size):
            raise IndexError(
                f"slice from {first} to {last} along axis {axis} of an array of shape {tuple(self.tensor.shape)}: "
                "cuTile demands 0 <= start < size and start <= stop <= size"
            )
        # The compiler multiplies start by the stride in their common dtype, before it widens the product.
        dtype = promote(start.dtype if isinstance(start, Tile) else start, self.index_dtype)
        low, high = integer_range(dtype)
        if not low <= first * self.tensor.stride(axis) <= high:
            raise OverflowError(
                f"the offset of a slice, {first} times the stride {self.tensor.stride(axis)}, overflows {dtype}: "
                "annotate the array as ct.IndexedWithInt64"
            )
        view = copy.copy(self)
        view.tensor = self.tensor.narrow(axis, first, last - first)
        length = last - first if type(start) is int and type(stop) is int else integer_scalar(last - first, dtype)
        view.shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return view

    def tiled_view(
        self,
        tile_shape: Any,
        *,
        padding_mode: ct.PaddingMode = ct.PaddingMode.UNDETERMINED,
        traversal_steps: Any = None,
    ) -> Any:
        """A view that loads and stores tiles of one shape."""
        from .views import TiledView

        return TiledView(self, tile_shape, padding_mode, traversal_steps)

    def get_raw_memory(self) -> Any:
        """The elements from the array's first on, addressed by their offset."""
        from .views import RawMemory

        return RawMemory(self)

    def __getitem__(self, index: Any) -> Any:
        raise ct.TileTypeError("arrays are not subscriptable: use ct.load or ct.gather")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise ct.TileTypeError("arrays do not support item assignment: use ct.store or ct.scatter")


class Window:
    """The part of a tensor under one tile, and where the tile sticks out of it."""

    def __init__(self, tensor: torch.Tensor, index: Any, extents: Sequence[int], steps: Sequence[int]):
        items = index if isinstance(index, tuple) else (index,)
        if len(items) != tensor.ndim:
            raise ct.TileTypeError(f"index of size {len(items)} does not match the array rank {tensor.ndim}")
        self.tensor, self.extents = tensor, extents
        self.origin = tuple(index_value(item) * step for item, step in zip(items, steps, strict=True))
        self.inside = all(
            first >= 0 and first + n <= size for first, n, size in zip(self.origin, extents, tensor.shape, strict=True)
        )

    def __str__(self) -> str:
        return f"a tile of shape {tuple(self.extents)} at {self.origin} of an array of shape {tuple(self.tensor.shape)}"

    def _view(self, check_bounds: bool, access: str) -> tuple[torch.Tensor, tuple[slice, ...] | None]:
        """The tensor's part inside the window, and the tile's part inside the tensor where that is not all of it."""
        if self.inside:
            slices = tuple(slice(first, first + n) for first, n in zip(self.origin, self.extents, strict=True))
            return self.tensor[slices], None
        if not check_bounds:
            raise IndexError(f"{access} of {self} with check_bounds=False is undefined")
        bounds = [
            (max(first, 0), min(first + n, size))
            for first, n, size in zip(self.origin, self.extents, self.tensor.shape, strict=True)
        ]
        if any(low >= high for low, high in bounds):
            raise IndexError(f"{access} of {self}, entirely outside it, is undefined")
        part = tuple(slice(low - first, high - first) for (low, high), first in zip(bounds, self.origin, strict=True))
        return self.tensor[tuple(slice(low, high) for low, high in bounds)], part

    def read(self, padding_mode: ct.PaddingMode, check_bounds: bool) -> torch.Tensor:
        """A copy of the elements, which later stores leave alone."""
        source, part = self._view(check_bounds, "load")
        if part is None:
            return source.clone(memory_format=torch.contiguous_format)
        padding = padding_value(padding_mode, source.dtype, str(self))
        padded = torch.full(tuple(self.extents), padding, dtype=source.dtype)
        padded[part] = source
        return padded

    def write(self, tile: torch.Tensor, check_bounds: bool) -> None:
        """Store the tile, dropping what sticks out."""
        target, part = self._view(check_bounds, "store")
        target.copy_(tile if part is None else tile[part])

    def update(self, function: Callable[..., torch.Tensor], tile: torch.Tensor) -> None:
        """Combine the tile with what is there, dropping what sticks out."""
        target, part = self._view(True, "atomic update")
        target.copy_(function(target, tile if part is None else tile[part]))


def padding_value(mode: ct.PaddingMode, dtype: torch.dtype, where: str) -> float:
    """The value outside the array."""
    if mode is ct.PaddingMode.UNDETERMINED:
        raise IndexError(f"load of {where} without a padding mode reads undetermined elements")
    if mode is not ct.PaddingMode.ZERO and not dtype.is_floating_point:
        raise ct.TileTypeError(f"{mode} has no value in {dtype}")
    return _PADDING[mode]


def index_value(item: Any) -> int:
    """The Python integer of an index, which is a signed integer scalar."""
    if type(item) is int:
        return item
    if isinstance(item, Tile) and item.value is not None and is_integral(item.dtype) and is_signed(item.dtype):
        return item.value
    raise ct.TileTypeError(f"an index must be a signed integer scalar, got {item!r}")


def check_hints(latency: Any, allow_tma: Any = None) -> None:
    """Raise for hints that the compiler rejects."""
    if latency is not None and not (type(latency) is int and 1 <= latency <= 10):
        raise ct.TileValueError(f"latency must be a constant between 1 and 10, got {latency}")
    if allow_tma is not None and not isinstance(allow_tma, bool):
        raise ct.TileTypeError(f"allow_tma must be a boolean, got {allow_tma}")


def broadcast_tensor(tile: Tile, shape: Sequence[int], what: str) -> torch.Tensor:
    """The elements of a tile, broadcast to a shape."""
    try:
        return tile.tensor.expand(tuple(shape))
    except RuntimeError:
        raise ct.TileTypeError(f"{what} shape {tile.shape} is not broadcastable to {tuple(shape)}") from None


def require_array(array: Any) -> Array:
    """The array, or an error that names what stands in its place."""
    if not isinstance(array, Array):
        raise ct.TileTypeError(f"expected an array, got {array!r}")
    return array


def _permuted(array: Array, order: Any) -> torch.Tensor:
    """The tensor with the array axes in the order of the tile axes."""
    if order == "C":
        return array.tensor
    if order == "F":
        return array.tensor.permute(tuple(reversed(range(array.ndim))))
    axes = [normalize_axis(axis, array.ndim) for axis in order] if isinstance(order, tuple) else []
    if sorted(axes) != list(range(array.ndim)):
        raise ct.TileTypeError(f"order must be 'C', 'F' or a permutation of {array.ndim} axes, got {order!r}")
    return array.tensor.permute(axes)


def load(
    array: Any,
    /,
    index: Any,
    shape: Any,
    *,
    order: Any = "C",
    padding_mode: ct.PaddingMode = ct.PaddingMode.UNDETERMINED,
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
    memory_order: ct.MemoryOrder = ct.MemoryOrder.WEAK,
    memory_scope: ct.MemoryScope = ct.MemoryScope.NONE,
) -> Tile:
    check_hints(latency, allow_tma)
    array = require_array(array)
    shape = require_shape(shape, array.ndim, scalar_allowed=True)
    extents = shape or (1,) * array.ndim
    elements = Window(_permuted(array, order), index, extents, extents).read(padding_mode, check_bounds)
    return Tile.of(array.dtype, elements if shape else elements.reshape(()))


def store(
    array: Any,
    /,
    index: Any,
    tile: Any,
    *,
    order: Any = "C",
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
    memory_order: ct.MemoryOrder = ct.MemoryOrder.WEAK,
    memory_scope: ct.MemoryScope = ct.MemoryScope.NONE,
) -> None:
    check_hints(latency, allow_tma)
    array = require_array(array)
    tile = implicit_cast(tile, array.dtype, "stored tile is incompatible with the array's dtype")
    if tile.ndim not in (0, array.ndim):
        raise ct.TileTypeError(f"a tile of rank {tile.ndim} cannot be stored to an array of rank {array.ndim}")
    extents = tile.shape or (1,) * array.ndim
    window = Window(_permuted(array, order), index, extents, extents)
    window.write(tile.tensor if tile.ndim else tile.tensor.reshape(extents), check_bounds)


def num_tiles(array: Any, /, axis: Any, shape: Any, order: Any = "C") -> Tile:
    array = require_array(array)
    extents = require_shape(shape, array.ndim, scalar_allowed=True) or (1,) * array.ndim
    axis = normalize_axis(axis, array.ndim)
    return integer_scalar(-(-_permuted(array, order).shape[axis] // extents[axis]), ct.int32)
