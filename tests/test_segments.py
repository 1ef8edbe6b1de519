"""How rows are cut where each segment finds the state that it begins with itself."""

import itertools

import pytest

from tilegym_mamba2.ops.mamba_chunk_scan._segments import best_skew, first_block


def _times(nsegments: int, nblocks: int, skew: int) -> list[float]:
    """Of each segment, in walks over one block: its own blocks, and 0.3 for each before it."""
    firsts = [first_block(segment, nsegments, nblocks, skew) for segment in range(nsegments + 1)]
    return [stop - first + 0.3 * first for first, stop in itertools.pairwise(firsts)]


@pytest.mark.parametrize("nblocks", [1, 2, 3, 7, 16, 17, 32, 100])
def test_segments_make_the_row(nblocks: int) -> None:
    for nsegments in range(1, nblocks + 1):
        skew = best_skew(nsegments, nblocks)
        firsts = [first_block(segment, nsegments, nblocks, skew) for segment in range(nsegments + 1)]
        assert firsts[0] == 0
        assert firsts[-1] == nblocks
        assert firsts == sorted(firsts)
        assert max(_times(nsegments, nblocks, skew)) <= max(_times(nsegments, nblocks, 0))


def test_later_segments_are_shorter() -> None:
    """Two segments of 32 blocks take least as 19 or 20 and the rest: 0.3 * 19 + 13 is just below 19."""
    skew = best_skew(2, 32)
    assert first_block(1, 2, 32, skew) in (19, 20)
    assert max(_times(2, 32, skew)) < 20 < max(_times(2, 32, 0))
