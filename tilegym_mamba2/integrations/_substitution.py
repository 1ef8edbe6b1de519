"""Functions of other packages replaced by ours wherever they are known by name, and put back exactly."""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import Any

_logger = logging.getLogger("tilegym_mamba2")


def on_backend(function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    """A function with the signature of `function` less its `backend`, which is fixed (None: chosen at each call)."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, backend=backend, **kwargs)

    signature = inspect.signature(function)
    parameters = [parameter for name, parameter in signature.parameters.items() if name != "backend"]
    call.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return call


class Substitution:
    """Functions replaced in every loaded module, until `undo` or the end of its `with` block.

    Modules loaded later import the replacement from where the function lives. `undo` puts the function back there
    too.

    Attributes:
        names: what was replaced, as "module.name".
    """

    def __init__(self, replacements: Mapping[Callable[..., Any], Callable[..., Any]], active: list["Substitution"]):
        self._originals = {replacement: function for function, replacement in replacements.items()}
        self._active = active
        self.names = _exchange(replacements)
        _logger.info("replaced %s", ", ".join(self.names))
        active.append(self)

    def undo(self) -> None:
        """Puts the functions back, and those of substitutions made since on top of this one. Once is enough."""
        while self in self._active:
            _exchange(self._active.pop()._originals)

    def __enter__(self) -> "Substitution":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def undo_all(active: list[Substitution]) -> list[str]:
    """Undoes them, the last first; returns the names that are as they were."""
    names = list(dict.fromkeys(name for substitution in active for name in substitution.names))
    if active:
        active[0].undo()
    return names


def _exchange(new_of: Mapping[Callable[..., Any], Callable[..., Any]]) -> list[str]:
    by_id = {id(old): new for old, new in new_of.items()}
    names: list[str] = []
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):  # pyright: ignore[reportUnnecessaryIsInstance]
            continue
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])
                names.append(f"{module.__name__}.{name}")
    return sorted(names)
