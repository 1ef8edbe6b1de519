"""Errors against the oracle, and how large they may be."""

import torch
from torch import Tensor

INFINITY = float("inf")


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| where want is finite; infinite if got is not finite somewhere there.

    Raises ValueError if the shapes differ.
    """
    finite, difference = _difference(got, want)
    if not bool(difference.isfinite().all()):
        return INFINITY
    norm = float(torch.linalg.vector_norm(torch.where(finite, want.double(), 0)))
    error = float(torch.linalg.vector_norm(difference))
    return error / norm if norm > 0 else (0.0 if error == 0 else INFINITY)


def elementwise_error(got: Tensor, want: Tensor) -> float:
    """The largest |got - want| / |want| where want is finite; where want is 0, got must be."""
    _, difference = _difference(got, want)
    if not bool(difference.isfinite().all()):
        return INFINITY
    ratio = difference.abs() / want.double().abs().nan_to_num(1.0, 1.0)
    return float(ratio.nan_to_num(0.0, INFINITY).max()) if ratio.numel() else 0.0


def _difference(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    if got.shape != want.shape:
        raise ValueError(f"got shape {tuple(got.shape)}, want {tuple(want.shape)}")
    finite = want.isfinite()
    return finite, torch.where(finite, got.double() - want.double(), 0)


def budget(*dtypes: torch.dtype) -> float:
    """The largest relative error of out and final_states for inputs of these dtypes.

    For float32 it follows `torch.get_float32_matmul_precision()`.
    """
    float32 = 5e-6 if torch.get_float32_matmul_precision() == "highest" else 1.5e-3
    table = {torch.float64: 1e-10, torch.float32: float32, torch.float16: 6e-4, torch.bfloat16: 2.5e-3}
    return max(table[dtype] for dtype in dtypes)
