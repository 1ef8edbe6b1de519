"""The Triton backend: whether it can run here, and the one way by which its kernels are launched.

Triton's own launch path costs more host time than many of these kernels run, so a `Launch` keeps the compiled
kernel and hands it the pointers directly. CPU tensors go to Triton's interpreter, which runs the same source.
"""

import functools
import importlib.metadata
import operator
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tilegym_mamba2.registry import Backend, register_backend

INTERPRET_VARIABLE = "TRITON_INTERPRET"

# Their public forms make objects, at several times the cost.
_torch: Any = torch._C  # pyright: ignore[reportPrivateUsage]

_OLDEST_TRITON = (3, 4)
_OLDEST_CAPABILITY = (8, 0)

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}

_compiled: dict[tuple[Any, ...], Any] = {}


class Options(NamedTuple):
    """What the compiler is told about a kernel besides its source."""

    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None


_DEFAULT_OPTIONS = Options()


class DeviceInfo(NamedTuple):
    """What a configuration may depend on; `architecture` is "cuda:90", "hip:gfx942" or "other"."""

    architecture: str
    multiprocessors: int
    shared_memory: int

    @property
    def has_tma(self) -> bool:
        return self.architecture.startswith("cuda:") and int(self.architecture[5:]) >= 90


class Launch:
    """A kernel with everything that a repeated call does not change: `launch(tensors)` runs it.

    A kernel's parameters are pointers, then numbers, then constants. Pointers that are None are constants.

    Args:
        kernel: decorated with `triton.jit`, with every number that varies in `do_not_specialize`.
        programs: how many programs to run; the grid has one axis, since the others end at 65,535.
        numbers: values of the parameters after the pointers.
        constants: values of the parameters after those.
        options: of the compiler.
        scratch: the kernel makes tensor descriptors, which need memory of its own.
    """

    __slots__ = ("_arguments", "_kernel", "_key", "_options", "_ready", "_scratch", "programs")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: tuple[int | float, ...],
        constants: tuple[Any, ...],
        options: Options = _DEFAULT_OPTIONS,
        scratch: bool = False,
    ):
        self.programs = programs
        self._kernel = kernel
        self._arguments = (*numbers, *constants)
        self._options = {name: value for name, value in options._asdict().items() if value is not None}
        self._scratch = scratch
        # Two launches with equal keys have the same compiled kernel: an int counts by what Triton tells apart.
        classes = tuple((n == 1, n % 16 == 0, n >= 2**31) if isinstance(n, int) else float for n in numbers)
        self._key = (kernel, classes, constants, options)
        self._ready: dict[Any, tuple[Any, ...]] = {}

    def __call__(self, tensors: tuple[torch.Tensor | int | None, ...], device: torch.device) -> None:
        """Runs the kernel on the current stream of `device`, where the tensors are; an int is one of `pieces`."""
        if _recording is not None:
            _recording[1].append((self, tensors))
            return
        if device.type == "cpu":
            _interpret(self._kernel, self.programs, tensors, self._arguments)
            return
        if device.type == "cuda":
            index = device.index
            if index != _torch._cuda_getDevice():
                with torch.cuda.device(index):
                    self._run(tensors, index, _torch._cuda_getCurrentRawStream(index))
            else:
                self._run(tensors, index, _torch._cuda_getCurrentRawStream(index))
            return
        with torch.get_device_module(device).device(device):
            from triton.runtime import driver

            active: Any = driver.active
            self._run(tensors, device.index, active.get_current_stream(device.index))

    def key(self, tensors: tuple[torch.Tensor | int | None, ...]) -> tuple[Any, ...]:
        """Launches of equal keys, with pointers that are aligned alike, have the same compiled kernel."""
        dtypes = tuple(
            tensor.dtype if isinstance(tensor, torch.Tensor) else None if tensor is None else torch.float32
            for tensor in tensors
        )
        return self._key, dtypes

    def compile(self, tensors: tuple[torch.Tensor | int | None, ...], target: Any) -> Any:
        """Compiles the kernel for a `triton.backends.compiler.GPUTarget`, of which none needs to be here."""
        from triton import compile
        from triton.compiler import ASTSource

        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        values = (*tensors, *self._arguments)
        for index, (parameter, value) in enumerate(zip(self._kernel.params, values, strict=True)):
            if index < len(tensors) and value is not None:
                dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
                signature[parameter.name] = _POINTERS[dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
            else:
                signature[parameter.name] = parameter.annotation_type or "i32"
        source = ASTSource(self._kernel, signature, constants, attributes)
        return compile(source, target=target, options=self._options)

    def _run(self, tensors: tuple[torch.Tensor | int | None, ...], index: int, stream: int) -> None:
        pointers = [tensor.data_ptr() if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors]
        unaligned = functools.reduce(operator.or_, filter(None, pointers), 0) & 15
        key = index if not unaligned else (index, *[pointer is not None and pointer & 15 == 0 for pointer in pointers])
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = self._compile(tensors, key, index)
        if self._scratch:
            ready[3](_allocate)
        ready[0](self.programs, 1, 1, stream, ready[1], ready[2], None, None, None, *pointers, *self._arguments)

    def _compile(self, tensors: tuple[torch.Tensor | int | None, ...], alignment: Any, index: int) -> tuple[Any, ...]:
        import triton

        key = (self.key(tensors), alignment, index)
        kernel = _compiled.get(key)
        if kernel is None:
            examples = [torch.float32 if isinstance(tensor, int) else tensor for tensor in tensors]
            kernel = self._kernel.warmup(*examples, *self._arguments, grid=(self.programs,), **self._options)
            _compiled[key] = kernel
        run = kernel.run  # loads the kernel, which gives it its function
        return run, kernel.function, kernel.packed_metadata, triton.set_allocator


def layouts(*tensors: torch.Tensor | None) -> tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]:
    """Shape, strides and dtype of each tensor: what `Launch`es made for a call may depend on, besides its numbers."""
    return tuple([None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])


