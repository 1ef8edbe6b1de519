"""The Triton backend: whether it can run here, and the one way by which its kernels are launched.

Triton's own launch path costs more host time than many of these kernels run, so a `Launch` keeps the compiled
kernel and hands it the pointers directly, and `Launches` allocate once for several. CPU tensors go to Triton's
interpreter, which runs the same source.
"""

import functools
import importlib.metadata
import inspect
import itertools
import operator
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from tilegym_mamba2 import tuning
from tilegym_mamba2.backends._compile import at_once
from tilegym_mamba2.backends._memory import contiguous, empty_on
from tilegym_mamba2.registry import Backend, no_collection, register_backend

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

_Candidate = TypeVar("_Candidate")

_compiled: dict[tuple[Any, ...], Any] = {}

_MAPS_KEPT = 64  # of each tensor of a launch: most models have no more layers


class Options(NamedTuple):
    """What the compiler is told about a kernel besides its source."""

    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None


_DEFAULT_OPTIONS = Options()


class Tiles(NamedTuple):
    """How TMA reads or writes blocks of a tensor, what CUDA calls a tensor map; the last axis is contiguous.

    Args:
        dtype: of the tensor.
        shape: of the tensor; beyond it 0 is read, and nothing is written.
        strides: of the tensor, in elements.
        block: its shape.
        layout: of the block in shared memory, for kernels in Gluon.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any = None


class DeviceInfo(NamedTuple):
    """What a configuration may depend on; `architecture` is "cuda:90", "hip:gfx942" or "other"; `name` is the GPU's."""

    architecture: str
    multiprocessors: int
    shared_memory: int
    name: str = ""

    @property
    def has_tma(self) -> bool:
        return self.architecture.startswith("cuda:") and int(self.architecture[5:]) >= 90


class _Runnable:
    """Calls go to the GPU's current stream, to the interpreter, or into a recording."""

    __slots__ = ()

    def __call__(self, tensors: tuple[torch.Tensor | None, ...], device: torch.device) -> Any:
        """Runs on the current stream of `device`, where the tensors are."""
        if _recording is not None or device.type == "cpu":
            return self._watch(tensors, device)
        index: int = device.index
        if device.type == "cuda":
            if index == _torch._cuda_getDevice():
                return self._run(tensors, device, _torch._cuda_getCurrentRawStream(index))
            with torch.cuda.device(index):
                return self._run(tensors, device, _torch._cuda_getCurrentRawStream(index))
        with torch.get_device_module(device).device(device):
            from triton.runtime import driver

            active: Any = driver.active
            return self._run(tensors, device, active.get_current_stream(index))

    def _run(self, tensors: tuple[torch.Tensor | None, ...], device: torch.device, stream: int) -> Any:
        raise NotImplementedError

    def _watch(self, tensors: tuple[torch.Tensor | None, ...], device: torch.device) -> Any:
        """What a call does when kernels are interpreted or recorded."""
        raise NotImplementedError


