"""Which configuration a kernel runs with, where several are right.

An op lists the configurations that suit a call, and the first of them is the choice by rule. Another is chosen where
one was measured to be faster:

1. on this machine, by `tilegym-mamba2 tune`, which keeps the choice in `cache_directory()`, for this version of the
   package, compiler and GPU;
2. for the package: `tilegym_mamba2/tuned/<architecture>.json`.

A choice belongs to an op, a backend and a key: the sizes and dtypes on which the best configuration depends, never
batch or seqlen. Only what the op lists is ever used, so that a stale or damaged file changes nothing, and brings a
warning. Nothing is measured in a call. Choices are looked up when a plan is made (`planned`), once for each key in a
process.
"""

import datetime
import functools
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from tilegym_mamba2._version import __version__

CACHE_VARIABLE = "TILEGYM_MAMBA2_CACHE"

_TABLES = Path(__file__).parent / "tuned"
_UNREADABLE = (OSError, ValueError, RecursionError)
_AGAIN = "delete it, or make it anew with `tilegym-mamba2 tune --again`"

_Candidate = TypeVar("_Candidate")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Key = tuple[tuple[str, int | str], ...]
_Subject = tuple[str, str, frozenset[tuple[str, int | str]]]  # op, backend, key


class Place(NamedTuple):
    """Where a choice holds.

    Attributes:
        architecture: as compilers name it, "sm_90" or "gfx942"; empty for a CPU, which has choices by rule alone.
        gpu: its name; empty if there is none and it is only supposed, which leaves out what was tuned here.
        compiler: its name and version; asked for only if something was tuned for the GPU.
    """

    backend: str
    architecture: str
    gpu: str
    compiler: Callable[[], str]


@dataclass(frozen=True)
class Choice:
    """A configuration that was measured to be the best, as it is kept in a file.

    Attributes:
        measured: by workload, seconds of the choice by rule and of this one.
    """

    op: str
    backend: str
    architecture: str
    gpu: str
    compiler: str
    package: str
    key: dict[str, int | str]
    configuration: dict[str, Any]
    measured: dict[str, list[float]]
    date: str


class Asked(NamedTuple):
    """A choice between configurations that a call made; `source` says by what: "rule", "package", "here" or "tried"."""

    op: str
    place: Place
    key: dict[str, int | str]
    candidates: tuple[Any, ...]
    position: int
    source: str
    choice: Choice | None


def choose(op: str, place: Place, key: Mapping[str, int | str], candidates: Sequence[_Candidate]) -> _Candidate:
    """The configuration to use among the candidates, named tuples of which the first is the choice by rule."""
    position, source, choice = _position(op, place, key, candidates)
    if _observed is not None:
        _observed.append(Asked(op, place, dict(key), tuple(candidates), position, source, choice))
    return candidates[position]


def _position(
    op: str, place: Place, key: Mapping[str, int | str], candidates: Sequence[Any]
) -> tuple[int, str, Choice | None]:
    frozen = tuple(key.items())
    tried = _tried.get((op, place.backend, frozenset(frozen)))
    if tried is not None:
        return min(tried, len(candidates) - 1), "tried", None
    if place.gpu:
        choice = _tuned_here(op, place, frozen)
        if choice is not None:
            position = _find(choice, candidates)
            if position is not None:
                return position, "here", choice
            _ignore(_file(op, place, frozen), "its configuration is none of those that the op has now")
    choice = _of_package(place.architecture).get((op, place.backend, frozenset(frozen)))
    position = None if choice is None else _find(choice, candidates)
    return (0, "rule", None) if position is None else (position, "package", choice)


def _find(choice: Choice, candidates: Sequence[Any]) -> int | None:
    return next((at for at, one in enumerate(candidates) if as_json(one) == choice.configuration), None)


def as_json(configuration: Any) -> Any:
    """A configuration with the names of its fields, as it is stored."""
    if isinstance(configuration, tuple) and hasattr(configuration, "_asdict"):
        named: dict[str, Any] = cast(Any, configuration)._asdict()
        return {name: as_json(value) for name, value in named.items()}
    return configuration


# Plans


_plans: list[Any] = []


def planned(function: _Function) -> _Function:
    """Decorator: remembers what a function that makes plans returned for equal arguments, until choices change."""
    remembered = functools.lru_cache(maxsize=1024)(function)
    _plans.append(remembered)
    return cast(Any, remembered)


def _forget() -> None:
    for plan in _plans:
        plan.cache_clear()
    _tuned_here.cache_clear()
    _ignore.cache_clear()


# Looking on, and trying


_observed: list[Asked] | None = None
_tried: dict[_Subject, int] = {}


@contextmanager
def observing() -> Generator[list[Asked]]:
    """Context manager: a list of the choices that are made in the block."""
    global _observed
    outer, _observed = _observed, list[Asked]()
    _forget()
    try:
        yield _observed
    finally:
        _observed = outer


