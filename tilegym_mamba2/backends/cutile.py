"""The cuTile backend: whether it can run here, and the one way by which its kernels are launched.

A kernel is a function decorated with `ct.kernel`, without hints. `launch` adds the hints of the chosen
configuration, compiles each combination once, widens the offsets to 64 bits where an array needs it, and runs it
on the current stream of the tensors' device. CPU tensors go to the interpreter, which runs the same source.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch

from tilegym_mamba2.registry import Backend, register_backend

if TYPE_CHECKING:
    import cuda.tile as ct

INTERPRET_VARIABLE = "TILEGYM_MAMBA2_CUTILE_INTERPRET"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120")

_OLDEST_CUDA_TILE = (1, 5)
_OLDEST_CUDA_DRIVER = 13000
_LARGEST_INT32 = 2**31 - 1

# The raw handle of a stream costs a tenth of torch.cuda.current_stream(), and every launch asks for it.
_torch_c: Any = cast(Any, torch)._C
_DEPENDENT: tuple[dict[str, bool], ...] = ({}, {"programmatic_dependent_launch": True})  # cuda-tile 1.5 lacks it

_Candidate = TypeVar("_Candidate")


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


@dataclass(frozen=True)
class Launch:
    """A launch that was recorded instead of run."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    hints: Hints
    wide: bool


@dataclass
class _Recording:
    info: DeviceInfo
    candidate: int
    launches: list[Launch]
    candidates_seen: int = 1


_recording: _Recording | None = None
_variants: dict[tuple[Any, Hints, bool], Any] = {}


# Launching


def launch(
    kernel: "ct.kernel",
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    hints: Hints = _NO_HINTS,
    *,
    dependent: bool = False,
) -> None:
    """Runs a kernel over a grid, on the current stream of the device that the arguments are on.

    Args:
        kernel: decorated with `ct.kernel`, without hints.
        grid: up to three numbers of blocks, none of them 0; only the first may pass 65,535.
        arguments: in the order of the kernel's parameters; the first is a tensor.
        hints: of the chosen configuration.
        dependent: the kernel synchronises with the one before it itself (programmatic dependent launch).
    """
    wide = False
    for argument in arguments:
        # A storage of less than 2 GiB can't hold an offset that passes 32 bits, and this is the cheapest question.
        if isinstance(argument, torch.Tensor) and argument.untyped_storage().nbytes() > _LARGEST_INT32:
            wide = wide or _extent(argument) > _LARGEST_INT32
    if _recording is not None:
        _recording.launches.append(Launch(kernel, grid, arguments, hints, wide))
        return
    variant = _variants.get((kernel, hints, wide))
    if variant is None:
        variant = _variants[kernel, hints, wide] = specialise(kernel, arguments, hints, wide)
    index = arguments[0].get_device()
    if index < 0:
        from tilegym_mamba2.backends import cutile_interpreter

        cutile_interpreter.launch(grid, variant, arguments)
    elif index == torch.cuda.current_device():
        _launcher()(_torch_c._cuda_getCurrentRawStream(index), grid, variant, arguments, **_DEPENDENT[dependent])
    else:
        with torch.cuda.device(index):
            _launcher()(_torch_c._cuda_getCurrentRawStream(index), grid, variant, arguments, **_DEPENDENT[dependent])


@functools.cache
def _launcher() -> Any:
    from cuda.tile import launch

    return launch


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
            if isinstance(argument, torch.Tensor):
                metadata = getattr(annotations.get(name), "__metadata__", ())
                given = next((item for item in metadata if isinstance(item, ct.ArrayAnnotation)), ct.ArrayAnnotation())
                annotations[name] = typing.Annotated[ct.Array, dataclasses.replace(given, index_dtype=ct.int64)]
        function.__annotations__ = annotations
    return ct.kernel(function, **hints._asdict())


def _extent(tensor: torch.Tensor) -> int:
    """The largest offset, in elements, between two elements of a tensor, or its largest dimension."""
    offset = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return max(offset, tensor.numel(), *tensor.stride(), 0)


# Configuration


def choose(candidates: Sequence[_Candidate]) -> _Candidate:
    """The configuration to use among those that suit a call, of which the first is the default."""
    if _recording is None:
        return candidates[0]
    _recording.candidates_seen = max(_recording.candidates_seen, len(candidates))
    return candidates[min(_recording.candidate, len(candidates) - 1)]


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
    return DeviceInfo((properties.major, properties.minor), properties.multi_processor_count)


@contextmanager
def recording(capability: tuple[int, int], candidate: int = 0) -> Generator[_Recording]:
    """Context manager: launches are recorded, not run, as if the tensors (of any device) were on such a GPU.

    `choose` takes the given candidate, or the last one where there are fewer; the yielded object's
    `candidates_seen` tells the most that there were. Used to compile everything that can be launched without a GPU.
    """
    global _recording
    outer, _recording = _recording, _Recording(DeviceInfo(capability, 132), candidate, [])
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
