"""The cuTile backend: whether it can run here, and the one way by which its kernels are launched.

A kernel is a function decorated with `ct.kernel`, without hints. A `Launch` adds the hints of the chosen
configuration, compiles each combination once, widens the offsets to 64 bits where an array needs it, and runs it
on the current stream of the tensors' device. CPU tensors go to the interpreter, which runs the same source.

Host time often outweighs that of the kernels. So an op keeps its launches, for calls alike in `layouts`, in a plan
(`planned`), and `Launches` take the memory that they pass to each other at once.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
import math
import operator
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch

from tilegym_mamba2 import tuning
from tilegym_mamba2.backends._memory import contiguous, empty_on
from tilegym_mamba2.registry import Backend, no_collection, register_backend

if TYPE_CHECKING:
    import cuda.tile as ct

INTERPRET_VARIABLE = "TILEGYM_MAMBA2_CUTILE_INTERPRET"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120")

_OLDEST_CUDA_TILE = (1, 6)  # the first with dependent launches
_OLDEST_CUDA_DRIVER = 13000
_LARGEST_INT32 = 2**31 - 1

# Its raw forms cost a tenth of torch.cuda.current_stream() and current_device(), and every launch asks for them.
_torch_c: Any = cast(Any, torch)._C
_DEPENDENT: tuple[dict[str, bool], ...] = ({}, {"programmatic_dependent_launch": True})
ABSENT = 0  # stands for an array that a call does not have: the cheapest argument
_ALIGNMENT = 256  # bytes
_CURRENT_GPU = torch.device("cuda")
_TYPE_STRINGS = {torch.float32: "<f4", torch.bfloat16: "<V2", torch.float16: "<f2"}

_Candidate = TypeVar("_Candidate")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Hints(NamedTuple):
    """What the compiler is told about a kernel besides its source; None leaves the choice to it."""

    occupancy: int | None = None
    num_worker_warps: int | None = None
    num_ctas: int | None = None


_NO_HINTS = Hints()


class DeviceInfo(NamedTuple):
    """What a configuration may depend on."""

    capability: tuple[int, int]
    multiprocessors: int
    name: str = ""  # of the GPU; empty where there is none


class Recorded(NamedTuple):
    """A launch that was recorded instead of run."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    hints: Hints
    wide: bool
    dependent: bool


@dataclass
class _Recording:
    info: DeviceInfo
    candidate: int | None
    launches: list[Recorded]
    candidates_seen: int = 1


_recording: _Recording | None = None
_variants: dict[tuple[Any, Hints, tuple[bool, ...] | None], Any] = {}


# Launching