def strides(layout: tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ndim: int) -> tuple[int, ...]:
    """The strides in a layout, or that many zeros for a tensor that was not given."""
    return (0,) * ndim if layout is None else layout[1]


def pieces(scratch: torch.Tensor, offsets: tuple[int, ...]) -> list[Any]:
    """Parts of a contiguous float32 tensor, for `Launch`: pointers as ints, which take no time to make.

    The offsets are multiples of 4 elements. Interpreted kernels get tensors.
    """
    if scratch.device.type == "cpu":
        return [scratch[offset:] for offset in offsets]
    base = scratch.data_ptr()
    return [base + 4 * offset for offset in offsets]


def _interpret(
    kernel: Any, programs: int, tensors: tuple[torch.Tensor | int | None, ...], arguments: tuple[Any, ...]
) -> None:
    """Runs a kernel in Triton's interpreter, with float32 for bfloat16: it truncates what it stores as bfloat16, and
    multiplies matrices of the raw bits. NaN and infinity aren't worth numpy's warnings."""
    import numpy as np
    import triton.language as tl

    arguments = tuple(tl.float32 if argument is tl.bfloat16 else argument for argument in arguments)
    operands = list(tensors)
    narrow: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bfloat16:
            memory = tensor.as_strided((tensor.untyped_storage().nbytes() // 2,), (1,), 0)
            wide = memory.float()
            operands[index] = wide.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            narrow.append((memory, wide, wide.clone()))
    with np.errstate(all="ignore"):
        kernel[(programs,)](*operands, *arguments)
    for memory, wide, before in narrow:
        changed = wide.view(torch.int32) != before.view(torch.int32)
        memory[changed] = wide[changed].bfloat16()


def _allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


_recording: tuple[DeviceInfo, list[tuple[Launch, tuple[torch.Tensor | int | None, ...]]]] | None = None


@contextmanager
def recording(info: DeviceInfo) -> Generator[list[tuple[Launch, tuple[torch.Tensor | int | None, ...]]]]:
    """Context manager: launches are recorded with their tensors, not run, as if the tensors (of any device) were on
    such a GPU. With `Launch.compile`, all that can be launched is compiled without a GPU."""
    global _recording
    launches: list[tuple[Launch, tuple[torch.Tensor | int | None, ...]]] = []
    outer, _recording = _recording, (info, launches)
    try:
        yield launches
    finally:
        _recording = outer


def device_info(device: torch.device) -> DeviceInfo:
    """What the choice of a configuration depends on; CPU tensors get that of a small GPU without TMA."""
    if _recording is not None:
        return _recording[0]
    if device.type == "cuda":
        return _device_info(device.index)
    return DeviceInfo("other", 4, 65536)


@functools.cache
def _device_info(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return DeviceInfo(f"hip:{properties.gcnArchName.split(':')[0]}", properties.multi_processor_count, 65536)
    shared_memory = properties.shared_memory_per_block_optin
    return DeviceInfo(
        f"cuda:{properties.major * 10 + properties.minor}", properties.multi_processor_count, shared_memory
    )


# Whether it can run here


def why_unavailable(device: torch.device) -> str | None:
    """None if kernels can run on tensors of this device, else the reason and what mends it."""
    reason = _why_no_package()
    if reason is not None:
        return reason
    if device.type == "cpu":
        if os.environ.get(INTERPRET_VARIABLE, "0") in ("", "0"):
            return (
                "Triton kernels run CPU tensors only in Triton's interpreter: set "
                f"{INTERPRET_VARIABLE}=1 before the first call (slow, for tests)"
            )
        return None
    if os.environ.get(INTERPRET_VARIABLE, "0") not in ("", "0"):
        return f"{INTERPRET_VARIABLE} is set, which runs CPU tensors only: unset it"
    if device.type not in ("cuda", "xpu"):
        return f"Triton kernels run on GPUs, not on {device.type!r} tensors"
    return _why_no_gpu(device.type, device.index)


@functools.cache
def _why_no_package() -> str | None:
    for package in ("triton", "pytorch-triton-rocm", "pytorch-triton-xpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_TRITON:
            return f"{package} {version} is too old: pip install -U 'triton>={'.'.join(map(str, _OLDEST_TRITON))}'"
        return None
    return "the package triton is missing: pip install 'triton>=3.4'"


@functools.cache
def _why_no_gpu(device_type: str, index: int | None) -> str | None:
    if not torch.get_device_module(device_type).is_available():
        return f"torch sees no {device_type} device: install a build of torch for it and a driver"
    if device_type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(index)
        if capability < _OLDEST_CAPABILITY:
            name = torch.cuda.get_device_name(index)
            return f"{name} has compute capability {capability[0]}.{capability[1]}: Triton needs 8.0 (Ampere) or newer"
    return None


register_backend(
    Backend(name="triton", why_unavailable=why_unavailable, priority={"cuda": 10, "xpu": 10}, module="triton_")
)
