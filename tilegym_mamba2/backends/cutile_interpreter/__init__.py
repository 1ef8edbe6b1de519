"""Runs the source of a cuTile kernel on CPU tensors, block by block, on torch.

`launch` takes what `ct.launch` takes, without the stream. Outside a compilation cuda-tile sends a call of a tile
function to the current dispatch mode, and the mode here answers it: tiles are thin wrappers over torch tensors, scalars
are Python integers, and the kernel's control flow is Python's own.

Kept as cuTile has it: dtype promotion and the rejection of implicit narrowing, constant tile shapes of powers of two,
tile-space addressing, padding modes, dropped stores, float32 accumulation of 16-bit products, reductions in the tile's
own dtype, tfloat32 rounding, NaN handling of minima and maxima, the int32 of shapes and indices.

Raised, where a GPU would go on with garbage:

- IndexError: a load that reads outside an array without a padding mode; a tile that lies entirely outside (undefined
  even with a padding mode, and for stores too); check_bounds=False outside; a slice outside.
- OverflowError: signed integers that leave their dtype, where the GPU wraps. Unsigned ones wrap.
- NotImplementedError: a tile function that is not interpreted, by name; directed rounding modes.

Not modelled: concurrency of blocks (they run one after another in a shuffled order), memory orders and scopes, the
order of additions inside a reduction or a product, fused multiply-adds, flush_to_zero, approximate functions, 4-bit and
8-bit scale dtypes, the compiler's restrictions on Python syntax and on branches of different types. Values that Python
computes by itself, such as the counter of `range` or a carried variable that starts as a number, promote as untyped
constants, where the compiler gives them int32 or float32; they may also stand where the compiler demands a constant,
and they do not overflow. Tiles of 64-bit integers wrap. The builtins `min` and `max` work on scalars only, dtypes are
not constructors.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import cuda.tile as ct
import torch

from .arrays import Array
from .functions import FUNCTIONS
from .internals import DispatchMode, is_stub, kernel_function, parameter_annotations
from .tiles import Tile, convert, integer_scalar

__all__ = ["launch"]

_MAX_GRID = (2**31 - 1, 65535, 65535)


def launch(grid: Sequence[int], kernel: Any, args: Sequence[Any], *, shuffle_seed: int | None = 0) -> None:
    """Run a cuTile kernel over a grid on CPU tensors.

    Args:
        grid: one to three block counts, as for `ct.launch`.
        kernel: a `@ct.kernel`, or what its `replace_hints` returns.
        args: the kernel's arguments: CPU tensors, Python scalars, tuples and lists of them, and any Python value for a
            `ct.Constant` parameter. Tensors are written in place.
        shuffle_seed: the seed of the order in which blocks run; None runs them in row-major order.
    """
    extents = (*grid, 1, 1)[: max(3, len(grid))]
    if len(extents) != 3 or not all(0 < n <= limit for n, limit in zip(extents, _MAX_GRID, strict=True)):
        raise ValueError(f"a grid has one to three block counts from 1 to {_MAX_GRID}, got {tuple(grid)}")
    annotations = parameter_annotations(kernel)
    if len(annotations) != len(args):
        raise TypeError(f"the kernel takes {len(annotations)} arguments, got {len(args)}")
    values = [_argument(value, annotations[position], position) for position, value in enumerate(args)]
    blocks = list(itertools.product(*(range(n) for n in extents)))
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(blocks)
    function, mode = kernel_function(kernel), _Interpreter(extents)
    precision = torch.get_float32_matmul_precision()
    # A lower precision would let torch round the float32 products that cuTile keeps.
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), mode.as_current():
            for block in blocks:
                mode.block = block
                function(*values)
    finally:
        torch.set_float32_matmul_precision(precision)


class _Interpreter(DispatchMode):
    """Answers the tile functions that a kernel calls."""

    def __init__(self, grid: tuple[int, ...]):
        self.block: tuple[int, ...] = (0, 0, 0)
        self._grid = grid
        self._implementations: dict[Any, Callable[..., Any]] = {}
        self._functions = {**FUNCTIONS, "bid": self._bid, "num_blocks": self._num_blocks}

    def call_tile_function_from_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        implementation = self._implementations.get(func)
        if implementation is None:
            implementation = self._implementations[func] = self._find(func)
        return implementation(*args, **kwargs)

    def _find(self, func: Any) -> Callable[..., Any]:
        # A `@ct.function` of the kernel's author is Python to run; only cuTile's own functions are answered here.
        if not is_stub(func):
            return func.__wrapped__
        try:
            return self._functions[func.__qualname__]
        except KeyError:
            raise NotImplementedError(f"the cuTile interpreter has no tile function {func.__qualname__!r}") from None

    def _bid(self, axis: int) -> Tile:
        return Tile(ct.int32, None, self.block[_grid_axis(axis)])

    def _num_blocks(self, axis: int) -> Tile:
        return Tile(ct.int32, None, self._grid[_grid_axis(axis)])


def _grid_axis(axis: object) -> int:
    if type(axis) is not int or axis not in (0, 1, 2):
        raise ct.TileTypeError(f"the axis of a grid is the constant 0, 1 or 2, got {axis!r}")
    return axis


def _argument(value: Any, node: Any, position: int) -> Any:
    """A kernel argument as the kernel sees it, by the parameter's annotation."""
    if node.KIND != "leaf":
        items = [node.each] * len(value) if node.KIND == "homogeneous_tuple" else node.items
        return tuple(_argument(item, inner, position) for item, inner in zip(value, items, strict=True))
    if node.constant:
        return value
    if isinstance(value, torch.Tensor):
        return _array(value, node.array, position)
    if isinstance(value, tuple):
        return tuple(_argument(item, node, position) for item in value)
    if isinstance(value, list):
        element = None if node.list is None else node.list.element
        return [_array(item, element, position) for item in value]
    if isinstance(value, bool):
        return Tile(ct.bool_, None, value)
    if isinstance(value, int):
        return integer_scalar(value, ct.int32 if node.scalar is None else node.scalar.dtype)
    if isinstance(value, float):
        return convert(value, ct.float32)
    raise TypeError(f"argument {position} of the kernel is a {type(value).__name__}; mark its parameter ct.Constant")


def _array(tensor: torch.Tensor, annotation: Any, position: int) -> Array:
    if tensor.device.type != "cpu":
        raise ValueError(f"argument {position} is on {tensor.device}; the cuTile interpreter takes CPU tensors")
    if annotation is None:
        return Array(tensor)
    return Array(tensor, annotation.index_dtype, annotation.static_shape_dims, annotation.static_stride_dims)