class Piece:
    """A contiguous array in memory that others share, for kernels on a GPU alone: a view takes longer to make.

    Args:
        pointer: of its first element; whoever launches keeps the memory.
        layout: from `Piece.layout`.
    """

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, pointer: int, layout: dict[str, Any]):
        self.__cuda_array_interface__ = {**layout, "data": (pointer, False)}

    @staticmethod
    def layout(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        return {"data": None, "shape": shape, "strides": None, "typestr": _TYPE_STRINGS[dtype], "version": 3}

    @property
    def numel(self) -> int:
        return math.prod(self.__cuda_array_interface__["shape"])


_ARRAYS = (torch.Tensor, Piece)


class Launch:
    """A kernel with everything that a repeated call does not change: `launch(arrays)` runs it.

    A kernel's parameters are arrays, then numbers and constants. An array that a call does not have is `ABSENT`.
    The arrays of every call must have the same shapes, strides and dtypes.

    Args:
        kernel: decorated with `ct.kernel`, without hints.
        grid: up to three numbers of blocks, none of them 0; only the first may pass 65,535.
        values: of the parameters after the arrays.
        hints: of the chosen configuration.
        dependent: the kernel synchronises with the one before it itself (programmatic dependent launch).
    """

    __slots__ = ("_hints", "_kernel", "_values", "_variant", "dependent", "grid")

    def __init__(
        self,
        kernel: "ct.kernel",
        grid: tuple[int, ...],
        values: tuple[int | float, ...],
        hints: Hints = _NO_HINTS,
        *,
        dependent: bool = False,
    ):
        self.grid = grid
        self.dependent = dependent
        self._kernel = kernel
        self._values = values
        self._hints = hints
        self._variant: Any = None

    def __call__(self, arrays: tuple[torch.Tensor | Piece | int, ...]) -> None:
        """Runs the kernel on the current stream of the device of the first array, which is a tensor."""
        variant, values = self.prepared(arrays)
        if variant is not None:
            _run(self.grid, variant, (*arrays, *values), _DEPENDENT[self.dependent])

    def prepared(self, arrays: tuple[torch.Tensor | Piece | int, ...]) -> tuple[Any, tuple[int | float, ...]]:
        """The kernel to launch, or None if the launch was recorded; and what it gets after the arrays."""
        if self._variant is None:
            arguments = (*arrays, *self._values)
            wide = any(_extent(array) > _LARGEST_INT32 for array in arrays if not isinstance(array, int))
            if _recording is not None:
                recorded = Recorded(self._kernel, self.grid, arguments, self._hints, wide, self.dependent)
                _recording.launches.append(recorded)
                return None, ()
            self._variant = specialised(self._kernel, arguments, self._hints, wide)
        return self._variant, self._values


class Launches:
    """Kernels that run one after the other: `launches(tensors)` runs them and returns the results.

    Args:
        arguments: names of the tensors that a call passes, separated by spaces.
        launches: each with the names of its arrays; "-" is one that no call has. The first is not dependent.
        results: shape and dtype of what a call makes and returns, by name.
        scratch: likewise, for what the launches pass to each other: one allocation for all.
    """

    __slots__ = ("_launches", "_nbytes", "_pieces", "_results", "_steps")

    def __init__(
        self,
        arguments: str,
        launches: Sequence[tuple[Launch, str]],
        results: dict[str, tuple[tuple[int, ...], torch.dtype]],
        scratch: dict[str, tuple[tuple[int, ...], torch.dtype]],
    ):
        names = [*arguments.split(), *results, *scratch, "-"]
        # A launch has two arrays at least, so that each of these returns a tuple.
        self._launches = [
            (launch, operator.itemgetter(*map(names.index, arrays.split()))) for launch, arrays in launches
        ]
        self._results = [(shape, contiguous(shape), dtype) for shape, dtype in results.values()]
        self._pieces: list[tuple[int, tuple[int, ...], torch.dtype, dict[str, Any]]] = []
        self._nbytes = 0
        for shape, dtype in scratch.values():
            self._pieces.append((self._nbytes, shape, dtype, Piece.layout(shape, dtype)))
            self._nbytes += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._steps: list[Any] | None = None

    def __call__(self, tensors: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor]:
        """Runs the kernels on the current stream of the device of the first tensor."""
        index = cast(torch.Tensor, tensors[0]).get_device()
        if index < 0 or _recording is not None:
            return self._watch(tensors)
        if index == _torch_c._cuda_getDevice():
            return self._run(tensors, index)
        with torch.cuda.device(index):
            return self._run(tensors, index)

    def _run(self, tensors: tuple[torch.Tensor | None, ...], index: int) -> list[torch.Tensor]:
        empty = empty_on(_CURRENT_GPU)
        results: list[torch.Tensor] = [empty(*layout) for layout in self._results]
        memory = empty((self._nbytes,), (1,), torch.uint8)
        base = memory.data_ptr()
        pieces = [Piece(base + offset, layout) for offset, _, _, layout in self._pieces]
        arrays = (*tensors, *results, *pieces, ABSENT)
        if self._steps is None:
            self._steps = [
                (launch.grid, *launch.prepared(pick(arrays)), pick, _DEPENDENT[launch.dependent])
                for launch, pick in self._launches
            ]
            with no_collection():
                self._launch(arrays, index)
        else:
            self._launch(arrays, index)
        return results

    def _launch(self, arrays: tuple[Any, ...], index: int) -> None:
        launch, stream = _launcher(), _torch_c._cuda_getCurrentRawStream(index)
        for grid, variant, values, pick, options in cast(list[Any], self._steps):
            launch(stream, grid, variant, pick(arrays) + values, **options)

    def _watch(self, tensors: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor]:
        """What a call does when kernels are interpreted or recorded."""
        device = cast(torch.Tensor, tensors[0]).device
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, _, dtype in self._results]
        memory = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
        pieces = [
            memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for offset, shape, dtype, _ in self._pieces
        ]
        arrays = (*tensors, *results, *pieces, ABSENT)
        for launch, pick in self._launches:
            launch(pick(arrays))
        return results


