"""What lies between an op and its cuTile kernels: plans, one piece of memory, 64-bit offsets."""

import itertools
from typing import Any

import pytest
import torch

ct = pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from tilegym_mamba2.backends import cutile  # noqa: E402
from tilegym_mamba2.ops.mamba_chunk_scan import cutile_  # noqa: E402


@ct.kernel
def _two_arrays_kernel(first: Any, second: Any) -> None:
    pass


def _launch(dependent: bool = False) -> cutile.Launch:
    return cutile.Launch(_two_arrays_kernel, (1,), (), dependent=dependent)


def test_launches_share_arrays_that_are_apart_and_aligned() -> None:
    results = {"y": ((2, 2), torch.float32)}
    scratch = {"a": ((3, 5), torch.float32), "b": ((7,), torch.bfloat16), "c": ((2, 2, 2), torch.float16)}
    pairs = ("x a", "a b", "b c", "c y", "x -")
    launches = cutile.Launches("x absent", [(_launch(), pair) for pair in pairs], results, scratch)
    x = torch.empty(4)
    with cutile.recording((9, 0)) as recorded:
        (y,) = launches((x, None))
    given = [launch.arguments for launch in recorded.launches]
    assert [first is x for first, _ in given] == [True, False, False, False, True]
    assert given[3][1] is y
    assert given[4][1] is cutile.ABSENT
    arrays = [second for _, second in given[:3]]
    assert [(tuple(array.shape), array.dtype) for array in arrays] == list(scratch.values())
    assert all(array.is_contiguous() for array in arrays)
    assert [array.data_ptr() for array in arrays] == [first.data_ptr() for first, _ in given[1:4]]
    offsets = [array.data_ptr() - arrays[0].data_ptr() for array in arrays]
    assert all(offset % 256 == 0 for offset in offsets)
    for value, array in enumerate(arrays):
        array.fill_(value)
    assert all((array == value).all() for value, array in enumerate(arrays))


def test_a_piece_describes_a_contiguous_array() -> None:
    piece = cutile.Piece(4096, cutile.Piece.layout((2, 3), torch.float32))
    interface = piece.__cuda_array_interface__
    described = {key: interface[key] for key in ("data", "shape", "strides", "typestr")}
    assert described == {"data": (4096, False), "shape": (2, 3), "strides": None, "typestr": "<f4"}
    assert piece.numel == 6


def test_plans_are_remembered_but_not_while_recording() -> None:
    made = itertools.count()

    @cutile.planned
    def plan(layouts: object, flag: bool) -> int:
        return next(made)

    x = torch.empty(4, 6)
    assert plan(cutile.layouts(x, None), True) == plan(cutile.layouts(torch.empty(4, 6), None), True) == 0
    for other in (x.t(), x[:3], x.half(), None):
        assert plan(cutile.layouts(other, None), True) > 0
    assert plan(cutile.layouts(x, None), False) > 0
    with cutile.recording((9, 0)):
        assert plan(cutile.layouts(x, None), True) > 0
    assert plan(cutile.layouts(x, None), True) == 0


@pytest.mark.parametrize("absent_first", [True, False])
def test_every_array_of_a_call_is_widened(absent_first: bool) -> None:
    """An array that one call lacks is an int there; another call's is not left with 32-bit offsets for that."""
    far = torch.empty(2, 2**31, device="meta")
    calls = [(far, cutile.ABSENT), (far, far)]
    kernels = {}
    for arguments in calls if absent_first else reversed(calls):
        kernel = cutile.specialised(_two_arrays_kernel, arguments, cutile.Hints(), True)
        kernels[arguments[1] is far] = [
            None if node.array is None else node.array.index_dtype
            for node in kernel._annotated_function.parameter_annotations
        ]
    assert kernels[True] == [ct.int64, ct.int64]
    assert kernels[False][0] == ct.int64


def test_a_launch_is_wide_if_an_array_is() -> None:
    near, far = torch.empty(2, 8, device="meta"), torch.empty(2, 2**31, device="meta")
    with cutile.recording((9, 0)) as recorded:
        for arrays in ((near, near), (near, far), (far, cutile.ABSENT)):
            cutile.Launch(_two_arrays_kernel, (1,), ())(arrays)
    assert [launch.wide for launch in recorded.launches] == [False, True, True]


@pytest.mark.parametrize(
    ("seqlen", "nheads", "packed", "waiting"),
    [
        (4096, 8, False, "_part_states_kernel _scan_kernel"),
        (256, 200, False, ""),
        (4096, 8, True, ""),
    ],
)
def test_what_is_launched_early_waits(seqlen: int, nheads: int, packed: bool, waiting: str) -> None:
    """Each kernel waits for the one before it, so that the last has waited for all; the first is not launched early."""
    x, dt = torch.empty(1, seqlen, nheads, 64, device="meta"), torch.empty(1, seqlen, nheads, device="meta")
    B = torch.empty(1, seqlen, 1, 128, device="meta")
    A = torch.empty(nheads, device="meta")
    cu_seqlens = torch.empty(3, dtype=torch.int32, device="meta") if packed else None
    with cutile.recording((9, 0)) as recorded, torch.no_grad():
        cutile_.mamba_chunk_scan(
            x, dt, A, B, B, 64, None, None, None, None, None, cu_seqlens, False, (0.0, float("inf")), None
        )
    early = [launch.kernel._pyfunc.__name__ for launch in recorded.launches if launch.dependent]
    assert early == waiting.split()
    assert not recorded.launches[0].dependent
