"""The interpreter of cuTile kernels: each family of tile functions against torch, tilegym's kernels as a witness."""

import importlib
import importlib.util
import io
import math
import operator
import pathlib
import sys
import types
from typing import Annotated

import pytest
import torch

ct = pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from tilegym_mamba2.backends.cutile_interpreter import internals, launch, tiles  # noqa: E402

F32, BF16, F16, I32 = torch.float32, torch.bfloat16, torch.float16, torch.int32


def evaluate(function, *inputs):
    """The torch tensor of what a function makes of tiles that hold the inputs."""
    results = []

    @ct.kernel
    def kernel(arrays):
        loaded = [ct.load(array, (0,) * array.ndim, tuple(x.shape)) for array, x in zip(arrays, inputs, strict=True)]
        results.append(function(*loaded))

    launch((1,), kernel, (inputs,))
    return results[0].tensor


def normal(*shape, dtype=F32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_equal(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


# Elementwise functions


@pytest.mark.parametrize(
    "name", ["exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh"]
)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, torch.float64])
def test_unary_function_is_its_float64_value_rounded(name, dtype):
    x = (normal(4, 8).abs() + 0.1).to(dtype)
    wanted = getattr(torch, name)(x.double())
    got = evaluate(getattr(ct, name), x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_unary_function_of_integers_is_float32():
    x = torch.arange(1, 9, dtype=I32)
    assert_equal(evaluate(ct.exp2, x), torch.exp2(x.float()))
    assert evaluate(lambda x: ct.full((2,), ct.log2(8), ct.float32), x).tolist() == [3.0, 3.0]


def test_rounding_to_integers_takes_floats_only():
    x = torch.tensor([-1.5, 1.5])
    assert evaluate(ct.floor, x).tolist() == [-2.0, 1.0]
    assert evaluate(ct.ceil, x).tolist() == [-1.0, 2.0]
    with pytest.raises(ct.TileTypeError, match="int32"):
        evaluate(ct.floor, x.to(I32))


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (operator.add, lambda x, y: x + y),
        (operator.sub, lambda x, y: x - y),
        (operator.mul, lambda x, y: x * y),
        (operator.truediv, lambda x, y: x / y),
        (operator.floordiv, lambda x, y: torch.floor(x / y)),
        (operator.mod, torch.remainder),
        (ct.maximum, torch.maximum),
        (ct.minimum, torch.minimum),
        (ct.atan2, torch.atan2),
        (lambda x, y: ct.add(x, y, flush_to_zero=True, rounding_mode=ct.RoundingMode.RN), lambda x, y: x + y),
        (lambda x, y: ct.mul(x, y) - ct.sub(x, y), lambda x, y: x * y - (x - y)),
        (lambda x, y: abs(-x) ** y, lambda x, y: x.abs() ** y),
        (lambda x, y: 2.0 - 3 * x + 1 / (y * y), lambda x, y: 2.0 - 3 * x + 1 / (y * y)),
    ],
)
def test_binary_function_broadcasts(function, wanted):
    x, y = normal(4, 8), normal(1, 8, seed=1)
    assert_equal(evaluate(function, x, y), wanted(x, y))


def test_constants_round_to_the_dtype_of_a_16_bit_tile():
    x = torch.tensor([3.0, 7.0], dtype=BF16)
    wanted = x * torch.tensor(0.3, dtype=BF16)
    assert not torch.equal(wanted, x * 0.3)
    assert_equal(evaluate(lambda x: x * 0.3, x), wanted)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, I32, torch.int64])