def launch(kernel: "ct.kernel", grid: tuple[int, ...], arguments: tuple[Any, ...], hints: Hints = _NO_HINTS) -> None:
    """Runs a kernel as a `Launch` does, without a plan; `arguments` are all parameters, the first is a tensor."""
    wide = False
    for argument in arguments:
        # A storage of less than 2 GiB can't hold an offset that passes 32 bits, and this is the cheapest question.
        if isinstance(argument, torch.Tensor) and argument.untyped_storage().nbytes() > _LARGEST_INT32:
            wide = wide or _extent(argument) > _LARGEST_INT32
    if _recording is not None:
        _recording.launches.append(Recorded(kernel, grid, arguments, hints, wide, False))
    else:
        _run(grid, specialised(kernel, arguments, hints, wide), arguments, {})


def _run(grid: tuple[int, ...], variant: Any, arguments: tuple[Any, ...], options: dict[str, bool]) -> None:
    index = arguments[0].get_device()
    if index < 0:
        from tilegym_mamba2.backends import cutile_interpreter

        cutile_interpreter.launch(grid, variant, arguments)
    elif index == _torch_c._cuda_getDevice():
        _launcher()(_torch_c._cuda_getCurrentRawStream(index), grid, variant, arguments, **options)
    else:
        with torch.cuda.device(index):
            _launcher()(_torch_c._cuda_getCurrentRawStream(index), grid, variant, arguments, **options)


@functools.cache
def _launcher() -> Any:
    # cuda.tile.launch may be another: tilegym replaces it by a function that takes no options.
    from cuda.tile._cext import launch

    return launch


def specialised(kernel: Any, arguments: tuple[Any, ...], hints: Hints, wide: bool) -> Any:
    """`specialise`, once for equal kernels, hints and widths."""
    # What is an array decides which parameters are widened.
    key = (kernel, hints, tuple([isinstance(argument, _ARRAYS) for argument in arguments]) if wide else None)
    variant = _variants.get(key)
    if variant is None:
        variant = _variants[key] = specialise(kernel, arguments, hints, wide)
    return variant


def layouts(*tensors: torch.Tensor | None) -> tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]:
    """Shape, strides and dtype of each tensor: what the arrays of a `Launch` may not change."""
    return tuple([None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])


def planned(function: _Function) -> _Function:
    """Decorator: remembers what a function that makes plans returned for equal arguments."""
    remembered = tuning.planned(function)

    @functools.wraps(function)
    def plan(*arguments: Any) -> Any:
        return remembered(*arguments) if _recording is None else function(*arguments)

    return cast(Any, plan)


def specialise(kernel: Any, arguments: tuple[Any, ...], hints: Hints, wide: bool) -> Any:
    """The kernel with hints, and with 64-bit shapes, strides and offsets in every array argument if `wide`."""
    import dataclasses
    import types
    import typing

    import cuda.tile as ct

    function: Any = kernel._pyfunc
    if wide:
        function = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        annotations = dict(typing.get_type_hints(kernel._pyfunc, include_extras=True))
        for name, argument in zip(function.__code__.co_varnames, arguments, strict=False):
            if isinstance(argument, _ARRAYS):
                metadata = getattr(annotations.get(name), "__metadata__", ())
                given = next((item for item in metadata if isinstance(item, ct.ArrayAnnotation)), ct.ArrayAnnotation())
                annotations[name] = typing.Annotated[ct.Array, dataclasses.replace(given, index_dtype=ct.int64)]
        function.__annotations__ = annotations
    return ct.kernel(function, **hints._asdict())


def _extent(tensor: torch.Tensor | Piece) -> int:
    """The largest offset, in elements, between two elements of an array, or its largest dimension."""
    if isinstance(tensor, Piece):
        return tensor.numel
    offset = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return max(offset, tensor.numel(), *tensor.stride(), 0)


# Configuration


def choose(
    candidates: Sequence[_Candidate], op: str = "", info: DeviceInfo | None = None, **key: int | str
) -> _Candidate:
    """The configuration to use among those that suit a call, of which the first is the choice by rule.

    With the op's name, the GPU and what the best one depends on, what was tuned goes before it: see
    `tilegym_mamba2.tuning`.
    """
    if _recording is not None:
        _recording.candidates_seen = max(_recording.candidates_seen, len(candidates))
        if _recording.candidate is not None:
            return candidates[min(_recording.candidate, len(candidates) - 1)]
    return candidates[0] if info is None else tuning.choose(op, place(info), key, candidates)


def place(info: DeviceInfo) -> tuning.Place:
    """Where choices made on a GPU hold."""
    architecture = f"sm_{info.capability[0]}{info.capability[1]}" if info.name or _recording is not None else ""
    return tuning.Place("cutile", architecture, info.name, _compiler)