@contextmanager
def using(op: str, backend: str, key: Mapping[str, int | str], position: int) -> Generator[None]:
    """Context manager: calls with that key run with the candidate at that position (the last, if there are fewer).

    It holds for all threads. CUDA graphs that are captured in the block stay as they are.
    """
    outer = dict(_tried)
    _tried[op, backend, frozenset(key.items())] = position
    _forget()
    try:
        yield
    finally:
        _tried.clear()
        _tried.update(outer)
        _forget()


# The package's


@functools.cache
def _of_package(architecture: str) -> Mapping[_Subject, Choice]:
    return {(one.op, one.backend, frozenset(one.key.items())): one for one in table(architecture)}


def table(architecture: str) -> list[Choice]:
    """The choices that the package brings for an architecture; none for one on which nothing was measured."""
    path = _TABLES / f"{architecture}.json"
    return _read_table(path) if path.exists() else []


def write_table(path: Path, choices: Sequence[Choice]) -> None:
    """Adds choices to a table, in place of those for the same. Raises OSError, or ValueError if it is no table."""
    known = _read_table(path) if path.exists() else []
    by_subject = {(one.op, one.backend, str(one.key)): one for one in [*known, *choices]}
    _write(path, [asdict(by_subject[subject]) for subject in sorted(by_subject)])


def _read_table(path: Path) -> list[Choice]:
    return [_parse(entry) for entry in json.loads(path.read_text("utf-8"))]


# The user's


def cache_directory() -> Path | None:
    """Where choices are kept: $TILEGYM_MAMBA2_CACHE, or the platform's place for caches; None if there is none."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(shared):  # which the specification says to ignore
        shared = os.environ.get("LOCALAPPDATA", "") if sys.platform == "win32" else ""
    if shared:
        return Path(shared) / "tilegym-mamba2"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "tilegym-mamba2"


def store(asked: Asked, position: int, measured: Mapping[str, Sequence[float]]) -> Choice:
    """Keeps a candidate as the choice for what was asked, and has it used from the next call on.

    Several processes may do so at once: a file is replaced in one step, and each holds a single choice.
    Raises OSError if it can't be written.
    """
    choice = Choice(
        asked.op, asked.place.backend, asked.place.architecture, asked.place.gpu, asked.place.compiler(), __version__,
        asked.key, as_json(asked.candidates[position]), {name: list(times) for name, times in measured.items()},
        datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )  # fmt: skip
    path = _file(asked.op, asked.place, tuple(asked.key.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, asdict(choice))
    _forget()
    return choice


def stored() -> tuple[list[Choice], dict[Path, str]]:
    """All choices in the cache directory, whatever they are for, and the files that are none, with the reason."""
    folder = _folder()
    choices: list[Choice] = []
    damaged: dict[Path, str] = {}
    for path in sorted(folder.glob("*/*/*.json")) if folder is not None else ():
        try:
            choices.append(_parse(json.loads(path.read_text("utf-8"))))
        except _UNREADABLE as error:
            damaged[path] = str(error)
    return choices, damaged


def holds(choice: Choice, place: Place) -> bool:
    """Whether a choice was made for this version of the package, compiler and GPU."""
    there = (choice.backend, choice.architecture, choice.gpu, choice.compiler, choice.package)
    return there == (place.backend, place.architecture, place.gpu, place.compiler(), __version__)


@functools.cache
def _tuned_here(op: str, place: Place, key: _Key) -> Choice | None:
    folder = _folder()
    # Most have tuned nothing, and to ask a compiler for its version takes a process.
    if folder is None or not os.path.isdir(folder / _slug(f"{__version__} {place.gpu}")):
        return None
    path = _file(op, place, key)
    try:
        choice = _parse(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except _UNREADABLE as error:
        return _ignore(path, str(error))
    if not holds(choice, place) or (choice.op, choice.key) != (op, dict(key)):
        return _ignore(path, "it was made for something else")
    return choice


def _folder() -> Path | None:
    cache = cache_directory()
    return None if cache is None else cache / "tuned"


def _file(op: str, place: Place, key: _Key) -> Path:
    folder = _folder()
    if folder is None:
        raise OSError(f"there is no home directory: set {CACHE_VARIABLE}")
    sizes = " ".join(f"{name}={value}" for name, value in key)
    names = (f"{__version__} {place.gpu}", place.compiler(), f"{op} {place.backend} {sizes}.json")
    return folder.joinpath(*map(_slug, names))


def _slug(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", text)


@functools.cache  # warned of once
def _ignore(path: Path, reason: str) -> None:
    warnings.warn(f"the tuned choice {path} is ignored: {' '.join(reason.split())}; {_AGAIN}", stacklevel=2)


def _parse(entry: Any) -> Choice:
    """The choice that was read. Raises ValueError if it is none."""
    types = {field.name: cast(Any, field.type) for field in fields(Choice)}
    if not isinstance(entry, dict) or cast(dict[str, Any], entry).keys() != types.keys():
        raise ValueError(f"it should have the fields {', '.join(types)}")
    for name, value in cast(dict[str, Any], entry).items():
        wanted = str if types[name] is str else dict
        if not isinstance(value, wanted):
            raise ValueError(f"{name} is {value!r}")
    return Choice(**entry)


def _write(path: Path, content: Any) -> None:
    """Writes a file in one step, so that no reader ever sees half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
