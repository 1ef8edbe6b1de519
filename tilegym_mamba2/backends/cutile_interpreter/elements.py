"""Reads, writes and atomic updates of the elements that index tiles select."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import cuda.tile as ct
import torch

from .arrays import broadcast_tensor, check_hints, index_value, padding_value, require_array
from .internals import is_boolean, is_integral
from .tiles import Tile, convert, implicit_cast, require_shape, require_tile

_ATOMIC_INTEGERS = (ct.int32, ct.int64, ct.uint32, ct.uint64)
_ATOMIC_WORDS = (*_ATOMIC_INTEGERS, ct.float32, ct.float64)
_ATOMIC_DTYPES: dict[str, tuple[ct.DType, ...]] = {
    "xchg": _ATOMIC_WORDS,
    "cas": _ATOMIC_WORDS,
    "add": (*_ATOMIC_WORDS, ct.float16, ct.bfloat16),
    "max": _ATOMIC_INTEGERS,
    "min": _ATOMIC_INTEGERS,
    "and": _ATOMIC_INTEGERS,
    "or": _ATOMIC_INTEGERS,
    "xor": _ATOMIC_INTEGERS,
}
UPDATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "xchg": lambda old, update: update,
    "add": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}


class _Elements:
    """The elements that index tiles select: flat positions, their common shape, and which of them take part."""

    def __init__(self, array: Any, indices: Any, check_bounds: bool, mask: Any):
        self.array = require_array(array)
        tensor = self.array.tensor
        items = indices if isinstance(indices, tuple) else (indices,)
        if len(items) != tensor.ndim:
            raise ct.TileTypeError(f"an array of rank {tensor.ndim} needs {tensor.ndim} indices, got {len(items)}")
        tiles = [require_tile(item, "an index") for item in items]
        for tile in tiles:
            if not is_integral(tile.dtype):
                raise ct.TileTypeError(f"an index must be an integer, got {tile.dtype}")
        try:
            self.shape = tuple(torch.broadcast_shapes(*(tile.shape for tile in tiles)))
        except RuntimeError:
            raise ct.TileTypeError(f"index shapes {[t.shape for t in tiles]} are not broadcastable") from None
        positions = [tile.tensor.to(torch.int64).expand(self.shape).reshape(-1) for tile in tiles]
        active = torch.ones(math.prod(self.shape), dtype=torch.bool)
        if mask is not None:
            mask = require_tile(mask, "a mask")
            if not is_boolean(mask.dtype):
                raise ct.TileTypeError(f"a mask must be boolean, got {mask.dtype}")
            active = broadcast_tensor(mask, self.shape, "mask").reshape(-1)
        inside = torch.ones_like(active)
        for position, size in zip(positions, tensor.shape, strict=True):
            inside &= (position >= 0) & (position < size)
        if not check_bounds and bool((active & ~inside).any()):
            raise IndexError(
                f"indices outside an array of shape {tuple(tensor.shape)} with check_bounds=False: "
                f"{[position[active & ~inside][0].item() for position in positions]}"
            )
        self.active = active & inside
        self.positions = tuple(position[self.active] for position in positions)

    def select(self, x: Tile, what: str) -> torch.Tensor:
        """The elements of x, broadcast to the common shape, that take part."""
        return broadcast_tensor(x, self.shape, what).reshape(-1)[self.active]

    def result(self, elements: torch.Tensor, otherwise: Tile) -> Tile:
        """A tile of the elements that take part, and of `otherwise` for the rest."""
        flat = broadcast_tensor(otherwise, self.shape, "padding").reshape(-1).clone()
        flat[self.active] = elements
        return Tile.of(self.array.dtype, flat.reshape(self.shape))


def gather(
    array: Any,
    indices: Any,
    /,
    *,
    mask: Any = None,
    padding_value: Any = 0,
    check_bounds: bool = True,
    latency: int | None = None,
) -> Tile:
    check_hints(latency)
    elements = _Elements(array, indices, check_bounds, mask)
    padding = implicit_cast(padding_value, elements.array.dtype, "invalid padding value")
    return elements.result(elements.array.tensor[elements.positions], padding)


def scatter(
    array: Any,
    indices: Any,
    value: Any,
    /,
    *,
    mask: Any = None,
    check_bounds: bool = True,
    latency: int | None = None,
) -> None:
    check_hints(latency)
    elements = _Elements(array, indices, check_bounds, mask)
    value = implicit_cast(value, elements.array.dtype, "stored value is incompatible with the array's dtype")
    elements.array.tensor[elements.positions] = elements.select(value, "value")


class _Cross:
    """The part of an array under a tile that takes listed positions along one axis and ranges along the others."""

    def __init__(self, array: Any, indices: Any):
        array = require_array(array)
        if array.ndim < 2:
            raise ct.TileTypeError("advanced indexing requires an array of rank 2 or more; use ct.gather or ct.scatter")
        if not isinstance(indices, tuple) or len(indices) != array.ndim:
            raise ct.TileTypeError(f"advanced indexing of an array of rank {array.ndim} takes a tuple of {array.ndim}")
        if sum(isinstance(item, Tile) for item in indices) != 1:
            raise ct.TileTypeError("advanced indexing takes one 1-D integer tile, and ct.Slice for the other axes")
        positions = [self._positions(item) for item in indices]
        inside = [
            (position >= 0) & (position < size) for position, size in zip(positions, array.tensor.shape, strict=True)
        ]
        self.array = array
        self.shape = tuple(len(position) for position in positions)
        self.whole = all(bool(mask.all()) for mask in inside)
        self.tile_part = torch.meshgrid(*(mask.nonzero()[:, 0] for mask in inside), indexing="ij")
        kept = [position[mask] for position, mask in zip(positions, inside, strict=True)]
        self.array_part = torch.meshgrid(*kept, indexing="ij")

    @staticmethod
    def _positions(item: Any) -> torch.Tensor:
        if isinstance(item, Tile) and item.ndim == 1 and is_integral(item.dtype):
            return item.tensor.to(torch.int64)
        if isinstance(item, ct.Slice):
            start, length = vars(item)["start"], vars(item)["length"]
            return torch.arange(*require_shape(length)) + index_value(start)
        raise ct.TileTypeError(f"advanced indexing takes a 1-D integer tile or a ct.Slice, got {item!r}")


def load_advanced_indexing(
    array: Any,
    indices: Any,
    /,
    *,
    padding_mode: ct.PaddingMode = ct.PaddingMode.UNDETERMINED,
    latency: int | None = None,
    allow_tma: bool | None = None,
) -> Tile:
    check_hints(latency, allow_tma)
    cross = _Cross(array, indices)
    where = f"a tile of shape {cross.shape} of an array of shape {tuple(cross.array.tensor.shape)}"
    padded = torch.empty(cross.shape, dtype=cross.array.tensor.dtype)
    if not cross.whole:
        padded.fill_(padding_value(padding_mode, padded.dtype, where))
    padded[cross.tile_part] = cross.array.tensor[cross.array_part]
    return Tile.of(cross.array.dtype, padded)


def store_advanced_indexing(
    array: Any, indices: Any, tile: Any, /, *, latency: int | None = None, allow_tma: bool | None = None
) -> None:
    check_hints(latency, allow_tma)
    cross = _Cross(array, indices)
    if not isinstance(tile, Tile) or tile.shape != cross.shape:
        raise ct.TileTypeError(f"the indices imply a tile of shape {cross.shape}, got {tile!r}")
    tile = implicit_cast(tile, cross.array.dtype, "stored tile is incompatible with the array's dtype")
    cross.array.tensor[cross.array_part] = tile.tensor[cross.tile_part]


def atomic_operand(name: str, update: Any, dtype: ct.DType) -> Tile:
    """The update as a tile of the array's dtype, if cuTile has this operation for it."""
    if dtype not in _ATOMIC_DTYPES[name]:
        raise ct.TileTypeError(f"atomic {name} does not support arrays of {dtype}")
    if name in ("and", "or", "xor"):
        update = require_tile(update, "an update")
        if update.dtype != dtype:
            raise ct.TileTypeError(f"atomic {name} of {dtype} needs an update of the same dtype, got {update.dtype}")
        return update
    return implicit_cast(update, dtype, "update is incompatible with the array's dtype")