def test_integer_arithmetic_is_pythons(dtype):
    x, y = torch.tensor([-7, 7, -8, 5], dtype=dtype), torch.tensor([3, -3, 2, 5], dtype=dtype)
    cases = {
        operator.add: operator.add,
        operator.floordiv: operator.floordiv,
        operator.mod: operator.mod,
        operator.and_: operator.and_,
        operator.or_: operator.or_,
        operator.xor: operator.xor,
        ct.cdiv: lambda a, b: -(-a // b),
        lambda x, y: divmod(x, y)[1]: operator.mod,
        lambda x, y: ct.divmod(x, y)[0]: operator.floordiv,
        lambda x, y: x << (y & 1): lambda a, b: a << (b & 1),
        lambda x, y: x >> 1: lambda a, b: a >> 1,
        lambda x, y: ~x - abs(x): lambda a, b: ~a - abs(a),
        lambda x, y: ct.maximum(x, y): max,
    }
    for function, on_numbers in cases.items():
        got = evaluate(function, x, y)
        assert got.dtype == dtype
        assert got.tolist() == [on_numbers(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def test_integer_division_is_float32():
    assert_equal(evaluate(operator.truediv, torch.tensor([1, 2]), torch.tensor([3, 4])), torch.tensor([1 / 3, 0.5]))


def test_signed_overflow_raises_and_unsigned_wraps():
    large = torch.tensor([2**31 - 1, 0], dtype=I32)
    for function in (lambda x: x + 1, lambda x: x * 2, lambda x: -x - 2, lambda x: ct.sum(x + ct.astype(x, ct.int32))):
        with pytest.raises(OverflowError, match="int32"):
            evaluate(function, large)
    assert evaluate(lambda x: x.astype(ct.int64) + 1, large).tolist() == [2**31, 1]
    unsigned = torch.tensor([2**32 - 1, 5], dtype=torch.uint32)
    assert evaluate(lambda x: x * 2, unsigned).tolist() == [2**32 - 2, 10]


def test_scalar_index_arithmetic_overflows_int32():
    @ct.kernel
    def kernel(count, out):
        ct.store(out, (0,), count * 65536 * ct.bid(0))

    out = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(OverflowError, match="int32"):
        launch((1,), kernel, (65536, out))
    launch((2,), kernel, (16, out), shuffle_seed=None)
    assert out.item() == 16 * 65536


def test_comparisons_and_nan():
    x, y = torch.tensor([1.0, math.nan, 3.0, 2.0]), torch.tensor([2.0, 2.0, 2.0, 2.0])
    names = {"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq", "not_equal": "ne"}
    for name, on_tensors in names.items():
        assert_equal(evaluate(getattr(ct, name), x, y), getattr(torch, on_tensors)(x, y))
    assert_equal(evaluate(ct.isnan, x), torch.isnan(x))
    assert evaluate(lambda x: (x > 1) & ~(x >= 3) | (x == 1), x).tolist() == [True, False, False, True]
    assert_equal(evaluate(ct.maximum, x, y), torch.fmax(x, y))
    assert_equal(evaluate(lambda x, y: ct.minimum(x, y, propagate_nan=True), x, y), torch.minimum(x, y))
    assert evaluate(ct.max, x).item() == 3.0
    assert evaluate(lambda x: ct.min(x, propagate_nan=True), x).isnan().item()
    assert evaluate(ct.argmax, x).item() == 2
    assert evaluate(lambda x: ct.argmin(x, propagate_nan=True), x).item() == 1


def test_where_promotes_and_broadcasts():
    x = normal(4, 4, dtype=BF16)
    got = evaluate(lambda x: ct.where(ct.arange(4, dtype=ct.int32)[:, None] >= 2, x, 0.0), x)
    assert_equal(got, torch.where(torch.arange(4)[:, None] >= 2, x, torch.zeros((), dtype=BF16)))
    assert evaluate(lambda x: ct.where(x > 0, 1, 0), x).dtype == I32
    assert evaluate(lambda x: ct.where(x > 0, x, ct.zeros((4, 4), ct.float32)), x).dtype == F32


# Promotion


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [
        (BF16, F32, F32),
        (F16, F32, F32),
        (I32, BF16, BF16),
        (torch.int64, F16, F16),
        (torch.int8, I32, I32),
        (torch.uint8, torch.uint32, torch.uint32),
        (torch.bool, I32, I32),
        (torch.bool, F16, F16),
        (F32, torch.float64, torch.float64),
        (F16, BF16, None),
        (I32, torch.uint32, None),
        (torch.uint8, torch.int64, None),
        (torch.bool, torch.bool, None),
    ],
)
def test_promotion_of_two_tiles(left, right, wanted):
    x, y = torch.ones(4, dtype=left), torch.ones(4, dtype=right)
    if wanted is None:
        with pytest.raises(ct.TileTypeError):
            evaluate(operator.add, x, y)
    else:
        assert_equal(evaluate(operator.add, x, y), torch.full((4,), 2, dtype=wanted))


def test_promotion_with_constants():
    def dtype_of(function, dtype):
        return evaluate(function, torch.ones(4, dtype=dtype)).dtype

    assert dtype_of(lambda x: x + 1, BF16) == BF16
    assert dtype_of(lambda x: 2.5 * x, F16) == F16
    assert dtype_of(lambda x: x + 2.5, I32) == F32
    assert dtype_of(lambda x: x + 1, torch.int8) == torch.int8
    assert dtype_of(lambda x: x / 2, torch.int64) == F32
    assert dtype_of(lambda x: x**2, BF16) == BF16
    assert dtype_of(lambda x: x + ct.full((), 1.0, ct.float32), BF16) == F32
    with pytest.raises(ct.TileValueError, match="128"):
        evaluate(lambda x: x + 128, torch.ones(4, dtype=torch.int8))


def test_bitwise_operands_are_integers_of_one_dtype():
    x = torch.ones(4, dtype=I32)
    for function in (lambda x: x & x.astype(ct.int64), lambda x: x | 1.0, lambda x: x.astype(ct.float32) ^ x):
        with pytest.raises(ct.TileTypeError):
            evaluate(function, x)
    with pytest.raises(ct.TileTypeError, match="shift"):
        evaluate(lambda x: x << 1.0, x)


def test_tfloat32_rounds_to_ten_mantissa_bits_and_has_no_arithmetic():
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-12, math.inf, math.nan, 3e38, 0.0])
    wanted = torch.tensor([1 + 2**-10, 1.0, 1 + 2**-9, -1.0, math.inf, math.nan, 3e38, 0.0])
    wanted[6] = tiles.round_to_tfloat32(x)[6]
    assert abs(wanted[6] / 3e38 - 1) < 2**-11
    assert_equal(evaluate(lambda x: x.astype(ct.tfloat32).astype(ct.float32), x), wanted)
    for function in (operator.add, operator.mul):
        with pytest.raises(ct.TileTypeError, match="tfloat32"):
            evaluate(lambda x, function=function: function(x.astype(ct.tfloat32), x.astype(ct.tfloat32)), x)


# Shapes, creation, conversion


def test_shape_functions():
    x = normal(2, 4, 8)
    assert_equal(evaluate(lambda x: ct.permute(x, (2, 0, 1)), x), x.permute(2, 0, 1))
    assert_equal(evaluate(lambda x: x.transpose(0, -1), x), x.transpose(0, 2))
    assert_equal(evaluate(lambda x: ct.transpose(x.reshape((8, -1))), x), x.reshape(8, 8).T)
    assert_equal(evaluate(lambda x: ct.reshape(x, (4, 16)), x), x.reshape(4, 16))
    assert_equal(evaluate(lambda x: x[None, ..., None], x), x[None, ..., None])
    assert_equal(evaluate(lambda x: ct.expand_dims(x, -1), x), x[..., None])
    assert_equal(evaluate(lambda x: ct.broadcast_to(x[:, None], (2, 4, 4, 8)), x), x[:, None].expand(2, 4, 4, 8))
    assert_equal(evaluate(lambda x: ct.cat((x, -x), 1), x), torch.cat((x, -x), 1))
    assert_equal(evaluate(lambda x: ct.extract(x, (1, 0, 3), (1, 2, 2)), x), x[1:, :2, 6:])
    assert_equal(evaluate(lambda x: x.extract((1, 2, 3), ()), x), x[1, 2, 3])
    inserted = x.clone()
    inserted[:, 2:, :] = 5.0
    assert_equal(evaluate(lambda x: x.insert((0, 1, 0), ct.full((2, 2, 8), 5.0, ct.float32)), x), inserted)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ct.zeros((3,), ct.float32),
        lambda x: ct.arange(12, dtype=ct.int32),
        lambda x: ct.full((ct.num_blocks(0),), 0.0, ct.float32),
        lambda x: x.reshape((3, -1)),
        lambda x: ct.cat((x, ct.cat((x, x), 0)), 0),
        lambda x: ct.broadcast_to(x, (16,)),
        lambda x: ct.permute(x, (0, 0)),
        lambda x: ct.extract(x, (0,), (16,)),
        lambda x: x[0],
        lambda x: x[:],
        lambda x: ct.zeros([8], ct.float32),
        lambda x: ct.sum(x, axis=(0, -1)),
        lambda x: x + int(ct.bid(0)),
        lambda x: x + ct.zeros((4,), ct.float32),
        lambda x: x.transpose(),
        lambda x: ct.sum(x, axis=1),
        lambda x: ct.cat((x, x.astype(ct.bfloat16)), 0),
        lambda x: x if x > 0 else -x,
        lambda x: max(x, -x),
    ],
)
def test_wrong_shapes_raise_as_in_the_compiler(function):
    with pytest.raises(ct.TileTypeError):
        evaluate(function, normal(8))


def test_tiles_are_immutable():
    def assign(x):
        x[:] = 0

    with pytest.raises(ct.TileTypeError, match="immutable"):
        evaluate(assign, normal(8))


def test_creation_functions():
    x = torch.zeros(1)
    assert_equal(evaluate(lambda x: ct.arange(4, dtype=ct.int32, start=3, step=-2), x), torch.arange(3, -5, -2).int())
    assert_equal(evaluate(lambda x: ct.arange(4, dtype=ct.float16), x), torch.arange(4, dtype=F16))
    assert_equal(evaluate(lambda x: ct.full((2, 4), -0.5, ct.bfloat16), x), torch.full((2, 4), -0.5, dtype=BF16))
    assert_equal(evaluate(lambda x: ct.full((2,), x.item() + 1, torch.float32), x), torch.ones(2))
    assert_equal(evaluate(lambda x: ct.ones(4, ct.int64) + ct.zeros(4, ct.int64), x), torch.ones(4, dtype=torch.int64))
    assert_equal(
        evaluate(lambda x: ct.astile(((1, x.item()), (3, 4)), dtype=ct.float32), x), torch.tensor([[1.0, 0], [3, 4]])
    )


