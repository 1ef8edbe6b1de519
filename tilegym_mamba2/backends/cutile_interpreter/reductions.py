"""Reductions and scans, in the tile's own dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import cuda.tile as ct
import torch

from .internals import is_boolean, is_float
from .operators import arithmetic, check_rounding
from .tiles import Tile, convert, narrow_integers, normalize_axis, require_tile

_NARROW_FLOATS = (ct.float16, ct.bfloat16)


def _reduction_axes(x: Tile, axis: Any) -> list[int]:
    if axis is None:
        return list(range(x.ndim))
    axes = axis if isinstance(axis, tuple) else (axis,)
    normalized = sorted(normalize_axis(item, x.ndim) for item in axes)
    if len(set(normalized)) != len(normalized):
        raise ct.TileTypeError(f"the reduction axes {axes} repeat")
    return normalized


def _halves(tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = tensor.shape[axis] // 2
    return tensor.narrow(axis, 0, half), tensor.narrow(axis, half, half)


def reduction(name: str) -> Callable[..., Tile]:
    def function(
        x: Any,
        /,
        axis: Any = None,
        *,
        keepdims: bool = False,
        rounding_mode: ct.RoundingMode | None = None,
        flush_to_zero: bool = False,
        propagate_nan: bool = False,
    ) -> Tile:
        x = require_tile(x, "an operand")
        if is_boolean(x.dtype):
            x = convert(x, ct.int32)
        check_rounding(x.dtype, rounding_mode, flush_to_zero)
        tensor, dtype = x.tensor, x.dtype
        for reduced in _reduction_axes(x, axis):
            # A tree of pairs in the tile's own dtype, as on the GPU: a bfloat16 sum rounds at every level.
            while tensor.shape[reduced] > 1:
                left, right = (Tile.of(dtype, half) for half in _halves(tensor, reduced))
                tensor = arithmetic(name, left, right, propagate_nan).tensor
        if not keepdims:
            kept = [size for i, size in enumerate(x.shape) if i not in _reduction_axes(x, axis)]
            tensor = tensor.reshape(kept)
        return Tile.of(dtype, tensor)

    return function


def arg_reduction(on_tensor: Callable[..., torch.Tensor], worst: float) -> Callable[..., Tile]:
    def function(x: Any, /, axis: Any = None, *, keepdims: bool = False, propagate_nan: bool = False) -> Tile:
        x = require_tile(x, "an operand")
        tensor = x.tensor if is_float(x.dtype) else x.tensor.to(torch.int64)
        if is_float(x.dtype) and not propagate_nan:
            tensor = torch.where(torch.isnan(tensor), worst, tensor)
        if axis is None:
            index = on_tensor(tensor.reshape(-1), dim=0)
            index = index.reshape((1,) * x.ndim) if keepdims else index
        else:
            index = on_tensor(tensor, dim=normalize_axis(axis, x.ndim), keepdim=keepdims)
        return Tile.of(ct.int32, index.to(torch.int32))

    return function


def _operand_tiles(x: Any) -> tuple[list[Tile], tuple[int, ...]]:
    items = [require_tile(item, "an operand") for item in (x if isinstance(x, tuple) else (x,))]
    shape = tuple(torch.broadcast_shapes(*(item.shape for item in items)))
    return [Tile.of(item.dtype, item.tensor.expand(shape)) for item in items], shape


def _combine(func: Callable[..., Any], left: list[Tile], right: list[Tile]) -> list[Tile]:
    """The combining function on whole tiles at once: it may not branch, so it acts on every element alike."""
    result = func(*left, *right)
    results = result if isinstance(result, tuple) else (result,)
    return [convert(item, source.dtype) for item, source in zip(results, left, strict=True)]


def reduce(x: Any, /, axis: Any, func: Callable[..., Any], identity: Any, *, keepdims: bool = False) -> Any:
    items, shape = _operand_tiles(x)
    axis = normalize_axis(axis, len(shape))
    while items[0].shape[axis] > 1:
        pairs = [(item.dtype, *_halves(item.tensor, axis)) for item in items]
        left, right = [Tile(dtype, half) for dtype, half, _ in pairs], [Tile(dtype, half) for dtype, _, half in pairs]
        items = _combine(func, left, right)
    results = tuple(item if keepdims else Tile.of(item.dtype, item.tensor.squeeze(axis)) for item in items)
    return results if isinstance(x, tuple) else results[0]


def scan(x: Any, /, axis: Any, func: Callable[..., Any], identity: Any, *, reverse: bool = False) -> Any:
    items, shape = _operand_tiles(x)
    axis = normalize_axis(axis, len(shape))

    def typed(tensors: list[torch.Tensor]) -> Iterator[tuple[Tile, torch.Tensor]]:
        return zip(items, tensors, strict=True)

    tensors = [item.tensor.flip(axis) if reverse else item.tensor for item in items]
    size, distance = shape[axis], 1
    while distance < size:
        left = [Tile(item.dtype, tensor.narrow(axis, 0, size - distance)) for item, tensor in typed(tensors)]
        right = [Tile(item.dtype, tensor.narrow(axis, distance, size - distance)) for item, tensor in typed(tensors)]
        combined = [item.tensor for item in _combine(func, left, right)]
        heads = [tensor.narrow(axis, 0, distance) for tensor in tensors]
        tensors = [torch.cat(pair, axis) for pair in zip(heads, combined, strict=True)]
        distance *= 2
    results = tuple(Tile(item.dtype, tensor.flip(axis) if reverse else tensor) for item, tensor in typed(tensors))
    return results if isinstance(x, tuple) else results[0]


def cumulative(name: str, on_tensor: Callable[..., torch.Tensor]) -> Callable[..., Tile]:
    def function(
        x: Any,
        /,
        axis: Any = 0,
        *,
        reverse: bool = False,
        rounding_mode: ct.RoundingMode | None = None,
        flush_to_zero: bool = False,
    ) -> Tile:
        x = require_tile(x, "an operand")
        if is_boolean(x.dtype):
            x = convert(x, ct.int32)
        check_rounding(x.dtype, rounding_mode, flush_to_zero)
        if x.dtype in _NARROW_FLOATS:
            return scan(x, axis, functools.partial(arithmetic, name), 0, reverse=reverse)
        axis = normalize_axis(axis, x.ndim)
        tensor = x.tensor if is_float(x.dtype) else x.tensor.to(torch.int64)
        result = on_tensor(tensor.flip(axis), axis).flip(axis) if reverse else on_tensor(tensor, axis)
        return Tile(x.dtype, result if is_float(x.dtype) else narrow_integers(result, x.dtype))

    return function
