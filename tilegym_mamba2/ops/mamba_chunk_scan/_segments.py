"""Segments of rows that are too few to fill a GPU, where each finds the state that it begins with itself.

To find it takes a part of the time of a walk over the tokens before the segment, so that later segments are shorter:
segment k of n, of `nblocks` blocks in all, begins at block

    min(k * ceil(nblocks / n) + floor(k * (n - k) * skew / 256), nblocks)

which is what the kernels compute.
"""

import itertools


def first_block(segment: int, nsegments: int, nblocks: int, skew: int) -> int:
    """The block that a segment begins with; that of segment `nsegments` is the end."""
    equal = segment * -(-nblocks // nsegments)
    return min(equal + (segment * (nsegments - segment) * skew >> 8), nblocks)


def best_skew(nsegments: int, nblocks: int, entry_cost: float) -> int:
    """The skew for which the segment that takes longest takes least; `entry_cost` for each block before it, or 1."""

    def time(skew: int) -> float:
        firsts = [first_block(segment, nsegments, nblocks, skew) for segment in range(nsegments + 1)]
        return max(entry_cost * first + stop - first for first, stop in itertools.pairwise(firsts))

    # Beyond this the last segment would end before it begins.
    most = 256 * -(-nblocks // nsegments) // max(1, nsegments - 1)
    return min(range(0, most + 1, 8), key=time)
