"""A control for compute-sanitizer's memcheck: a cuTile kernel that does little but load from slices of an array.

cuTile makes a TMA descriptor on the device for a slice, and memcheck takes its atomics on it for accesses out of
bounds. What it reports of this kernel, whose result is compared with torch's, is therefore not of the package's making.
"""

import itertools
import sys

import cuda.tile as ct
import torch

BLOCK_TOKENS, HEADDIM = 64, 64


@ct.kernel
def _products_of_slices_kernel(source, offsets, products, BLOCK_TOKENS: ct.Constant[int], HEADDIM: ct.Constant[int]):
    sequence = ct.bid(0)
    part = source.slice(axis=0, start=ct.gather(offsets, sequence), stop=ct.gather(offsets, sequence + 1))
    x = ct.load(
        part, (0, 0), (BLOCK_TOKENS, HEADDIM), padding_mode=ct.PaddingMode.ZERO, latency=4, allow_tma=True
    )  # (BLOCK_TOKENS, HEADDIM)
    product = ct.mma(x, ct.transpose(x), ct.zeros((BLOCK_TOKENS, BLOCK_TOKENS), ct.float32))
    ct.store(products, (sequence, 0, 0), product.reshape((1, BLOCK_TOKENS, BLOCK_TOKENS)))


def main() -> int:
    offsets = torch.tensor([0, 10, 74, 300, 364], device="cuda", dtype=torch.int32)
    source = torch.randn(1000, HEADDIM, device="cuda", dtype=torch.bfloat16)
    products = torch.empty(len(offsets) - 1, BLOCK_TOKENS, BLOCK_TOKENS, device="cuda")
    arguments = (source, offsets, products, BLOCK_TOKENS, HEADDIM)
    ct.launch(torch.cuda.current_stream(), (len(products),), _products_of_slices_kernel, arguments)
    wrong = 0
    for product, (first, last) in zip(products, itertools.pairwise(offsets.tolist()), strict=True):
        x = torch.zeros(BLOCK_TOKENS, HEADDIM, device="cuda")
        rows = source[first : min(last, first + BLOCK_TOKENS)]
        x[: len(rows)] = rows
        wrong += not torch.allclose(product, x @ x.T, rtol=1e-3, atol=1e-3)
    sys.stdout.write(f"{wrong} failed, {len(products) - wrong} passed\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
