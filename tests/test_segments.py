"""How rows are cut where each segment finds the state that it begins with itself."""

import itertools

import pytest

from tilegym_mamba2.ops.mamba_chunk_scan._segments import best_skew, first_block


def _times(nsegments: int, nblocks: int, skew: int, entry_cost: float) -> list[float]:
    """Of each segment, in walks over one block: its own blocks, and `entry_cost` for each before it."""
    firsts = [first_block(segment, nsegments, nblocks, skew) for segment in range(nsegments + 1)]
    return [stop - first + entry_cost * first for first, stop in itertools.pairwise(firsts)]


@pytest.mark.parametrize("entry_cost", [0.3, 0.5])
@pytest.mark.parametrize("nblocks", [1, 2, 3, 7, 16, 17, 32, 100])
def test_segments_make_the_row(nblocks: int, entry_cost: float) -> None:
    for nsegments in range(1, nblocks + 1):
        skew = best_skew(nsegments, nblocks, entry_cost)
        firsts = [first_block(segment, nsegments, nblocks, skew) for segment in range(nsegments + 1)]
        assert firsts[0] == 0
        assert firsts[-1] == nblocks
        assert firsts == sorted(firsts)
        times, equal = (_times(nsegments, nblocks, one, entry_cost) for one in (skew, 0))
        assert max(times) <= max(equal)


def test_later_segments_are_shorter() -> None:
    """Two segments of 32 blocks take least as 19 or 20 and the rest: 0.3 * 19 + 13 is just below 19."""
    skew = best_skew(2, 32, 0.3)
    assert first_block(1, 2, 32, skew) in (19, 20)
    assert max(_times(2, 32, skew, 0.3)) < 20 < max(_times(2, 32, 0, 0.3))
    assert first_block(1, 2, 32, best_skew(2, 32, 0.5)) in (21, 22)  # 0.5 * 21 + 11
