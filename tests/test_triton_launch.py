"""How the Triton backend enqueues kernels, with launchers that record what they are given: no GPU is needed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton: Any = pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.4'")
driver: Any = pytest.importorskip("triton.backends.nvidia.driver", reason="this Triton is not built for NVIDIA GPUs")

from tilegym_mamba2.backends import triton as backend  # noqa: E402

SCRATCH = 1 << 20


class CudaLauncher(driver.CudaLauncher):
    """The installed Triton's launcher, but for the function that calls the driver."""

    def __init__(self, scratch_bytes: int, launched: list[Any]):
        self.launch = lambda *arguments: launched.append(arguments)
        self.num_ctas = 1
        self.global_scratch_size, self.global_scratch_align = scratch_bytes, 128
        self.profile_scratch_size, self.profile_scratch_align = 0, 1
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.arg_annotations, self.kernel_signature = ["annotations"], b"signature"


class Kernel:
    """A kernel that is never compiled."""

    def __init__(self, scratch_bytes: int = 0):
        self.launched: list[Any] = []
        self.warmed: list[tuple[Any, ...]] = []
        run = CudaLauncher(scratch_bytes, self.launched)
        self.compiled = SimpleNamespace(run=run, function=7, packed_metadata=(4, 1, 0))

    def warmup(self, *arguments: Any, grid: Any, **options: Any) -> Any:
        self.warmed.append(arguments)
        return self.compiled


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch):
    """Without a GPU; and Triton's own is there for whoever else launches kernels."""
    monkeypatch.setattr(backend, "_allocate", lambda size, alignment, stream: SCRATCH)
    yield
    triton.set_allocator(triton.runtime._allocation.NullAllocator())


def known() -> bool:
    return ".".join(triton.__version__.split(".")[:2]) in backend._LAUNCHERS


def pointers_of(launched: tuple[Any, ...], pointers: int, numbers: int) -> tuple[Any, ...]:
    """The pointers among what a launch function got, which ends with so many numbers."""
    values = launched[-1] if isinstance(launched[-1], tuple) else launched
    return values[len(values) - numbers - pointers : len(values) - numbers]


@pytest.mark.parametrize("scratch_bytes", [0, 512])
def test_enqueue_launches_as_triton_does(monkeypatch: pytest.MonkeyPatch, allocator: None, scratch_bytes: int) -> None:
    kernel = Kernel(scratch_bytes)
    enqueue, needed = backend._enqueue(kernel.compiled, 6, (3, 0.5, "constant"))
    scratch = SCRATCH if scratch_bytes else None
    enqueue(11, scratch, [1, None, 2])

    triton.set_allocator(lambda size, alignment, stream: SCRATCH)
    kernel.compiled.run(6, 1, 1, 11, 7, (4, 1, 0), None, None, None, 1, None, 2, 3, 0.5, "constant")
    ours, theirs = kernel.launched
    assert ours == theirs
    assert needed == (6 * scratch_bytes if known() else 0)


TENSOR_MAPS = {"tensordesc_meta": [
    {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64], "fp4_padded": False},
    {"swizzle": 0, "elem_size": 4, "elem_type": 7, "block_size": [1, 32], "fp4_padded": False},
]}  # fmt: skip


