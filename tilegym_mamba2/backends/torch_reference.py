"""The backend that defines what is right: plain torch, on any device, differentiable."""

from tilegym_mamba2.registry import Backend, register_backend

register_backend(
    Backend(name="torch-reference", why_unavailable=lambda device: None, priority={"*": 0}, module="reference")
)
