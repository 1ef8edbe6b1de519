"""Ops, backends, and which backend runs a call.

A backend registers itself with `register_backend`; a function that computes an op on it registers with
`@register(op, backend)`. Nothing is imported before it is needed: a built-in implementation lives in
`tilegym_mamba2/ops/<op>/<backend.module>.py` and is imported at the op's first use on that backend; third
parties name a module in the entry-point group `tilegym_mamba2.backends`, whose import registers everything.

A call's backend is the first that is given of: its `backend=` argument, the innermost `use_backend`,
`set_backend`, the environment variable TILEGYM_MAMBA2_BACKEND, and the automatic choice. Only the automatic
choice looks for another backend when one can't do the call; a backend that was named runs or raises.
"""

import difflib
import gc
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pkgutil
import threading
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

ENVIRONMENT_VARIABLE = "TILEGYM_MAMBA2_BACKEND"
ENTRY_POINT_GROUP = "tilegym_mamba2.backends"

_PACKAGE = __name__.rpartition(".")[0]
_Function = TypeVar("_Function", bound=Callable[..., Any])


class BackendUnavailableError(RuntimeError):
    """A backend was named that can't run here; the message says why and what mends it."""


class Problem(Protocol):
    """What the registry needs to know of a validated call."""

    @property
    def device(self) -> torch.device: ...
    @property
    def differentiated_argument(self) -> str | None:
        """Name of an argument that autograd would have to differentiate, or None."""
        ...


@dataclass(frozen=True)
class Backend:
    """One way of running ops.

    Attributes:
        name: what callers select it by.
        why_unavailable: maps a device to None if the backend can run on tensors of that device here, else to
            the reason and the command or setting that mends it. It compiles nothing.
        priority: for the automatic choice, by device type ("*" for any); the highest runs. A device type that
            is not listed is never chosen automatically.
        module: file name of its implementations in each op's package, or None if all are registered already.
    """

    name: str
    why_unavailable: Callable[[torch.device], str | None]
    priority: Mapping[str, int] = field(default_factory=dict[str, int])
    module: str | None = None

    def priority_on(self, device: torch.device) -> int:
        return self.priority.get(device.type, self.priority.get("*", -1))

    def reason(self, device: torch.device) -> str | None:
        """What `why_unavailable` says; that it failed, if it does, so that the other backends still work."""
        try:
            return self.why_unavailable(device)
        except Exception as error:
            return f"its why_unavailable failed: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class Implementation:
    """A function that computes `op` on `backend`, called with all of the op's arguments by position.

    `supports` maps a problem to None, or to the reason (argument and limit) why it can't be computed;
    `differentiable` says that autograd can go through it.
    """

    op: str
    backend: str
    function: Callable[..., Any]
    supports: Callable[[Any], str | None] | None
    differentiable: bool
    place: str

    def why_not(self, problem: Problem) -> str | None:
        """None if it can do this problem, else the reason."""
        argument = problem.differentiated_argument
        if argument is not None and not self.differentiable:
            return (
                f"{argument} requires grad and this backend has no backward: call it under torch.no_grad(), "
                "detach the inputs, or use backend='torch-reference', which is differentiable"
            )
        return self.supports(problem) if self.supports is not None else None

    def run(self, problem: Problem, *arguments: Any) -> Any:
        """Calls the function with autocast off: it computes in the dtypes that it was given."""
        if torch.is_autocast_enabled(problem.device.type):
            with torch.autocast(problem.device.type, enabled=False):
                return self.function(*arguments)
        return self.function(*arguments)


_backends: dict[str, tuple[Backend, str]] = {}
_implementations: dict[tuple[str, str], Implementation] = {}
_compositions: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {}
_looked_for: set[tuple[str, str]] = set()
_load_failures: dict[str, str] = {}
_discovered = False
_lock = threading.RLock()  # of the tables; held by no import, which may wait for a thread that registers
_loading = threading.RLock()

_default: str | None = None
_scoped: dict[int, list[str | None]] = {}  # thread id -> names of the `use_backend` blocks that it is in
_traced: tuple[str | None, ...] = ()  # name of the innermost `use_backend` block in what dynamo is tracing
_UNSCOPED = "(outside any use_backend)"  # what such a block's None becomes in a traced graph


# Registration


def register_backend(backend: Backend) -> Backend:
    """Makes a backend known by its name. Raises ValueError, naming both places, if the name is taken."""
    place = _caller()
    with _lock:
        if backend.name in _backends:
            raise ValueError(
                f"backend {backend.name!r} is registered twice: in {_backends[backend.name][1]} and in {place}"
            )
        _backends[backend.name] = backend, place
    return backend