def test_conversions():
    x = torch.tensor([-1.7, 0.0, 2.5, 300.0])
    assert evaluate(lambda x: x.astype(ct.int32), x).tolist() == [-1, 0, 2, 300]
    assert evaluate(lambda x: ct.astype(x, ct.bool_), x).tolist() == [True, False, True, True]
    assert_equal(evaluate(lambda x: x.astype(ct.bfloat16), x), x.to(BF16))
    assert_equal(evaluate(lambda x: ct.bitcast(x, ct.uint32), x), x.view(torch.uint32))
    assert_equal(evaluate(lambda x: ct.unpack_from_bytes(ct.pack_to_bytes(x), ct.float32), x), x)
    with pytest.raises(ct.TileTypeError, match="bitcast"):
        evaluate(lambda x: ct.bitcast(x, ct.int64), x)
    with pytest.raises(NotImplementedError, match="RZ"):
        evaluate(lambda x: ct.astype(x, ct.bfloat16, rounding_mode=ct.RoundingMode.RZ), x)
    with pytest.raises(ct.TileTypeError, match="float32"):
        evaluate(lambda x: ct.exp2(x.astype(ct.float16), flush_to_zero=True), x)


# Reductions and scans


@pytest.mark.parametrize(("name", "on_tensor"), [("sum", torch.sum), ("prod", torch.prod)])
def test_reductions(name, on_tensor):
    x = normal(4, 8)
    function = getattr(ct, name)
    torch.testing.assert_close(evaluate(lambda x: function(x, axis=1), x), on_tensor(x, 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(evaluate(function, x), on_tensor(x), rtol=1e-6, atol=1e-6)
    got = evaluate(lambda x: function(x, axis=(0, -1), keepdims=True), x)
    torch.testing.assert_close(got, on_tensor(x).reshape(1, 1), rtol=1e-6, atol=1e-6)


def test_extrema_and_their_indices():
    x = normal(4, 8)
    assert_equal(evaluate(lambda x: ct.max(x, axis=0), x), x.amax(0))
    assert_equal(evaluate(lambda x: ct.min(x, axis=1, keepdims=True), x), x.amin(1, keepdim=True))
    assert_equal(evaluate(lambda x: ct.argmax(x, axis=1), x), x.argmax(1).int())
    assert evaluate(ct.argmin, x).item() == x.argmin().item()
    assert evaluate(lambda x: ct.sum(x > 0), x).item() == (x > 0).sum().item()


def test_16_bit_reductions_and_scans_round_every_step():
    x = torch.tensor([256.0] + [1.0] * 7, dtype=BF16)
    assert evaluate(ct.sum, x).item() == 262.0
    assert evaluate(lambda x: ct.sum(x.astype(ct.float32)), x).item() == 263.0
    assert evaluate(ct.cumsum, x[:4]).tolist() == [256.0, 256.0, 258.0, 258.0]
    assert evaluate(lambda x: ct.cumsum(x.astype(ct.float32)), x[:4]).tolist() == [256.0, 257.0, 258.0, 259.0]


@pytest.mark.parametrize("dtype", [F32, I32])
def test_scans(dtype):
    x = (normal(4, 8) * 3).to(dtype)
    assert_equal(evaluate(lambda x: ct.cumsum(x, axis=1), x), x.cumsum(1).to(dtype))
    assert_equal(evaluate(lambda x: ct.cumsum(x, axis=-1, reverse=True), x), x.flip(1).cumsum(1).flip(1).to(dtype))
    assert_equal(evaluate(lambda x: ct.cumprod(x, 0), x), x.cumprod(0).to(dtype))


def test_custom_reduction_and_scan():
    x = normal(4, 8)
    got = evaluate(lambda x: ct.reduce(x, 1, lambda a, b: ct.maximum(a, b), -math.inf), x)
    assert_equal(got, x.amax(1))

    decay, value = torch.rand(8, generator=torch.Generator().manual_seed(1)), normal(8)
    state, wanted = torch.zeros(()), []
    for a, b in zip(decay, value, strict=True):
        state = a * state + b
        wanted.append(state)

    def compose(a, b, c, d):
        return a * c, b * c + d

    got = evaluate(lambda a, b: ct.scan((a, b), 0, compose, (1.0, 0.0))[1], decay, value)
    torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-6, atol=1e-6)
    total = evaluate(lambda a, b: ct.reduce((a, b), 0, compose, (1.0, 0.0), keepdims=True)[1], decay, value)
    assert total.shape == (1,)
    got = evaluate(lambda x: ct.scan(x, 0, operator.add, 0.0, reverse=True), value)
    torch.testing.assert_close(got, value.flip(0).cumsum(0).flip(0), rtol=1e-6, atol=1e-6)


# Matrix products


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_mma_accumulates_in_float32(dtype):
    # In the operands' own precision 4096 + 1 is 4096, or 2048 + 1 is 2048.
    x, y = torch.ones(2, 16, dtype=dtype), torch.ones(16, 2, dtype=dtype)
    x[:, 0] = 4096
    got = evaluate(lambda x, y: ct.mma(x, y, ct.full((2, 2), 0.25, ct.float32)), x, y)
    assert_equal(got, torch.full((2, 2), 4096 + 15.25))
    assert_equal(evaluate(lambda x, y: x @ y, x, y), torch.full((2, 2), 4111.0).to(dtype))


def test_mma_products_are_exact():
    x, y = torch.full((1, 1), 1 + 2**-7, dtype=BF16), torch.full((1, 1), 1 + 2**-7, dtype=BF16)
    got = evaluate(lambda x, y: ct.mma(x, y, ct.zeros((1, 1), ct.float32)), x, y)
    assert got.item() == (1 + 2**-7) ** 2


def test_mma_of_tfloat32_float32_float16_and_integers():
    x, y = normal(4, 8), normal(8, 2, seed=1)
    zero = torch.zeros(4, 2)
    rounded = tiles.round_to_tfloat32(x) @ tiles.round_to_tfloat32(y)
    got = evaluate(lambda x, y, z: ct.mma(x.astype(ct.tfloat32), y.astype(ct.tfloat32), z), x, y, zero)
    torch.testing.assert_close(got, rounded, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(got, x @ y, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(evaluate(ct.mma, x, y, zero), x @ y, rtol=1e-6, atol=1e-6)
    half = evaluate(ct.mma, torch.ones(2, 2, dtype=F16), torch.ones(2, 2, dtype=F16), torch.full((2, 2), 2048.0).half())
    assert_equal(half, torch.full((2, 2), 2050.0, dtype=F16))
    bytes_ = torch.full((2, 4), -3, dtype=torch.int8)
    assert_equal(evaluate(ct.mma, bytes_, bytes_.T.contiguous(), torch.ones(2, 2).int()), torch.full((2, 2), 37).int())


def test_mma_batches_broadcast():
    x, y = normal(2, 4, 8), normal(1, 8, 2, seed=1)
    got = evaluate(lambda x, y: ct.mma(x, y, ct.zeros((2, 4, 2), ct.float32)), x, y)
    torch.testing.assert_close(got, x @ y, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(evaluate(ct.matmul, x[0], y[0, :, 0]), x[0] @ y[0, :, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ct.mma(x, x.astype(ct.bfloat16), x),
        lambda x: ct.mma(x.astype(ct.bfloat16), x.astype(ct.bfloat16), x.astype(ct.bfloat16)),
        lambda x: ct.mma(x, x, ct.zeros((4, 2), ct.float32)),
        lambda x: ct.mma(x, ct.zeros((2, 4), ct.float32), x),
        lambda x: ct.mma(x.astype(ct.int32), x.astype(ct.int32), x.astype(ct.int32)),
        lambda x: ct.matmul(x.astype(ct.float16), x.astype(ct.bfloat16)),
    ],
)
def test_mma_rejects_what_the_compiler_rejects(function):
    with pytest.raises(ct.TileTypeError):
        evaluate(function, normal(4, 4))


def test_low_matmul_precision_does_not_reach_an_interpreted_product():
    x, y = normal(16, 16), normal(16, 16, seed=1)
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        got = evaluate(lambda x, y: ct.mma(x, y, ct.zeros((16, 16), ct.float32)), x, y)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(previous)
    torch.testing.assert_close(got, (x.double() @ y.double()).float(), rtol=1e-5, atol=1e-5)


# Loads and stores


def test_tiles_are_addressed_in_tile_space_through_any_strides():
    base = normal(6, 8, 10)
    source = base.permute(2, 0, 1)[1:9:2]  # (4, 6, 8)

    def at(index, shape, **options):
        results = []

        @ct.kernel
        def kernel(x):
            results.append(ct.load(x, index, shape, **options).tensor)

        launch((1,), kernel, (source,))
        return results[0]

    assert_equal(at((1, 2, 1), (2, 2, 4)), source[2:4, 4:6, 4:8])
    assert_equal(at((1, 2, 0), (4, 2, 2), order=(2, 1, 0)), source.permute(2, 1, 0)[4:8, 4:6, 0:2])
    assert_equal(at((1, 2, 0), (4, 2, 2), order="F"), source.permute(2, 1, 0)[4:8, 4:6, 0:2])
    assert_equal(at((1, 1, 0), (1, 4, 2), order=(0, 2, 1), latency=3, allow_tma=False), source[1:2, 0:2, 4:8].mT)
    assert_equal(at((3, 5, 7), ()), source[3, 5, 7])


@pytest.mark.parametrize(
    ("mode", "value"),
    [("ZERO", 0.0), ("NEG_ZERO", -0.0), ("NAN", math.nan), ("POS_INF", math.inf), ("NEG_INF", -math.inf)],
)
def test_padding_modes(mode, value):
    x = normal(5, 3)
    results = []

    @ct.kernel
    def kernel(x):
        padding = getattr(ct.PaddingMode, mode)
        results.append(ct.load(x, (1, 0), (4, 4), padding_mode=padding).tensor)
        results.append(ct.load(x, (0, 0), (2, 2), padding_mode=padding).tensor)

    launch((1,), kernel, (x,))
    wanted = torch.full((4, 4), value)
    wanted[:1, :3] = x[4:]
    assert_equal(results[0], wanted)
    assert torch.equal(results[0].signbit(), wanted.signbit())
    assert_equal(results[1], x[:2, :2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index": (1, 0)}, r"shape \(4, 4\) at \(4, 0\) of an array of shape \(5, 4\)"),
        ({"index": (2, 0), "padding_mode": ct.PaddingMode.ZERO}, "entirely outside"),
        ({"index": (-1, 0), "padding_mode": ct.PaddingMode.ZERO}, "entirely outside"),
        ({"index": (1, 0), "padding_mode": ct.PaddingMode.ZERO, "check_bounds": False}, "check_bounds=False"),
    ],
)
def test_reading_outside_raises(options, message):
    @ct.kernel
    def kernel(x):
        ct.load(x, shape=(4, 4), **options)

    with pytest.raises(IndexError, match=message):
        launch((1,), kernel, (torch.zeros(5, 4),))


def test_stores_outside_are_dropped():
    @ct.kernel
    def kernel(out):
        ct.store(out, (1, 0), ct.full((4, 4), 7, ct.int32))
        ct.store(out, (0, 0), ct.arange(4, dtype=ct.int32)[None, :], latency=2)
        ct.store(out, (3, 1), 9)

    out = torch.zeros(6, 3)
    launch((1,), kernel, (out[:5],))
    wanted = torch.zeros(6, 3)
    wanted[4] = 7
    wanted[0] = torch.arange(3)
    wanted[3, 1] = 9
    assert_equal(out, wanted)


def test_store_order_and_entirely_outside():
    @ct.kernel
    def kernel(out, row):
        ct.store(out, (1, row), ct.arange(4, dtype=ct.float32).reshape((4, 1)), order=(1, 0))

    out = torch.zeros(2, 8)
    launch((1,), kernel, (out, 1))
    assert out.tolist() == [[0.0] * 8, [0.0] * 4 + [0.0, 1.0, 2.0, 3.0]]
    with pytest.raises(IndexError, match="entirely outside"):
        launch((1,), kernel, (out, 2))


@pytest.mark.parametrize(
    ("source", "target", "allowed"),
    [
        (F32, BF16, False),
        (BF16, F32, True),
        (F16, BF16, False),
        (F32, I32, False),
        (I32, BF16, True),
        (torch.int64, I32, False),
        (torch.bool, F32, True),
        (torch.float64, F32, False),
        (I32, torch.uint32, False),
    ],
)
def test_a_store_converts_only_without_loss_of_kind(source, target, allowed):
    @ct.kernel
    def kernel(x, out):
        ct.store(out, (0,), ct.load(x, (0,), (4,)))

    out = torch.zeros(4, dtype=target)
    if allowed:
        launch((1,), kernel, (torch.ones(4, dtype=source), out))
        assert_equal(out, torch.ones(4, dtype=target))
    else:
        with pytest.raises(ct.TileTypeError, match="implicitly cast"):
            launch((1,), kernel, (torch.ones(4, dtype=source), out))


def test_a_loaded_tile_does_not_see_a_later_store():
    @ct.kernel
    def kernel(x):
        tile = ct.load(x, (0,), (4,))
        ct.store(x, (0,), tile + 1)
        ct.store(x, (0,), tile + ct.load(x, (0,), (4,)))

    x = torch.zeros(4)
    launch((1,), kernel, (x,))
    assert_equal(x, torch.ones(4))


def test_rank_index_and_hints_are_checked():
    def load(**options):
        @ct.kernel
        def kernel(x):
            ct.load(x, **options)

        launch((1,), kernel, (torch.zeros(4, 4),))

    for options in (
        {"index": (0,), "shape": (4, 4)},
        {"index": (0, 0), "shape": (4,)},
        {"index": (0, 0.0), "shape": (4, 4)},
        {"index": (0, 0), "shape": (4, 4), "order": (0, 0)},
    ):
        with pytest.raises(ct.TileTypeError):
            load(**options)
    with pytest.raises(ct.TileValueError, match="latency"):
        load(index=(0, 0), shape=(4, 4), latency=11)


def test_gather_and_scatter():
    @ct.kernel
    def kernel(x, out, count):
        rows = ct.arange(4, dtype=ct.int32) * 2 - 1
        columns = ct.arange(8, dtype=ct.int32)
        inside = ct.gather(x, (rows[:, None], columns[None, :]), mask=columns[None, :] < count, padding_value=-1)
        ct.scatter(out, (rows[:, None], columns[None, :] + 1), inside, mask=rows[:, None] != 3)

    x, out = normal(5, 8), torch.zeros(5, 8)
    launch((1,), kernel, (x, out, 6))
    wanted = torch.zeros(5, 8)
    wanted[1, 1:] = torch.where(torch.arange(7) < 6, x[1, :7], -1.0)
    assert_equal(out, wanted)


def test_unchecked_gather_outside_raises_unless_masked():
    def gather(mask):
        results = []

        @ct.kernel
        def kernel(x):
            index = ct.arange(8, dtype=ct.int64)
            results.append(ct.gather(x, index, mask=index < 4 if mask else None, check_bounds=False).tensor)

        launch((1,), kernel, (torch.arange(4.0),))
        return results[0].tolist()

    assert gather(True) == [0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    with pytest.raises(IndexError, match="check_bounds=False"):
        gather(False)


def test_advanced_indexing():
    @ct.kernel
    def kernel(x, out):
        rows = ct.arange(4, dtype=ct.int32) * 2
        tile = ct.load_advanced_indexing(x, (rows, ct.Slice(2, 4)), padding_mode=ct.PaddingMode.ZERO)
        ct.store_advanced_indexing(out, (ct.Slice(1, 4), rows), tile)

    x, out = normal(5, 8), torch.full((8, 5), 3.0)
    launch((1,), kernel, (x, out))
    wanted = torch.full((8, 5), 3.0)
    tile = torch.cat((x[::2, 2:6], torch.zeros(1, 4)))
    wanted[1:5, 0::2] = tile[:, :3]
    assert_equal(out, wanted)

    @ct.kernel
    def outside(x):
        ct.load_advanced_indexing(x, (ct.arange(8, dtype=ct.int32), ct.Slice(0, 4)))

    with pytest.raises(IndexError, match="undetermined"):
        launch((1,), outside, (x,))


def test_tiled_views():
    results = []

    @ct.kernel
    def kernel(x, out):
        view = x.tiled_view((2, 4), padding_mode=ct.PaddingMode.ZERO)
        results.append((view.num_tiles(0), view.num_tiles(1), view.load((2, 1)).tensor))
        steps = x.tiled_view((2, 4), traversal_steps=(1, 3))
        results.append(steps.load((1, 1)).tensor)
        out.tiled_view((2, 4)).store((2, 0), ct.full((1, 4), 2.0, ct.float32))
        out.tiled_view((2, 4)).atomic_store_add((0, 0), ct.arange(4, dtype=ct.float32))

    x, out = normal(5, 7), torch.ones(5, 7)
    launch((1,), kernel, (x, out))
    rows, columns, tile = results[0]
    assert (rows.value, columns.value) == (3, 2)
    assert_equal(tile, torch.nn.functional.pad(x[4:, 4:], (0, 1, 0, 1)))
    assert_equal(results[1], x[1:3, 3:7])
    wanted = torch.ones(5, 7)
    wanted[4, :4] = 2.0
    wanted[:2, :4] += torch.arange(4.0)
    assert_equal(out, wanted)


def test_raw_memory():
    results = []

    @ct.kernel
    def kernel(x, past):
        memory = x.get_raw_memory()
        offsets = ct.arange(4, dtype=ct.int32) * 3
        results.append(memory.load_offset(offsets, mask=offsets != 3, padding_value=-1.0).tensor)
        memory.store_offset(offsets + past, 5.0)
        results.append(memory.atomic_add_offset(1, 2.0).tensor)

    storage = torch.arange(20.0)
    launch((1,), kernel, (storage[2:12].reshape(2, 5), 6))
    assert results[0].tolist() == [2.0, -1.0, 8.0, 11.0]
    assert storage[[8, 11, 14, 17]].tolist() == [5.0] * 4
    assert (results[1].item(), storage[3].item()) == (3.0, 5.0)
    with pytest.raises(IndexError):
        launch((1,), kernel, (storage[2:12].reshape(2, 5), 15))


def test_atomics():
    results = {}

    @ct.kernel
    def kernel(x, sums):
        index = ct.arange(4, dtype=ct.int32)
        for name in ("add", "max", "min", "and", "or", "xor", "xchg"):
            results[name] = getattr(ct, f"atomic_{name}")(x, index, ct.full((4,), 6, ct.int32)).tensor
        results["cas"] = ct.atomic_cas(x, index + 1, index * 6, 100).tensor
        ct.atomic_add(sums, (index // 2, 0), 1.5, memory_order=ct.MemoryOrder.RELAXED)

    x, sums = torch.arange(4, dtype=I32), torch.zeros(2, 2)
    launch((3,), kernel, (x, sums))
    assert sums.tolist() == [[9.0, 0.0], [9.0, 0.0]]
    # From the second block on every element is 6 or, once swapped, 100.
    assert results["xchg"].tolist() == [0, 0, 0, 0]
    assert x.tolist() == [6, 6, 100, 6]
    assert results["cas"].tolist() == [6, 6, 6, 18]


def test_atomics_return_what_was_there_and_check_dtypes():
    def atomic(function, *inputs):
        results = []

        @ct.kernel
        def kernel(x):
            results.append(function(x).tensor)

        launch((1,), kernel, inputs)
        return results[0].tolist()

    x = torch.zeros(2, dtype=I32)
    assert atomic(lambda x: ct.atomic_add(x, ct.arange(4, dtype=ct.int32) // 4, 1), x) == [0, 1, 2, 3]
    assert x.tolist() == [4, 0]
    assert atomic(lambda x: ct.atomic_add(x, ct.arange(4, dtype=ct.int32), 1), x)[:2] == [4, 0]
    for function in (
        lambda x: ct.atomic_max(x, 0, 1.0),
        lambda x: ct.atomic_add(x, 0, ct.full((), 1.0, ct.float64)),
    ):
        with pytest.raises(ct.TileTypeError):
            atomic(function, torch.zeros(2))
    with pytest.raises(ct.TileTypeError, match="int64"):
        atomic(lambda x: ct.atomic_or(x, 0, ct.full((), 1, ct.int64)), x)


# Arrays, parameters, control flow


def test_array_attributes_and_slices():
    @ct.kernel
    def kernel(x, out, start, stop):
        ct.static_assert(x.ndim == 2 and x.dtype == ct.float32)
        ct.store(out, (0,), x.shape[0] * 100 + x.strides[0])
        part = x.slice(1, start, stop).slice(axis=0, start=1, stop=3)
        ct.store(out, (1,), part.shape[1])
        tile = ct.load(part, (0, 0), (2, 4), padding_mode=ct.PaddingMode.ZERO)
        ct.store(out, (1,), ct.sum(tile).astype(ct.int32)[None] + part.shape[1])

    x, out = torch.arange(30.0).reshape(5, 6), torch.zeros(2, dtype=I32)
    launch((1,), kernel, (x, out, 2, 5))
    assert out.tolist() == [506, int(x[1:3, 2:5].sum()) + 3]
    with pytest.raises(IndexError, match="0 <= start < size"):
        launch((1,), kernel, (x, out, 6, 6))


def test_a_slice_offset_overflows_int32_as_in_the_compiler():
    @ct.kernel
    def narrow(x, start):
        x.slice(0, start, start + 1)

    @ct.kernel
    def wide(x: ct.IndexedWithInt64, start):
        x.slice(0, start, start + 1)

    class Huge(torch.Tensor):
        """A tensor that says its rows lie 2**16 elements apart, for which no test has the memory."""

        def stride(self, dim=None):
            strides = (2**16, 1)
            return strides if dim is None else strides[dim]

    x = torch.zeros(1).as_strided((2**16, 1), (0, 1)).as_subclass(Huge)
    launch((1,), narrow, (x, 2**15 - 1))
    launch((1,), wide, (x, 2**15))
    with pytest.raises(OverflowError, match="IndexedWithInt64"):
        launch((1,), narrow, (x, 2**15))


def test_arrays_beyond_int32_need_int64_indices():
    @ct.kernel
    def narrow(x):
        pass

    @ct.kernel
    def wide(x: ct.IndexedWithInt64, out):
        ct.store(out, (0,), x.shape[0] + 1)

    x, out = torch.zeros(1).expand(2**31), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(OverflowError, match="IndexedWithInt64"):
        launch((1,), narrow, (x,))
    launch((1,), wide, (x, out))
    assert out.item() == 2**31 + 1


def test_parameters():
    seen = []

    @ct.kernel
    def kernel(
        flag,
        count,
        long: ct.ScalarInt64,
        rate,
        pair,
        arrays,
        CONSTANT: ct.Constant,
        NAME: ct.Constant[str],
        static: Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))],
    ):
        seen.extend([flag.dtype, count.dtype, long.dtype, rate.dtype, pair[1].dtype, len(arrays), CONSTANT, NAME])
        seen.append(ct.zeros((static.shape[0],), ct.int32).shape)
        seen.append((rate * 1.0).tensor.item())

    x = torch.zeros(4)
    launch((1,), kernel, (True, 3, 2**40, 0.1, (x, 5), [x, x], (1, 2), "name", x))
    assert seen[:8] == [ct.bool_, ct.int32, ct.int64, ct.float32, ct.int32, 2, (1, 2), "name"]
    assert seen[8] == (4,)
    assert seen[9] == torch.tensor(0.1).item()
    with pytest.raises(TypeError, match="9 arguments"):
        launch((1,), kernel, (x,))
    with pytest.raises(TypeError, match=r"ct\.Constant"):
        launch((1,), kernel, ("flag", 3, 2**40, 0.1, (x, 5), [x], 1, "name", x))


def test_control_flow_on_scalars():
    @ct.kernel
    def kernel(lengths, out):
        block = ct.bid(0)
        length = ct.load(lengths, (block,), (1,)).item()
        total = ct.zeros((), ct.int32)
        for i in range(length):
            if i % 2 == 0 and i != 4:
                total = total + i
        while total > 10:
            total -= 3
        for j in ct.static_iter(range(2)):
            total += j
        ct.store(out, (block,), min(total, length) * 100 + max(length, 3))

    lengths, out = torch.tensor([0, 5, 12], dtype=I32), torch.zeros(3, dtype=I32)
    launch((3,), kernel, (lengths, out))

    def expected(length):
        total = sum(i for i in range(length) if i % 2 == 0 and i != 4)
        while total > 10:
            total -= 3
        return min(total + 1, length) * 100 + max(length, 3)

    assert out.tolist() == [expected(n) for n in (0, 5, 12)]


def test_functions_of_the_author_and_static_functions():
    @ct.function
    def double(x):
        ct.static_assert(x.dtype == ct.float32, "float32 only")
        return 2 * x

    assert_equal(
        evaluate(lambda x: double(x) + ct.static_eval(3 if x.ndim else 4), torch.ones(2)), torch.full((2,), 5.0)
    )
    with pytest.raises(ct.TileStaticAssertionError, match="float32 only"):
        evaluate(double, torch.ones(2, dtype=I32))
    with pytest.raises(ct.TileTypeError, match="compile-time"):
        evaluate(lambda x: ct.static_assert(ct.bid(0) == 0), torch.ones(2))
    with pytest.raises(ct.TileStaticAssertionError, match="constant"):
        evaluate(lambda x: ct.ensure_constant(ct.bid(0)), torch.ones(2))


def test_printing_assertions_and_hints(capsys):
    @ct.kernel
    def kernel(x):
        tile = ct.load(x, (0,), (2,))
        ct.grid_dependency_control_wait()
        ct.printf("%d of %5.2f%%\n", ct.bid(0), tile)
        ct.print("tile:", tile, f"{tile:.1f}", sep="|")
        ct.assert_(ct.assume_divisible_by(ct.num_blocks(0), 1) == 1)  # noqa: PT009
        ct.grid_dependency_control_launch_dependents()
        ct.assert_(tile < 2, "too large")  # noqa: PT009

    launch((1,), kernel, (torch.tensor([0.5, 1.0]),))
    assert capsys.readouterr().out == "0 of [ 0.50,  1.00]%\ntile:|[0.500000, 1.000000]|[0.5, 1.0]\n"
    with pytest.raises(AssertionError, match="too large"):
        launch((1,), kernel, (torch.tensor([0.5, 2.0]),))
    with pytest.raises(ValueError, match="divisible by 4"):
        evaluate(lambda x: ct.assume_divisible_by(ct.num_blocks(0), 4), torch.ones(1))


def test_unknown_tile_function_raises_by_name():
    with pytest.raises(NotImplementedError, match="mma_scaled"):
        evaluate(lambda x: ct.mma_scaled(x, x, x, x, x), normal(4, 4))


# Launches


def test_every_block_runs_once():
    @ct.kernel
    def kernel(out):
        sizes = ct.num_blocks(0) * 100 + ct.num_blocks(1) * 10 + ct.num_blocks(2)
        ct.store(out, (ct.bid(0), ct.bid(1), ct.bid(2)), ct.load(out, (ct.bid(0), ct.bid(1), ct.bid(2)), ()) + sizes)

    out = torch.zeros(2, 3, 4, dtype=I32)
    launch((2, 3, 4), kernel.replace_hints(occupancy=2, num_ctas=1), (out,))
    assert_equal(out, torch.full((2, 3, 4), 234, dtype=I32))


def test_a_dependence_on_block_order_shows():
    @ct.kernel
    def kernel(out):
        ct.store(out, (0,), ct.load(out, (0,), ()) * 2 + ct.bid(0))

    def result(**options):
        out = torch.zeros(1, dtype=torch.int64)
        launch((8,), kernel, (out,), **options)
        return out.item()

    in_order = 0
    for block in range(8):
        in_order = 2 * in_order + block
    assert result(shuffle_seed=None) == in_order
    assert result() == result() == result(shuffle_seed=0)
    assert result() != in_order
    assert len({result(shuffle_seed=seed) for seed in range(5)}) > 1


@pytest.mark.parametrize("grid", [(), (0,), (1, 2, 3, 4), (1, 65536), (1, 1, 65536)])
def test_grids_are_checked(grid):
    @ct.kernel
    def kernel():
        pass

    with pytest.raises(ValueError, match="grid"):
        launch(grid, kernel, ())


def test_tensors_of_another_device_are_refused():
    @ct.kernel
    def kernel(x):
        pass

    with pytest.raises(ValueError, match="meta"):
        launch((1,), kernel, (torch.empty(2, device="meta"),))


def test_tile_functions_are_cutiles_own_again_after_a_failure():
    @ct.kernel
    def kernel():
        raise LookupError

    with pytest.raises(LookupError):
        launch((1,), kernel, ())
    with pytest.raises(RuntimeError, match="device code"):
        ct.bid(0)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("cuda.tile._dispatch_mode", "DispatchMode"),
        ("cuda.tile._execution", "is_stub"),
        ("cuda.tile._ir.cast_ops", None),
    ],
)
def test_a_cuda_tile_whose_private_names_moved_is_reported(monkeypatch, module, name):
    if name is None:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        monkeypatch.delattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location("moved_internals", internals.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(RuntimeError, match=rf"cuda-tile {ct.__version__} lacks .*{name or module}.*1\.7\.0"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_kernel_without_its_private_attributes_is_reported():
    with pytest.raises(RuntimeError, match="_annotated_function"):
        launch((1,), types.SimpleNamespace(), ())


# Agreement with the compiler


def accepted_sum(x, y, i, out):
    ct.store(out, (0,), ct.load(x, (0,), (8,)) + ct.load(y, (0,), (8,)) * 2 + ct.load(i, (0,), (8,)))


def accepted_branch(x, y, i, out):
    limit = ct.load(i, (0,), ())
    tile = ct.load(x, (0,), (8,))
    if limit > 3:
        tile = tile * 0.5
    for k in range(limit):
        tile = tile + k
    ct.store(out, (0,), ct.where(tile > 0, tile, 0.0))


def accepted_matmul(x, y, i, out):
    tile = ct.load(y, (0,), (8,))
    square = ct.mma(tile[:, None], tile[None, :], ct.zeros((8, 8), ct.float32))
    ct.store(out, (0,), ct.sum(square, axis=1) ** 2)


def accepted_scan(x, y, i, out):
    ct.store(out, (0,), ct.cumsum(ct.load(y, (0,), (8,)), reverse=True) + ct.max(ct.load(x, (0,), (8,))))


def accepted_slice(x, y, i, out):
    part = x.slice(0, 2, ct.load(i, (0,), ()) + 6)
    ct.store(out, (0,), ct.load(part, (0,), (8,), padding_mode=ct.PaddingMode.ZERO))


def rejected_narrowing_store(x, y, i, out):
    ct.store(y, (0,), ct.load(x, (0,), (8,)))


def rejected_float_to_integer_store(x, y, i, out):
    ct.store(i, (0,), 1.5)


def rejected_mixed_halves(x, y, i, out):
    ct.store(out, (0,), ct.load(y, (0,), (8,)) + ct.load(x, (0,), (8,)).astype(ct.float16))


def rejected_tfloat32_sum(x, y, i, out):
    tile = ct.load(x, (0,), (8,)).astype(ct.tfloat32)
    ct.store(out, (0,), (tile + tile).astype(ct.float32))


def rejected_mixed_mma(x, y, i, out):
    a, b = ct.load(x, (0,), (8,)), ct.load(y, (0,), (8,))
    ct.store(out, (0,), ct.sum(ct.mma(a[:, None], b[None, :], ct.zeros((8, 8), ct.float32)), axis=0))


def rejected_bfloat16_accumulator(x, y, i, out):
    a = ct.load(y, (0,), (8,))
    ct.store(out, (0,), ct.sum(ct.mma(a[:, None], a[None, :], ct.zeros((8, 8), ct.bfloat16)), axis=0))


def rejected_shape(x, y, i, out):
    ct.store(out, (0,), ct.sum(ct.load(x, (0,), (6,))))


def rejected_dynamic_shape(x, y, i, out):
    ct.store(out, (0,), ct.sum(ct.load(x, (0,), (x.shape[0],))))


def rejected_tile_condition(x, y, i, out):
    if ct.load(x, (0,), (8,)) > 0:
        ct.store(out, (0,), 1.0)


def rejected_float_index(x, y, i, out):
    ct.store(out, (ct.load(x, (0,), ()),), 1.0)


def rejected_boolean_sum(x, y, i, out):
    mask = ct.load(x, (0,), (8,)) > 0
    ct.store(out, (0,), mask + mask)


def rejected_integer_power(x, y, i, out):
    ct.store(out, (0,), ct.load(i, (0,), (8,)) ** 2)


def rejected_bitwise_dtypes(x, y, i, out):
    tile = ct.load(i, (0,), (8,))
    ct.store(out, (0,), tile & tile.astype(ct.int64))


@pytest.mark.parametrize(
    "function", [value for name, value in sorted(globals().items()) if name.startswith(("accepted_", "rejected_"))]
)
def test_the_interpreter_accepts_what_the_compiler_accepts(function):
    kernel = ct.kernel(function)
    arguments = (normal(8), normal(8, dtype=BF16), torch.full((8,), 2, dtype=I32), torch.zeros(8))
    constraints = [
        ct.compilation.ArrayConstraint(
            dtype, 1, index_dtype=ct.int32, stride_lower_bound_incl=0, alias_groups=(), may_alias_internally=False
        )
        for dtype in (ct.float32, ct.bfloat16, ct.int32, ct.float32)
    ]
    signature = ct.compilation.KernelSignature(
        constraints, ct.compilation.CallingConvention.cutile_python_v1(), symbol="kernel"
    )
    outcomes = []
    for run in (
        lambda: ct.compilation.export_kernel(
            kernel, [signature], io.BytesIO(), gpu_code="sm_90", output_format="tileir_bytecode"
        ),
        lambda: launch((1,), kernel, arguments),
    ):
        try:
            run()
        except ct.TileError as error:
            outcomes.append(error)
        else:
            outcomes.append(None)
    compiled, interpreted = outcomes
    assert (compiled is None) == function.__name__.startswith("accepted_")
    assert (interpreted is None) == (compiled is None)


# An outside witness: the forward kernels of tilegym


@pytest.fixture(scope="module")
def tilegym_mamba2_kernels():
    try:
        spec = importlib.util.find_spec("tilegym")
    except ImportError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("tilegym is not installed")
    path = pathlib.Path(spec.submodule_search_locations[0]) / "ops" / "cutile" / "mamba2.py"
    # The package's own __init__ looks for a GPU, so its module of kernels is loaded alone beside two stand-ins.
    stand_ins = {name: types.ModuleType(name) for name in ("tilegym", "tilegym.autotune", "tilegym.backend")}
    stand_ins["tilegym.autotune"].is_autotune_disabled = lambda: True
    stand_ins["tilegym.backend"].register_impl = lambda *_, **__: lambda function: function
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_ins.items():
            patch.setitem(sys.modules, name, module)
        module_spec = importlib.util.spec_from_file_location("tilegym_mamba2_witness", path)
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
    return module


def recurrence(x, dt, A, B, C, D, state):
    """The Mamba-2 recurrence, token by token in float64."""
    x, dt, A, B, C, D, state = (tensor.double() for tensor in (x, dt, A, B, C, D, state))
    heads_per_group = x.shape[2] // B.shape[2]
    B, C = (tensor.repeat_interleave(heads_per_group, dim=2) for tensor in (B, C))
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        out[:, t] = torch.einsum("bhpn,bhn->bhp", state, C[:, t]) + D[:, None] * x[:, t]
    return out, state


def relative_error(got, wanted):
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def witness_forward(kernels, problem, *, dtype, swap, head_major, states_dtype):
    batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size, zero_D = problem
    x, B, C = (
        normal(batch, seqlen, *shape, seed=seed).mul(0.5).to(dtype)
        for seed, shape in enumerate([(nheads, headdim), (ngroups, dstate), (ngroups, dstate)])
    )
    dt = normal(batch, seqlen, nheads, seed=3).abs() * 0.3
    A, D = -normal(nheads, seed=4).abs(), normal(nheads, seed=5) * (0.0 if zero_D else 1.0)
    initial = normal(batch, nheads, headdim, dstate, seed=6)

    nchunks, block_state, heads = seqlen // chunk_size, 16, min(nheads, 4)
    token_major = torch.full((batch, seqlen, nheads), math.nan)
    cumsum, dt_out = (torch.full((batch, nheads, seqlen), math.nan) for _ in range(2))
    cumsum_kernel = kernels.chunk_cumsum_kernel.replace_hints(occupancy=4)
    launch((nchunks, nheads // heads, batch), cumsum_kernel, (A, dt, token_major, cumsum, dt_out, chunk_size, heads))

    states = torch.full((batch, nheads, nchunks, headdim, dstate), math.nan, dtype=states_dtype)
    final = torch.full_like(initial, math.nan)
    steps = (dt_out, cumsum) if head_major else (dt, token_major)
    constants = (chunk_size, block_state, headdim, nheads // ngroups)
    launch(
        (1, dstate // block_state, batch * nheads),
        kernels.fwd_pass_state_kernel,
        (x, B, *steps, initial, states, states, final, *constants, 4, 2, 2, swap, head_major, False),
    )

    out = torch.full_like(x, math.nan)
    inputs = (x, B, C, D, dt_out, cumsum, states, out, *constants, dstate)
    if swap:
        launch((3,), kernels.compute_out_swap_kernel, (*inputs, 3, 3, True))
    else:
        launch((nchunks, 1, batch * nheads), kernels.compute_out_kernel, (*inputs, 3, False))
    wanted, wanted_final = recurrence(x, dt, A, B, C, D, initial)
    steps_wanted = (
        (dt.double() * A).reshape(batch, nchunks, chunk_size, nheads).cumsum(2).reshape(batch, seqlen, nheads)
    )
    return {
        "cumsum": relative_error(token_major, steps_wanted / math.log(2)),
        "dt": relative_error(dt_out, dt.double().mT),
        "final_states": relative_error(final, wanted_final),
        "out": relative_error(out, wanted),
    }


PROBLEMS = {
    # batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size, zero_D
    "one_group": (2, 64, 4, 16, 1, 32, 16, False),
    "two_groups": (1, 48, 4, 32, 2, 16, 16, False),
    "every_head_a_group": (1, 32, 2, 16, 2, 16, 32, False),
    "no_D": (2, 32, 4, 16, 2, 16, 16, True),
    "many_chunks": (1, 128, 8, 16, 2, 16, 8, False),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.parametrize(("swap", "head_major"), [(True, True), (False, True), (False, False)])
def test_tilegym_kernels_agree_with_the_recurrence(tilegym_mamba2_kernels, monkeypatch, problem, swap, head_major):
    options = {"dtype": F32, "swap": swap, "head_major": head_major, "states_dtype": F32}
    errors = witness_forward(tilegym_mamba2_kernels, problem, **options)
    # tilegym multiplies by x in tfloat32 whatever the inputs' dtype.
    assert 5e-6 < errors.pop("out") < 1e-3
    assert max(errors.values()) < 5e-6
    monkeypatch.setattr(tiles, "round_to_tfloat32", lambda tensor: tensor)
    assert max(witness_forward(tilegym_mamba2_kernels, problem, **options).values()) < 5e-6


@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize("states_dtype", [F32, BF16])
def test_tilegym_kernels_agree_with_the_recurrence_in_bfloat16(tilegym_mamba2_kernels, swap, states_dtype):
    options = {"dtype": BF16, "swap": swap, "head_major": True, "states_dtype": states_dtype}
    errors = witness_forward(tilegym_mamba2_kernels, PROBLEMS["one_group"], **options)
    assert 1e-4 < errors["out"] < 3e-3
    assert errors["final_states"] < 3e-3
    assert max(errors["cumsum"], errors["dt"]) < 5e-6


def test_tilegym_kernels_raise_where_a_chunk_is_not_whole(tilegym_mamba2_kernels):
    # Upstream demands whole chunks: the states' loads beyond the last one have no padding mode.
    arrays = [torch.zeros(shape) for shape in [(2,), (1, 20, 2), (1, 20, 2), (1, 2, 20), (1, 2, 20)]]
    launch((2, 1, 1), tilegym_mamba2_kernels.chunk_cumsum_kernel, (*arrays, 16, 2))
    assert arrays[2].abs().max() == 0
    with pytest.raises(IndexError, match="entirely outside"):
        launch((3, 1, 1), tilegym_mamba2_kernels.chunk_cumsum_kernel, (*arrays, 16, 2))