class Launch(_Runnable):
    """A kernel with everything that a repeated call does not change: `launch(tensors, device)` runs it.

    A kernel's parameters are pointers, then tiles, then numbers, then constants. Pointers that are None are constants.

    Args:
        kernel: decorated with `triton.jit`, with every number that varies in `do_not_specialize`.
        programs: how many programs to run; the grid has one axis, since the others end at 65,535.
        numbers: values of the parameters after the pointers.
        constants: values of the parameters after those.
        options: of the compiler.
        early: whether `Launches` may start it while those before it still run: every program of the kernel calls
            `wait_for_previous` before it touches what they read or write.
        tiles: how the kernel reads or writes the last of its tensors, which may be among the pointers too; None is a
            constant.
    """

    __slots__ = ("_arguments", "_early", "_kernel", "_key", "_options", "_ready", "_tiles", "programs")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: tuple[int | float, ...],
        constants: tuple[Any, ...],
        options: Options = _DEFAULT_OPTIONS,
        early: bool = False,
        tiles: tuple[Tiles | None, ...] = (),
    ):
        self.programs = programs
        self._early = early
        self._tiles = tiles
        self._kernel = kernel
        self._arguments = (*numbers, *constants)
        self._options = {name: value for name, value in options._asdict().items() if value is not None}
        # Two launches with equal keys have the same compiled kernel: an int counts by what Triton tells apart.
        classes = tuple((n == 1, n % 16 == 0, n >= 2**31) if isinstance(n, int) else float for n in numbers)
        blocks = tuple(None if one is None else (one.block, one.layout) for one in tiles)
        self._key = (kernel, classes, constants, options, blocks)
        self._ready: dict[Any, tuple[_Enqueue, int]] = {}

    def key(self, tensors: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
        """Launches of equal keys, with pointers that are aligned alike, have the same compiled kernel."""
        return self._key, tuple([None if tensor is None else tensor.dtype for tensor in tensors])

    def compile(self, tensors: tuple[torch.Tensor | None, ...], target: Any) -> Any:
        """Compiles the kernel for a `triton.backends.compiler.GPUTarget`, of which none needs to be here."""
        from triton import compile
        from triton.runtime.jit import mangle_type

        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        values = (*self._operands(tensors), *self._arguments)
        for index, (parameter, value) in enumerate(zip(self._kernel.params, values, strict=True)):
            if hasattr(value, "block_shape"):  # a descriptor
                signature[parameter.name] = mangle_type(value)
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = _POINTERS[value.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
            else:
                signature[parameter.name] = parameter.annotation_type or "i32"
        if self._kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource as Source
        else:
            from triton.compiler import ASTSource as Source
        source = Source(self._kernel, signature, constants, attributes)
        return compile(source, target=target, options=self._options)

    def prepared(
        self, tensors: tuple[Any, ...], alignment: Any, index: int, follows: bool = False
    ) -> tuple["_Enqueue", int]:
        """A function that enqueues the compiled kernel, and how many bytes of memory of its own that needs.

        Args:
            tensors: as in a call; a dtype stands for an aligned tensor.
            alignment: tells calls apart whose pointers are aligned differently.
            index: of the device, which is the current one.
            follows: whether it is always enqueued after another launch whose memory it shares.
        """
        key = self._compiled_key(tensors, alignment, index)
        kernel = _compiled.get(key)
        if kernel is None:
            operands = self._operands(tensors)
            kernel = self._kernel.warmup(*operands, *self._arguments, grid=(self.programs,), **self._options)
            _compiled[key] = kernel
        return _enqueue(kernel, self.programs, self._arguments, follows and self._early, self._tiles)

    def _operands(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """What stands for the tensors, or their dtypes, when the kernel is compiled."""
        return _described(tensors, self._tiles, lambda one, _: _Base(one.dtype, 0))

    def is_compiled(self, tensors: tuple[Any, ...], alignment: Any, index: int) -> bool:
        """Whether `prepared` with these arguments has no kernel to compile."""
        return self._compiled_key(tensors, alignment, index) in _compiled

    def _compiled_key(self, tensors: tuple[Any, ...], alignment: Any, index: int) -> tuple[Any, ...]:
        dtypes = tuple([tensor.dtype if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors])
        return self._key, dtypes, alignment, index

    def _run(self, tensors: tuple[torch.Tensor | None, ...], device: torch.device, stream: int) -> None:
        pointers, unaligned = _pointers(tensors)
        alignment = _alignment(pointers) if unaligned else ()
        ready = self._ready.get((device, alignment))
        if ready is None:
            ready = self._ready[device, alignment] = self.prepared(tensors, alignment, device.index)
        enqueue, scratch_bytes = ready
        if scratch_bytes:
            scratch = torch.empty(scratch_bytes, dtype=torch.int8, device=device)
            enqueue(stream, scratch.data_ptr(), pointers)
        else:
            enqueue(stream, None, pointers)

    def _watch(self, tensors: tuple[torch.Tensor | None, ...], device: torch.device) -> None:
        if _recording is not None:
            _recording[1].append((self, tensors))
        else:
            _interpret(self._kernel, self.programs, tensors, self._arguments, self._tiles)


class Result(NamedTuple):
    """A contiguous tensor that `Launches` make."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Launches(_Runnable):
    """Kernels that run one after the other on common tensors: `launches(tensors, device)` returns the results.

    Args:
        arguments: names of the tensors that a call passes, separated by spaces.
        launches: each with the names of its pointers.
        results: what a call makes and returns.
        scratch: what only the launches need; number of elements and dtype by name.
    """

    __slots__ = ("_dtypes", "_launches", "_offsets", "_ready", "_results")

    def __init__(
        self,
        arguments: str,
        launches: tuple[tuple[Launch, str], ...],
        results: tuple[Result, ...],
        scratch: dict[str, tuple[int, torch.dtype]],
    ):
        names = [*arguments.split(), *(result.name for result in results), *scratch]
        self._launches = [(launch, [names.index(name) for name in pointers.split()]) for launch, pointers in launches]
        self._results = results
        self._dtypes = [dtype for _, dtype in scratch.values()]
        # Each piece of scratch begins at a multiple of 256 bytes, as allocations do.
        sizes = (-(-size * dtype.itemsize // 256) * 256 for size, dtype in scratch.values())
        self._offsets = list(itertools.accumulate(sizes, initial=0))
        self._ready: dict[Any, tuple[Any, ...]] = {}

    def _run(self, tensors: tuple[torch.Tensor | None, ...], device: torch.device, stream: int) -> list[torch.Tensor]:
        pointers, unaligned = _pointers(tensors)
        alignment = _alignment(pointers) if unaligned else ()
        ready = self._ready.get((device, alignment))
        if ready is None:
            ready = self._ready[device, alignment] = self._prepare(tensors, alignment, device)
        empty, layouts, scratch_layout, offsets, steps = ready
        results = [empty(*layout) for layout in layouts]
        pointers += [result.data_ptr() for result in results]
        scratch = empty(*scratch_layout)
        base = scratch.data_ptr()
        pointers += [base + offset for offset in offsets]
        for enqueue, pick, offset in steps:
            enqueue(stream, base + offset, pick(pointers))
        return results

    def _prepare(self, tensors: tuple[torch.Tensor | None, ...], alignment: Any, device: torch.device) -> Any:
        made = [result.dtype for result in self._results]
        values = (*tensors, *made, *self._dtypes)
        end = self._offsets[-1]
        steps: list[tuple[Any, Any, int]] = []
        with no_collection():
            self._compile(values, alignment, device)
        for position, (launch, indices) in enumerate(self._launches):
            pick = operator.itemgetter(*indices)
            # Not the first: another call's launches may still use the memory.
            enqueue, scratch_bytes = launch.prepared(pick(values), alignment, device.index, position > 0)
            steps.append((enqueue, pick, end))
            end += -(-scratch_bytes // 256) * 256
        layouts = [(shape, contiguous(shape), dtype) for _, shape, dtype in self._results]
        return empty_on(device), layouts, ((end,), (1,), torch.int8), self._offsets[:-1], steps

    def _compile(self, values: tuple[Any, ...], alignment: Any, device: torch.device) -> None:
        """Compiles and loads at once what is not yet compiled: one kernel takes seconds."""
        calls = [(launch, operator.itemgetter(*indices)(values)) for launch, indices in self._launches]
        waiting = [
            functools.partial(launch.prepared, tensors, alignment, device.index)
            for launch, tensors in calls
            if not launch.is_compiled(tensors, alignment, device.index)
        ]
        if len(waiting) > 1 and device.type != "cpu":
            from triton.runtime import driver

            active: Any = driver.active  # found here, once, and not by every thread
            active.get_current_device()
        at_once(waiting, device)

    def _watch(self, tensors: tuple[torch.Tensor | None, ...], device: torch.device) -> list[torch.Tensor]:
        results = [torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in self._results]
        sizes = (stop - start for start, stop in itertools.pairwise(self._offsets))
        scratch = [
            torch.empty(size // dtype.itemsize, dtype=dtype, device=device)
            for size, dtype in zip(sizes, self._dtypes, strict=True)
        ]
        values = (*tensors, *results, *scratch)
        for launch, indices in self._launches:
            launch(tuple([values[index] for index in indices]), device)
        return results


def _pointers(tensors: tuple[torch.Tensor | None, ...]) -> tuple[list[int | None], int]:
    """The tensors' pointers, and not 0 if one is not 16 bytes aligned."""
    pointers: list[int | None] = []
    bits = 0
    for tensor in tensors:
        if tensor is None:
            pointers.append(None)
        else:
            pointer = tensor.data_ptr()
            bits |= pointer
            pointers.append(pointer)
    return pointers, bits & 15


def _alignment(pointers: list[int | None]) -> tuple[bool, ...]:
    return tuple([pointer is not None and pointer & 15 == 0 for pointer in pointers])


class _Base(NamedTuple):
    """What Triton asks of the tensor that a descriptor is for."""

    dtype: torch.dtype
    pointer: int

    def data_ptr(self) -> int:
        return self.pointer


def _descriptor(tiles: Tiles, base: Any) -> Any:
    """`tiles` of a tensor, or of the `_Base` that stands for one, as Triton has it."""
    arguments = (base, list(tiles.shape), list(tiles.strides), list(tiles.block))
    if tiles.layout is None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(*arguments)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    return GluonDescriptor(*arguments, tiles.layout)


def _described(
    operands: Sequence[Any], tiles: tuple[Tiles | None, ...], base: Callable[[Tiles, Any], Any]
) -> tuple[Any, ...]:
    """The operands, with descriptors for the last, of what `base` makes of each."""
    first = len(operands) - len(tiles)
    return (
        *operands[:first],
        *[
            None if one is None else _descriptor(one, base(one, operand))
            for one, operand in zip(tiles, operands[first:], strict=True)
        ],
    )


def _encoder(kernel: Any, tiles: tuple[Tiles | None, ...]) -> Callable[[Any], Any]:
    """A function that makes a compiled kernel's operands of pointers: tensor maps of the last, as Triton passes them.

    Triton makes them too, in several times the time, and at every launch. A map depends on the pointer alone, and an
    allocator gives the same memory again and again, so that those of the last pointers are kept.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver

    active: Any = driver.active
    utils = active.utils
    encode = getattr(utils, "fill_tma_descriptor", None) or utils.fill_tma_descriptor_tiled
    metadata = iter(kernel.metadata.tensordesc_meta)

    def encoder(one: Tiles) -> Callable[[int], Any]:
        made = next(metadata)
        element = made["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[made["elem_type"]]
        how = (made["swizzle"], *element, list(made["block_size"]), list(one.shape), list(one.strides), 0)
        return functools.lru_cache(_MAPS_KEPT)(lambda pointer: encode(pointer, *how))

    encoders = [None if one is None else encoder(one) for one in tiles]
    sizes = [() if one is None else (*one.shape, *one.strides) for one in tiles]

    def operands(pointers: Any) -> Any:
        values = list(pointers[: -len(tiles)])
        for pointer, map_of, more in zip(pointers[-len(tiles) :], encoders, sizes, strict=True):
            values.append(None if map_of is None else map_of(pointer))
            values += more
        return values

    return operands


_Enqueue = Callable[[int, int | None, Any], None]


def _enqueue(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    early: bool = False,
    tiles: tuple[Tiles | None, ...] = (),
) -> tuple[_Enqueue, int]:
    """A function (stream, address of the kernel's scratch, pointers), and how many bytes that scratch has.

    If `early`, the kernel may start before the one that was enqueued before it has ended.

    The kernel's `run` allocates scratch at every launch, with torch, and takes as long as the launch itself. In the
    versions of Triton that are known here the function beneath it is called.
    """
    import triton

    run = kernel.run  # loads the kernel, which gives it its function
    function, metadata = kernel.function, kernel.packed_metadata
    layout = _LAUNCHERS.get(".".join(triton.__version__.split(".")[:2]))
    if layout is None or type(run).__name__ != "CudaLauncher" or run.profile_scratch_size:

        def generic(stream: int, scratch: int | None, pointers: Any) -> None:
            triton.set_allocator(_allocate)
            operands = _described(pointers, tiles, lambda one, pointer: _Base(one.dtype, pointer))
            run(programs, 1, 1, stream, function, metadata, None, None, None, *operands, *arguments)

        return generic, 0

    launch: Any = run.launch
    operands: Callable[[Any], Any] = tuple
    if any(tiles):  # else all are constants, whose values no launcher looks at
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        operands = _encoder(kernel, tiles)
    cooperative, dependent = run.launch_cooperative_grid, early or run.launch_pdl
    if layout == "arguments last":

        def enqueue(stream: int, scratch: int | None, pointers: Any) -> None:
            launch(
                programs, 1, 1, stream, function, cooperative, dependent, scratch, None, metadata, None, None, None,
                *operands(pointers), *arguments,
            )  # fmt: skip
    else:
        annotations, signature = run.arg_annotations, run.kernel_signature

        def enqueue(stream: int, scratch: int | None, pointers: Any) -> None:
            launch(
                programs, 1, 1, stream, function, cooperative, dependent, metadata, None, None, None, scratch, None,
                annotations, signature, (*operands(pointers), *arguments),
            )  # fmt: skip

    return enqueue, programs * run.num_ctas * run.global_scratch_size


_LAUNCHERS = {"3.5": "arguments last", "3.6": "arguments last", "3.7": "arguments in a tuple"}


def layouts(*tensors: torch.Tensor | None) -> tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]:
    """Shape, strides and dtype of each tensor: what `Launch`es made for a call may depend on, besides its numbers."""
    return tuple([None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])


def strides(layout: tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ndim: int) -> tuple[int, ...]:
    """The strides in a layout, or that many zeros for a tensor that was not given."""
    return (0,) * ndim if layout is None else layout[1]


def _interpret(
    kernel: Any,
    programs: int,
    tensors: tuple[torch.Tensor | None, ...],
    arguments: tuple[Any, ...],
    tiles: tuple[Tiles | None, ...],
) -> None:
    """Runs a kernel in Triton's interpreter, with float32 for bfloat16: it truncates what it stores as bfloat16, and
    multiplies matrices of the raw bits. NaN and infinity aren't worth numpy's warnings."""
    import numpy as np
    import triton.language as tl

    arguments = tuple(tl.float32 if argument is tl.bfloat16 else argument for argument in arguments)
    operands: list[Any] = list(tensors)
    narrow: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bfloat16:
            memory = tensor.as_strided((tensor.untyped_storage().nbytes() // 2,), (1,), 0)
            wide = memory.float()
            operands[index] = wide.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            narrow.append((memory, wide, wide.clone()))
    # There is no shared memory, so that no layout in it holds.
    plain = tuple([None if one is None else one._replace(layout=None) for one in tiles])
    described = _described(operands, plain, lambda _, tensor: tensor)
    with np.errstate(all="ignore"):
        kernel[(programs,)](*described, *arguments)
    for memory, wide, before in narrow:
        changed = wide.view(torch.int32) != before.view(torch.int32)
        memory[changed] = wide[changed].bfloat16()


def _allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


_recording: tuple[DeviceInfo, list[tuple[Launch, tuple[torch.Tensor | None, ...]]]] | None = None


@contextmanager
def recording(info: DeviceInfo) -> Generator[list[tuple[Launch, tuple[torch.Tensor | None, ...]]]]:
    """Context manager: launches are recorded with their tensors, not run, as if the tensors (of any device) were on
    such a GPU. With `Launch.compile`, all that can be launched is compiled without a GPU."""
    global _recording
    launches: list[tuple[Launch, tuple[torch.Tensor | None, ...]]] = []
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
        architecture = f"hip:{properties.gcnArchName.split(':')[0]}"
        return DeviceInfo(architecture, properties.multi_processor_count, 65536, properties.name)
    shared_memory = properties.shared_memory_per_block_optin
    architecture = f"cuda:{properties.major * 10 + properties.minor}"
    return DeviceInfo(architecture, properties.multi_processor_count, shared_memory, properties.name)


# Configuration


def choose(candidates: Sequence[_Candidate], op: str, info: DeviceInfo, **key: int | str) -> _Candidate:
    """The configuration to use among those that suit a call, of which the first is the choice by rule.

    What was tuned for the op, the GPU and the key goes before it: see `tilegym_mamba2.tuning`.
    """
    return tuning.choose(op, place(info), key, candidates)


def starts_early(info: DeviceInfo) -> bool:
    """Whether kernels can start before those that they depend on have ended: EARLY of `wait_for_previous`."""
    import triton

    return not _interpreting() and info.has_tma and ".".join(triton.__version__.split(".")[:2]) in _LAUNCHERS


def place(info: DeviceInfo) -> tuning.Place:
    """Where choices made on a GPU hold."""
    kind, _, number = info.architecture.partition(":")
    architecture = {"cuda": f"sm_{number}", "hip": number}.get(kind, "")
    return tuning.Place("triton", architecture, info.name, _compiler)


@functools.cache
def _compiler() -> str:
    import triton

    return f"triton {triton.__version__}"


# Whether it can run here


def _interpreting() -> bool:
    return os.environ.get(INTERPRET_VARIABLE, "0") not in ("", "0")


def why_unavailable(device: torch.device) -> str | None:
    """None if kernels can run on tensors of this device, else the reason and what mends it."""
    reason = _why_no_package()
    if reason is not None or _recording is not None:
        return reason
    if device.type == "cpu":
        if not _interpreting():
            return (
                "Triton kernels run CPU tensors only in Triton's interpreter: set "
                f"{INTERPRET_VARIABLE}=1 before the first call (slow, for tests)"
            )
        return None
    if _interpreting():
        return f"{INTERPRET_VARIABLE} is set, which runs CPU tensors only: unset it"
    return _why_no_gpu(device)


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
def _why_no_gpu(device: torch.device) -> str | None:
    device_type, index = device.type, device.index
    if device_type not in ("cuda", "xpu"):
        return f"Triton kernels run on GPUs, not on {device_type!r} tensors"
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