def register(
    op: str,
    backend: str,
    *,
    supports: Callable[[Any], str | None] | None = None,
    differentiable: bool = False,
) -> Callable[[_Function], _Function]:
    """Decorator: the function computes `op` on `backend`.

    It is called with all of the op's arguments but `backend`, by position, already validated.

    Args:
        op: an op's name, as in `ops()`.
        backend: name of a backend, registered before or after.
        supports: maps the problem (`tilegym_mamba2.problem.Problem`) to None, or to the reason why this
            function can't compute it, naming the argument and the limit.
        differentiable: autograd can go through it.

    Raises:
        ValueError: the op is unknown, or the pair is registered already (both places are named).
    """
    if op not in ops():
        raise ValueError(f"there is no op {op!r}{_nearest(op, ops())}; ops: {', '.join(ops())}")

    def decorate(function: _Function) -> _Function:
        code = getattr(function, "__code__", None)
        place = repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        with _lock:
            known = _implementations.get((op, backend))
            built_in = _built_in(op, backend)
            other = None if known is None else known.place
            if built_in is not None and getattr(function, "__module__", None) != built_in.name:
                other = built_in.origin  # it may not be imported yet
            if other is not None:
                raise ValueError(f"{op} on {backend!r} is registered twice: in {other} and in {place}")
            _implementations[op, backend] = Implementation(op, backend, function, supports, differentiable, place)
        return function

    return decorate


def register_composition(op: str, parts: tuple[str, ...]) -> Callable[[_Function], _Function]:
    """Decorator: the function computes `op` on any backend that has all of `parts`, unless it has the op itself.

    It is called with the backend's name, then as an implementation is.
    """

    def decorate(function: _Function) -> _Function:
        _compositions[op] = parts, function
        return function

    return decorate


def unregister_backend(name: str) -> None:
    """Forgets a backend and its implementations, so that a plugin under development can register anew."""
    _known(name)
    with _lock:
        del _backends[name]
        for key in [key for key in _implementations if key[1] == name]:
            del _implementations[key]
        _looked_for.difference_update([key for key in _looked_for if key[1] == name])


def _caller() -> str:
    frame = traceback.extract_stack(limit=3)[0]
    return f"{frame.filename}:{frame.lineno}"


# Discovery


def ops() -> tuple[str, ...]:
    """The ops' names: the packages in tilegym_mamba2/ops."""
    global _ops
    if _ops is None:
        package = importlib.import_module(f"{_PACKAGE}.ops")
        _ops = tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg))
    return _ops


_ops: tuple[str, ...] | None = None


def load_failures() -> dict[str, str]:
    """Entry points that could not be imported: name to reason. They never stop anything else from working."""
    _discover()
    return dict(_load_failures)


def _discover() -> None:
    global _discovered
    if _discovered:
        return
    with _loading:
        if _discovered:
            return
        package = importlib.import_module(f"{_PACKAGE}.backends")
        for module in pkgutil.iter_modules(package.__path__):
            if not module.ispkg and not module.name.startswith("_"):
                importlib.import_module(f"{package.__name__}.{module.name}")
        for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            try:
                entry_point.load()
            except (Exception, SystemExit) as error:  # a plugin's fault must not take the package down: it is reported
                _load_failures[entry_point.name] = f"{entry_point.value}: {type(error).__name__}: {error}"
        _discovered = True


def _find(op: str, backend: Backend) -> Implementation | None:
    """The implementation of an op on a backend, imported now if it is a built-in that was not needed before."""
    key = (op, backend.name)
    if key not in _looked_for:
        with _loading:
            built_in = _built_in(op, backend.name)
            if built_in is not None:
                with no_collection():  # a kernel's language has many modules
                    importlib.import_module(built_in.name)
            _looked_for.add(key)
    return _implementations.get(key) or _composed(op, backend)


def _built_in(op: str, backend: str) -> importlib.machinery.ModuleSpec | None:
    module = _backends[backend][0].module if backend in _backends else None
    return None if module is None else importlib.util.find_spec(f"{_PACKAGE}.ops.{op}.{module}")


