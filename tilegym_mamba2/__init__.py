"""The Mamba-2 (SSD) forward pass on cuTile, Triton and plain torch, any of them chosen by name."""

from tilegym_mamba2._version import __version__
from tilegym_mamba2.ops.chunk_cumsum import chunk_cumsum
from tilegym_mamba2.ops.compute_out import compute_out
from tilegym_mamba2.ops.fwd_pass_state import fwd_pass_state
from tilegym_mamba2.ops.selective_state_update import selective_state_update
from tilegym_mamba2.registry import (
    BackendUnavailableError,
    available_backends,
    explain_backends,
    set_backend,
    use_backend,
)
from tilegym_mamba2.scan import mamba_chunk_scan_combined

__all__ = [
    "BackendUnavailableError",
    "__version__",
    "available_backends",
    "chunk_cumsum",
    "compute_out",
    "explain_backends",
    "fwd_pass_state",
    "mamba_chunk_scan_combined",
    "selective_state_update",
    "set_backend",
    "use_backend",
]
