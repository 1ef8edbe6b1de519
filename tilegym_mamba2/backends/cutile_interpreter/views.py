"""Views of an array: cut into tiles of one shape, or as raw memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from .arrays import Array, Window, broadcast_tensor, check_hints, num_tiles
from .elements import UPDATES, atomic_cas, atomic_operand, atomic_update, gather, scatter
from .tiles import Tile, implicit_cast, require_shape


class TiledView:
    """An array cut into tiles of one shape, which may overlap or leave gaps."""

    def __init__(self, array: Array, tile_shape: Any, padding_mode: ct.PaddingMode, traversal_steps: Any):
        self.array = array
        self.dtype = array.dtype
        self.tile_shape = require_shape(tile_shape, array.ndim, scalar_allowed=True)
        self.padding_mode = padding_mode
        self._extents = self.tile_shape or (1,) * array.ndim
        if traversal_steps is None:
            self.traversal_steps = self._extents
        else:
            steps = traversal_steps if isinstance(traversal_steps, tuple) else (traversal_steps,)
            if len(steps) != array.ndim or any(type(step) is not int or step <= 0 for step in steps):
                raise ct.TileTypeError(f"traversal_steps must be {array.ndim} positive constants, got {steps}")
            self.traversal_steps = steps

    def num_tiles(self, axis: Any) -> Tile:
        if self.traversal_steps != self._extents:
            raise NotImplementedError("TiledView.num_tiles with traversal_steps is not interpreted")
        return num_tiles(self.array, axis, self._extents)

    def load(
        self, index: Any, *, check_bounds: bool = True, latency: int | None = None, allow_tma: bool | None = None
    ) -> Tile:
        check_hints(latency, allow_tma)
        window = Window(self.array.tensor, index, self._extents, self.traversal_steps)
        return Tile.of(self.dtype, window.read(self.padding_mode, check_bounds).reshape(self.tile_shape))

    def store(
        self,
        index: Any,
        tile: Any,
        *,
        check_bounds: bool = True,
        latency: int | None = None,
        allow_tma: bool | None = None,
    ) -> None:
        check_hints(latency, allow_tma)
        window = Window(self.array.tensor, index, self._extents, self.traversal_steps)
        source = implicit_cast(tile, self.dtype, "stored tile is incompatible with the tiled view's dtype")
        window.write(broadcast_tensor(source, self._extents, "tile"), check_bounds)

    def _update(self, name: str, index: Any, update: Any) -> None:
        operand = atomic_operand(name, update, self.dtype)
        window = Window(self.array.tensor, index, self._extents, self.traversal_steps)
        window.update(UPDATES[name], broadcast_tensor(operand, self._extents, "update"))

    def atomic_store_add(self, index: Any, update: Any, /) -> None:
        self._update("add", index, update)

    def atomic_store_max(self, index: Any, update: Any, /) -> None:
        self._update("max", index, update)

    def atomic_store_min(self, index: Any, update: Any, /) -> None:
        self._update("min", index, update)

    def atomic_store_and(self, index: Any, update: Any, /) -> None:
        self._update("and", index, update)

    def atomic_store_or(self, index: Any, update: Any, /) -> None:
        self._update("or", index, update)

    def atomic_store_xor(self, index: Any, update: Any, /) -> None:
        self._update("xor", index, update)


class RawMemory:
    """Reads and writes at element offsets from an array's first element, inside the tensor's storage."""

    def __init__(self, array: Array):
        tensor = array.tensor
        elements = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        self.dtype = array.dtype
        self._flat = Array(tensor.as_strided((elements,), (1,), tensor.storage_offset()), ct.int64)

    def load_offset(
        self, offset: Any, /, *, mask: Any = None, padding_value: Any = 0, latency: int | None = None
    ) -> Tile:
        padding_value = 0 if padding_value is None else padding_value
        return gather(self._flat, offset, mask=mask, padding_value=padding_value, check_bounds=False, latency=latency)

    def store_offset(self, offset: Any, value: Any, /, *, mask: Any = None, latency: int | None = None) -> None:
        scatter(self._flat, offset, value, mask=mask, check_bounds=False, latency=latency)

    def atomic_cas_offset(self, offset: Any, expected: Any, desired: Any, /, *, mask: Any = None, **order: Any) -> Tile:
        return atomic_cas(self._flat, offset, expected, desired, check_bounds=False, mask=mask)

    def __getattr__(self, name: str) -> Callable[..., Tile]:
        operation = name.removeprefix("atomic_").removesuffix("_offset")
        if name != f"atomic_{operation}_offset" or operation not in UPDATES:
            raise AttributeError(f"RawArrayMemory has no attribute {name!r}")

        def atomic(offset: Any, update: Any, /, *, mask: Any = None, **order: Any) -> Tile:
            return atomic_update(operation, self._flat, offset, update, check_bounds=False, mask=mask)

        return atomic
