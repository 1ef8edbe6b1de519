"""Memory for results, taken with little host time: both launch paths ask for it in every call."""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, cast

import torch

_torch: Any = cast(Any, torch)._C


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1]


@functools.cache
def empty_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """A function of shape, strides and dtype, to be called where `device` is the current one of its type."""
    # torch.empty takes three times as long, all of it in finding this function.
    fast = getattr(_torch._dynamo.guards, "_empty_strided_cuda", None) if device.type == "cuda" else None
    return functools.partial(_empty_strided, device) if fast is None else fast


def _empty_strided(
    device: torch.device, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
