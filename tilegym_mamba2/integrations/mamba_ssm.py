"""Code written for mamba_ssm on this package: with mamba_ssm installed (`enable`) or without it (`provide`)."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tilegym_mamba2 import registry
from tilegym_mamba2.integrations._substitution import Substitution, on_backend, undo_all
from tilegym_mamba2.ops.selective_state_update import selective_state_update
from tilegym_mamba2.scan import mamba_chunk_scan_combined

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
    "mamba_ssm.ops.triton.selective_state_update": selective_state_update,
}
_VERSION = "2.3.2"  # the release of mamba_ssm whose two functions these are

_active: list[Substitution] = []
_provided: dict[str, ModuleType] = {}


def enable(backend: str | None = None) -> Substitution:
    """Replaces mamba_ssm's mamba_chunk_scan_combined and selective_state_update by ours.

    They are replaced in their own modules and in every loaded module that has imported them, such as
    mamba_ssm.modules.mamba2. Two things stay mamba_ssm's: the fused training path of its layers
    (`use_mem_eff_path=True`, which never calls these functions), and whatever has kept one of the functions other
    than under a module's name. A backend without a backward refuses inputs that require grad.

    Args:
        backend: name of the backend that runs them; None chooses at each call, as `tilegym_mamba2.registry` says.

    Returns:
        What was replaced (`.names`). It is a context manager too: `with enable(): ...` restores at its end.

    Raises:
        ImportError: mamba_ssm can't be imported; `provide` serves code that needs only these functions.
        ValueError: there is no such backend.
    """
    _check(backend)
    replacements: dict[Callable[..., Any], Callable[..., Any]] = {}
    for name, ours in _FUNCTIONS.items():
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a build for another torch or CUDA fails in many ways
            raise ImportError(
                f"{name} can't be imported ({type(error).__name__}: {error}); without mamba_ssm use "
                "tilegym_mamba2.integrations.mamba_ssm.provide()"
            ) from error
        replacements[getattr(module, ours.__name__)] = on_backend(ours, backend)
    return Substitution(replacements, _active)


def disable() -> list[str]:
    """Puts back, exactly, what every `enable` replaced; returns the names."""
    return undo_all(_active)


def provide(backend: str | None = None) -> list[str]:
    """Makes `from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined` work without mamba_ssm.

    Installs stand-in modules, which have this function, `selective_state_update` at its place, and nothing else.

    Args:
        backend: as in `enable`.

    Returns:
        The stand-in modules' names; `withdraw` removes them.

    Raises:
        ImportError: there is a real mamba_ssm, which is never hidden: `enable` replaces its functions.
        ValueError: there is no such backend.
    """
    _check(backend)
    withdraw()
    if importlib.util.find_spec("mamba_ssm") is not None:
        raise ImportError(
            "mamba_ssm is installed and is not hidden: tilegym_mamba2.integrations.mamba_ssm.enable() replaces its "
            "functions"
        )
    for name, ours in _FUNCTIONS.items():
        setattr(_stand_in(name), ours.__name__, on_backend(ours, backend))
    return list(_provided)


def withdraw() -> list[str]:
    """Removes the stand-in modules; returns their names. What was imported from them keeps working."""
    names = [name for name, module in _provided.items() if sys.modules.get(name) is module]
    for name in names:
        del sys.modules[name]
    _provided.clear()
    return names


def _check(backend: str | None) -> None:
    if backend is not None:
        registry.has_implementation("mamba_chunk_scan", backend)


def _stand_in(name: str) -> ModuleType:
    """The stand-in module of this name, made with its parents if need be."""
    if name in _provided:
        return _provided[name]
    parent, _, child = name.rpartition(".")
    outer = _stand_in(parent) if parent else None
    module = ModuleType(name, f"{__name__}.provide() made this in place of mamba_ssm's module.")
    is_package = name not in _FUNCTIONS
    module.__spec__ = importlib.util.spec_from_loader(name, loader=None, is_package=is_package)
    if is_package:
        module.__path__ = []
    if outer is None:
        vars(module)["__version__"] = _VERSION
    else:
        setattr(outer, child, module)
    _provided[name] = sys.modules[name] = module
    return module
