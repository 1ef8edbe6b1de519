"""Where results get their memory from, in both launch paths."""

from typing import Any

import pytest
import torch

from tilegym_mamba2.backends import _memory


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_results_can_be_made_where_torch_has_no_fast_way(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    """torch's own function is private and may go; what takes its place is called alike."""
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda", raising=False)
    asked: list[Any] = []
    empty_strided = torch.empty_strided

    def on_cpu(*arguments: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        asked.append(device)
        return empty_strided(*arguments, dtype=dtype)

    monkeypatch.setattr(torch, "empty_strided", on_cpu)
    device = torch.device(device_type)
    _memory.empty_on.cache_clear()
    try:
        made = _memory.empty_on(device)((2, 3, 4), _memory.contiguous((2, 3, 4)), torch.bfloat16)
    finally:
        _memory.empty_on.cache_clear()
    assert (made.shape, made.is_contiguous(), made.dtype) == ((2, 3, 4), True, torch.bfloat16)
    assert asked == [device]