@contextmanager
def no_collection() -> Generator[None]:
    """Collects no garbage: a compiler's many objects have all objects, torch's too, looked at again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _composed(op: str, backend: Backend) -> Implementation | None:
    if op not in _compositions:
        return None
    names, function = _compositions[op]
    parts = [part for part in (_find(name, backend) for name in names) if part is not None]
    if len(parts) < len(names):
        return None

    def supports(problem: Problem) -> str | None:
        return next((reason for part in parts if (reason := part.why_not(problem)) is not None), None)

    differentiable = all(part.differentiable for part in parts)
    place = f"the composition of {', '.join(names)}"
    return Implementation(op, backend.name, partial(function, backend.name), supports, differentiable, place)


def _known(name: str) -> Backend:
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"backend must be a name (str) or None, got {name!r}")
    if name not in _backends:
        _discover()
        if name not in _backends:
            message = f"there is no backend {name!r}{_nearest(name, _backends)}; backends: {', '.join(_backends)}"
            if name == os.environ.get(ENVIRONMENT_VARIABLE):
                message += f"; the environment variable {ENVIRONMENT_VARIABLE} names it"
            if _load_failures:
                message += f"; not loaded: {'; '.join(f'{key} ({why})' for key, why in _load_failures.items())}"
            raise ValueError(message)
    return _backends[name][0]


def _nearest(name: str, names: Any) -> str:
    match = difflib.get_close_matches(str(name), list(names), n=1, cutoff=0.4)
    return f", did you mean {match[0]!r}?" if match else ""


# Selection


def set_backend(name: str | None) -> None:
    """Sets the backend of all later calls, in every thread; None returns to the environment or automatic choice.

    Raises ValueError for a name that is not registered.
    """
    global _default
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError("set_backend can't take effect inside a compiled function: use use_backend or backend=")
    _default = None if name is None else _known(name).name


@contextmanager
def use_backend(name: str | None) -> Generator[None]:
    """Context manager: calls of this thread inside run on the named backend; None chooses as if outside any.

    Inside a compiled function the name becomes part of the graph; around one it is read each time that the function
    runs, as `set_backend` and the environment are.

    Raises ValueError for a name that is not registered.
    """
    global _traced
    if torch.compiler.is_dynamo_compiling():
        # Dynamo can't run this around the operators of its graph: they get the name as an argument.
        outer, _traced = _traced, (name,)
        try:
            yield
        finally:
            _traced = outer
        return
    if name is not None:
        _known(name)
    stack = _scoped.setdefault(threading.get_ident(), [])
    stack.append(name)
    try:
        yield
    finally:
        stack.pop()
        if not stack:
            _scoped.pop(threading.get_ident(), None)


def current_backend() -> str | None:
    """The name that a call without `backend=` would use, or None if the choice is automatic."""
    if _scoped:
        stack = _scoped.get(threading.get_ident())
        if stack and stack[-1] is not None:
            return stack[-1]
    return _unscoped_backend()


def _unscoped_backend() -> str | None:
    return _default or os.environ.get(ENVIRONMENT_VARIABLE) or None


def traced_backend(backend: str | None) -> str | None:
    """What an operator in a traced graph gets as its backend: a name, or None to choose each time that it runs.

    Under torch.compile only names given inside the compiled function are part of the graph.
    """
    if backend is not None:
        return backend
    if not torch.compiler.is_dynamo_compiling():
        return current_backend()
    return (_traced[0] or _UNSCOPED) if _traced else None


def select(op: str, problem: Problem, backend: str | None = None) -> Implementation:
    """The implementation that runs a call.

    Raises:
        ValueError: a name that is not registered.
        BackendUnavailableError: the named backend can't run here.
        NotImplementedError: the named backend lacks the op, or can't do this problem; or no backend can.
    """
    if backend is None:
        name = current_backend()
    else:
        name = _unscoped_backend() if backend == _UNSCOPED else backend
    return _automatic(op, problem) if name is None else _named(op, problem, name)


def has_implementation(op: str, backend: str) -> bool:
    """Whether a backend has the op, available here or not."""
    return _find(op, _known(backend)) is not None


def _named(op: str, problem: Problem, name: str) -> Implementation:
    chosen = _known(name)
    reason = chosen.reason(problem.device)
    if reason is not None:
        raise BackendUnavailableError(f"backend {name!r} can't run here: {reason}")
    implementation = _find(op, chosen)
    if implementation is None:
        raise NotImplementedError(f"backend {name!r} has no {op}")
    reason = implementation.why_not(problem)
    if reason is not None:
        raise NotImplementedError(f"backend {name!r}, {op}: {reason}")
    return implementation


def _automatic(op: str, problem: Problem) -> Implementation:
    _discover()
    reasons: list[str] = []
    for candidate in _ranked(problem.device):
        reason = candidate.reason(problem.device)
        if reason is None:
            implementation = _find(op, candidate)
            reason = implementation.why_not(problem) if implementation is not None else f"it has no {op}"
            if implementation is not None and reason is None:
                return implementation
            # Gradients through a far slower backend would be a surprise: the caller decides.
            if problem.differentiated_argument is not None:
                raise NotImplementedError(f"backend {candidate.name!r}, {op}: {reason}")
        reasons.append(f"{candidate.name}: {reason}")
    raise NotImplementedError(f"no backend can do this {op}: {'; '.join(reasons)}")


def _ranked(device: torch.device) -> list[Backend]:
    backends = [backend for backend, _ in _backends.values() if backend.priority_on(device) >= 0]
    return sorted(backends, key=lambda backend: -backend.priority_on(device))


# What there is


def _device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def available_backends(device: torch.device | str | None = None) -> list[str]:
    """Names of the backends that can run on a device (default: the GPU if there is one), best first."""
    device = _device_here() if device is None else torch.device(device)
    reasons = explain_backends(device)
    names = [name for name, reason in reasons.items() if reason == "available"]
    return sorted(names, key=lambda name: -_backends[name][0].priority_on(device))


def explain_backends(device: torch.device | str | None = None) -> dict[str, str]:
    """Every registered backend's name to "available" or the reason why it can't run on a device."""
    _discover()
    device = _device_here() if device is None else torch.device(device)
    return {name: backend.reason(device) or "available" for name, (backend, _) in _backends.items()}