def _read_modify_write(
    elements: _Elements, otherwise: Tile, function: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor]
) -> Tile:
    tensor, positions = elements.array.tensor, elements.positions
    count = len(positions[0]) if positions else 0
    if count < 2 or torch.unique(torch.stack(positions), dim=1).shape[1] == count:
        old = tensor[positions]
        tensor[positions] = function(old, *operands)
        return elements.result(old, otherwise)
    # One element at a time where an element is updated twice.
    old = torch.empty(count, dtype=tensor.dtype)
    for k in range(count):
        place = tuple(position[k] for position in positions)
        old[k] = tensor[place]
        tensor[place] = function(tensor[place].clone(), *(operand[k] for operand in operands))
    return elements.result(old, otherwise)


def atomic_update(
    name: str, array: Any, indices: Any, update: Any, /, *, check_bounds: bool = True, mask: Any = None, **order: Any
) -> Tile:
    """A read-modify-write of single elements, which returns what was there."""
    operand = atomic_operand(name, update, require_array(array).dtype)
    elements = _Elements(array, indices, check_bounds, mask)
    zero = convert(0, operand.dtype)
    return _read_modify_write(elements, zero, UPDATES[name], [elements.select(operand, "update")])


def atomic_cas(
    array: Any,
    indices: Any,
    expected: Any,
    desired: Any,
    /,
    *,
    check_bounds: bool = True,
    mask: Any = None,
    **order: Any,
) -> Tile:
    dtype = require_array(array).dtype
    expected, desired = atomic_operand("cas", expected, dtype), atomic_operand("cas", desired, dtype)
    elements = _Elements(array, indices, check_bounds, mask)
    operands = [elements.select(expected, "expected value"), elements.select(desired, "desired value")]
    return _read_modify_write(
        elements, expected, lambda old, wanted, new: torch.where(old == wanted, new, old), operands
    )