@functools.cache
def _compiler() -> str:
    parts = [f"cuda-tile {importlib.metadata.version('cuda-tile')}"]
    try:
        parts.append(f"tileiras {importlib.metadata.version('nvidia-cuda-tileiras')}")
    except importlib.metadata.PackageNotFoundError:
        with suppress(OSError, subprocess.SubprocessError):  # one of a CUDA toolkit
            asked = [_find_tileiras() or "tileiras", "--version"]
            answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
            parts += re.findall(r"\bV?\d+\.\d+\.\d+", answer)[:1]
    return " ".join(parts)


def device_info(device: torch.device) -> DeviceInfo:
    """What the choice of a configuration depends on; for CPU tensors, a Hopper of few multiprocessors."""
    if _recording is not None:
        return _recording.info
    if device.type != "cuda":
        return DeviceInfo((9, 0), 4)
    return _device_info(device.index)


@functools.cache
def _device_info(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    return DeviceInfo((properties.major, properties.minor), properties.multi_processor_count, properties.name)


@contextmanager
def recording(capability: tuple[int, int], candidate: int | None = None, name: str = "") -> Generator[_Recording]:
    """Context manager: launches are recorded, not run, as if the tensors (of any device) were on such a GPU.

    `choose` takes the given candidate, or the last one where there are fewer, and as ever if None is given; the yielded
    object's `candidates_seen` tells the most that there were. Used to compile everything that can be launched without
    a GPU.
    """
    global _recording
    outer, _recording = _recording, _Recording(DeviceInfo(capability, 132, name), candidate, [])
    try:
        yield _recording
    finally:
        _recording = outer


# Whether it can run here


def why_unavailable(device: torch.device) -> str | None:
    """None if kernels can run on tensors of this device, else the reason and what mends it."""
    if _recording is not None:
        return None
    if device.type == "cpu":
        if os.environ.get(INTERPRET_VARIABLE, "0") in ("", "0"):
            return (
                f"cuTile kernels run CPU tensors only in the interpreter: set {INTERPRET_VARIABLE}=1 (slow, for tests)"
            )
        return _why_no_package()
    if device.type != "cuda":
        return f"cuTile kernels run on NVIDIA GPUs, not on {device.type!r} tensors"
    return _why_no_gpu(device.index)


@functools.cache
def _why_no_package() -> str | None:
    try:
        version = importlib.metadata.version("cuda-tile")
    except importlib.metadata.PackageNotFoundError:
        return "the package cuda-tile is missing: pip install 'cuda-tile[tileiras]'"
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_CUDA_TILE:
        oldest = ".".join(map(str, _OLDEST_CUDA_TILE))
        return f"cuda-tile {version} is too old: pip install -U 'cuda-tile[tileiras]>={oldest}'"
    return None


@functools.cache
def _why_no_gpu(index: int | None) -> str | None:
    reason = _why_no_package()
    if reason is not None:
        return reason
    if _find_tileiras() is None:
        return "the compiler tileiras was not found: pip install 'cuda-tile[tileiras]', or install CUDA toolkit 13.1+"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device: install a CUDA build of torch and a driver, and check CUDA_VISIBLE_DEVICES"
    capability = torch.cuda.get_device_capability(index)
    if capability[0] < 8:
        name = torch.cuda.get_device_name(index)
        return f"{name} has compute capability {capability[0]}.{capability[1]}: cuTile needs 8.0 (Ampere) or newer"
    driver = _driver_version()
    if driver < _OLDEST_CUDA_DRIVER:
        return (
            f"the NVIDIA driver supports CUDA {driver // 1000}.{driver % 1000 // 10}: cuTile needs 13.0, "
            "install driver 580 or newer"
        )
    return None


def _driver_version() -> int:
    """The newest CUDA version that the driver supports, 13000 for 13.0; 0 if the driver does not answer."""
    version = ctypes.c_int(0)
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        library.cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


def _find_tileiras() -> str | None:
    """Where cuda.tile would find its compiler, without importing it."""
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    spec = importlib.util.find_spec("nvidia")
    if spec is not None and spec.submodule_search_locations is not None:
        places += [os.path.dirname(location) for location in spec.submodule_search_locations]
    folders = [os.path.join(place, "nvidia", "cu13", "bin") for place in places]
    folders += [os.path.join(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders += ["/usr/local/cuda/bin"]
    return shutil.which("tileiras") or shutil.which("tileiras", path=os.pathsep.join(folders))


register_backend(Backend(name="cutile", why_unavailable=why_unavailable, priority={"cuda": 20}, module="cutile_"))