@pytest.mark.parametrize("version", ["known", "3.99.0"])
def test_tensor_maps_are_those_that_triton_makes(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A pointer, a tensor map, none, another, a number: what is launched is what Triton launches of descriptors."""
    gluon = pytest.importorskip("triton.experimental.gluon.language", reason="this Triton has no Gluon of this kind")
    encoded: list[int] = []

    def fill(pointer: int, *values: Any) -> tuple[Any, ...]:
        encoded.append(pointer)
        return "map", pointer, *values

    encode = dict.fromkeys(("fill_tma_descriptor", "fill_tma_descriptor_tiled"), fill)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=SimpleNamespace(**encode)))
    if version != "known":
        monkeypatch.setattr(triton, "__version__", version)
    swizzled, plain = gluon.NVMMASharedLayout(128, 16, 2), gluon.NVMMASharedLayout(0, 32, 2)
    tiles = (
        backend.Tiles(torch.bfloat16, (3, 640), (1024, 1), (1, 64), swizzled),
        None,
        backend.Tiles(torch.float32, (7, 32), (32, 1), (1, 32), plain),
    )
    kernel = Kernel()
    kernel.compiled.metadata = SimpleNamespace(**TENSOR_MAPS)
    signature = {0: "*fp32", 1: "tensordesc<bf16[1, 64]>", 2: "constexpr", 3: "tensordesc<fp32[1, 32]>", 4: "i32"}
    run = kernel.compiled.run
    run.launch = driver.wrap_handle_tensordesc(run.launch, signature, TENSOR_MAPS["tensordesc_meta"])
    enqueue, _ = backend._enqueue(kernel.compiled, 6, (5,), tiles=tiles)
    enqueue(11, None, [16, 32, None, 48])

    first, second = (
        backend._descriptor(one, backend._Base(one.dtype, pointer)) for one, pointer in ((tiles[0], 32), (tiles[2], 48))
    )
    run(6, 1, 1, 11, 7, (4, 1, 0), None, None, None, 16, first, None, second, 5)
    ours, theirs = ([list(one) if isinstance(one, tuple) else one for one in launched] for launched in kernel.launched)
    assert ours == theirs
    assert [repr(kernel.launched[0]).count(f"('map', {pointer}, ") for pointer in (32, 48)] == [1, 1]
    encoded.clear()
    for pointer in (32, 64):  # the same memory again, and other memory
        enqueue(11, None, [16, pointer, None, 48])
    again, other = kernel.launched[2:]
    assert again == kernel.launched[0]
    assert repr(other) == repr(again).replace("('map', 32, ", "('map', 64, ")
    assert encoded == ([64] if version == "known" and known() else [32, 48, 64, 48])


def test_an_unknown_triton_is_asked_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    monkeypatch.setattr(backend, "_allocate", lambda size, alignment, stream: (size, alignment, stream))
    kernel = Kernel(512)
    enqueue, needed = backend._enqueue(kernel.compiled, 6, ())
    enqueue(11, None, [1, 2])
    assert needed == 0
    assert (6 * 512, 128, 11) in kernel.launched[0]


def test_launches_share_memory_without_overlap() -> None:
    first, second = Kernel(), Kernel(512)
    launches = backend.Launches(
        "x y",
        (
            (backend.Launch(first, 3, (5,), (True,)), "x y piece out"),
            (backend.Launch(second, 3, (5,), (True,)), "x other piece out"),
        ),
        (backend.Result("out", (2, 3, 4), torch.bfloat16),),
        {"piece": (65, torch.float32), "other": (100, torch.float16)},
    )
    x, device = torch.zeros(8), torch.device("cpu")
    (out,) = launches._run((x, None), device, 11)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 3, 4), torch.bfloat16, True)

    x_ptr, y_ptr, piece, out_ptr = pointers_of(first.launched[0], 4, 2)
    assert (x_ptr, y_ptr, out_ptr) == (x.data_ptr(), None, out.data_ptr())
    x_ptr, other, again, out_ptr = pointers_of(second.launched[0], 4, 2)
    assert (x_ptr, again, out_ptr) == (x.data_ptr(), piece, out.data_ptr())
    assert other == piece + 512  # 65 elements end at 260 bytes
    if known():
        assert other + 256 in second.launched[0]  # the kernel's own memory
    assert [len(kernel.warmed) for kernel in (first, second)] == [1, 1]
    assert first.warmed[0][:4] == (x, None, torch.float32, torch.bfloat16)
    assert second.warmed[0][:3] == (x, torch.float16, torch.float32)


def test_alignment_chooses_the_compiled_kernel() -> None:
    kernel = Kernel()
    launch = backend.Launch(kernel, 3, (), ())
    launches = backend.Launches("x", ((launch, "x out"),), (backend.Result("out", (4,), torch.float32),), {})
    memory, device = torch.zeros(16), torch.device("cpu")
    for start in (0, 4, 1, 5, 8):  # 16 bytes aligned, or 4
        launches._run((memory[start:],), device, 11)
    assert len(kernel.warmed) == 2
    assert [pointers_of(launched, 2, 0)[0] - memory.data_ptr() for launched in kernel.launched] == [0, 16, 4, 20, 32]


def test_only_launches_that_follow_and_wait_start_early() -> None:
    waiting, other, last = Kernel(), Kernel(), Kernel()
    for kernel in (waiting, other, last):
        kernel.compiled.run.launch_pdl = False
    launches = backend.Launches(
        "x",
        (
            (backend.Launch(waiting, 3, (), (), early=True), "x out"),
            (backend.Launch(other, 3, (), ()), "x out"),
            (backend.Launch(last, 3, (), (), early=True), "x out"),
        ),
        (backend.Result("out", (4,), torch.float32),),
        {},
    )
    launches._run((torch.zeros(8),), torch.device("cpu"), 11)
    # grid, stream, function, whether the grid is cooperative, whether it starts early
    early = [kernel.launched[0][6] for kernel in (waiting, other, last)]
    assert early == ([False, False, True] if known() else [False, False, False])
    alone = backend.Launch(last, 3, (), (), early=True)
    alone._run((torch.zeros(8), torch.zeros(4)), torch.device("cpu"), 11)
    assert last.launched[1][6] is False
