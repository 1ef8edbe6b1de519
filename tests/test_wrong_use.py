"""Wrong use raises before anything runs, and says which argument, what it got and what it wants."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tilegym_mamba2
from tilegym_mamba2 import registry
from tilegym_mamba2.problem import Problem, scan_problem
from tilegym_mamba2.testing import DECODE_PROBLEMS, PROBLEMS, op_inputs
from tilegym_mamba2.testing.running import OPS

SCAN, CUMSUM, PASSING, OUT, DECODE = (
    "mamba_chunk_scan_combined",
    "chunk_cumsum",
    "fwd_pass_state",
    "compute_out",
    "selective_state_update",
)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(tilegym_mamba2, name) for name in (SCAN, CUMSUM, PASSING, OUT, DECODE)
}


def valid(op: str, problem: str = "packed_gate") -> dict[str, Any]:
    if op == DECODE:
        return DECODE_PROBLEMS["decode_padding"].inputs()
    return op_inputs("mamba_chunk_scan" if op == SCAN else op, PROBLEMS[problem].inputs())


@pytest.fixture
def launches(fresh_registry: None) -> list[str]:
    """What a backend named "recorder", which can do everything, was asked to run."""
    calls: list[str] = []
    registry.register_backend(registry.Backend("recorder", lambda device: None))
    for op in registry.ops():

        def run(*arguments: Any, op: str = op) -> None:
            calls.append(op)

        registry.register(op, "recorder")(run)
    return calls


def refused(op: str, arguments: dict[str, Any], error: type[Exception], launches: list[str], *words: str) -> None:
    with pytest.raises(error) as caught:
        FUNCTIONS[op](**arguments, backend="recorder")
    message = str(caught.value)
    for word in words:
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message), f"{message!r} does not mention {word!r}"
    assert launches == []


INTEGERS = {"seq_idx", "cu_seqlens", "state_batch_indices"}


def _tensor_arguments(problem: str = "packed_gate") -> Iterator[tuple[str, str, torch.Tensor, bool]]:
    optional = {"D", "z", "dt_bias", "initial_states", "seq_idx", "state_batch_indices"}
    for op in FUNCTIONS:
        for name, value in valid(op, problem).items():
            if isinstance(value, torch.Tensor):
                yield op, name, value, name in optional


TENSORS = [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in _tensor_arguments()]
every_tensor = pytest.mark.parametrize(("op", "name", "value", "optional"), TENSORS)


@every_tensor
def test_not_a_tensor(op: str, name: str, value: torch.Tensor, optional: bool, launches: list[str]) -> None:
    wrong: list[Any] = [value.tolist(), 1.0, "text"] if optional else [value.tolist(), 1.0, "text", None]
    for given in wrong:
        refused(op, {**valid(op), name: given}, TypeError, launches, name, type(given).__name__, "torch.Tensor")


@every_tensor
def test_dtype(op: str, name: str, value: torch.Tensor, optional: bool, launches: list[str]) -> None:
    wrong = [torch.float32, torch.bool] if name in INTEGERS else [torch.int32, torch.complex64, torch.bool]
    if name in ("dt_out", "dA_cumsum"):
        wrong += [torch.float16, torch.bfloat16]
    if name in ("cu_seqlens", "state_batch_indices"):
        wrong += [torch.int16]
    for dtype in wrong:
        wanted = "int32" if name in INTEGERS else "float32"
        refused(op, {**valid(op), name: value.to(dtype)}, TypeError, launches, name, str(dtype), wanted)


@every_tensor
def test_device(op: str, name: str, value: torch.Tensor, optional: bool, launches: list[str]) -> None:
    words = ["meta", "cpu"] if name == "x" else ["meta", "cpu", name]
    arguments = {**valid(op), name: value.to("meta")}
    if name == next(iter(arguments)):
        words = ["meta", "cpu"]  # the first tensor sets the device: the second is the one that differs
    refused(op, arguments, ValueError, launches, *words)


@every_tensor
def test_layout(op: str, name: str, value: torch.Tensor, optional: bool, launches: list[str]) -> None:
    refused(op, {**valid(op), name: value.to_sparse()}, TypeError, launches, name, "torch.sparse_coo", "torch.strided")


# Sizes that no other argument is held to: twice as many is right use.
FREE = {(CUMSUM, "dt", 0), (CUMSUM, "dt", 1), (PASSING, "B", 2), (DECODE, "state", 0), (DECODE, "B", 1)}


def _first_binds(op: str, name: str, dim: int) -> bool:
    """Whether this dimension is the one that the others are held to, and so never at fault itself."""
    sets = {
        SCAN: {"x": (0, 1, 2, 3), "B": (2, 3)},
        PASSING: {"x": (0, 1, 2, 3), "B": (2, 3), "dt_out": (2, 3)},
        OUT: {"x": (0, 1, 2, 3), "B": (2, 3), "dt_out": (2, 3)},
        CUMSUM: {"dt": (0, 1, 2)},
        DECODE: {"x": (0, 1, 2), "state": (0, 3), "B": (1,)},
    }
    return dim in sets[op].get(name, ())


@every_tensor
def test_size(op: str, name: str, value: torch.Tensor, optional: bool, launches: list[str]) -> None:
    for dim in range(value.dim()):
        repeats = [1] * value.dim()
        repeats[dim] = 2
        arguments = {**valid(op), name: value.repeat(repeats)}
        if _first_binds(op, name, dim):
            if (op, name, dim) not in FREE:
                refused(op, arguments, ValueError, launches)
        else:
            shape = str(tuple(arguments[name].shape))
            refused(op, arguments, ValueError, launches, name, shape.strip("()").rstrip(","))


@every_tensor
def test_number_of_dimensions(op: str, name: str, value: torch.Tensor, optional: bool, launches: list[str]) -> None:
    for given in (value[None], value[..., 0]):
        if given.dim() == value.dim() - 1 and name != "state_batch_indices" and (op == DECODE or name == "D"):
            continue  # the form without heads, or D of heads
        refused(op, {**valid(op), name: given}, ValueError, launches, name, "expected")


def test_forms_with_and_without_heads_do_not_mix(launches: list[str]) -> None:
    arguments = valid(DECODE)
    refused(DECODE, {**arguments, "x": arguments["x"][:, :, 0]}, ValueError, launches, "nheads=1")


def _values() -> Iterator[Any]:
    chunk_sizes: list[tuple[Any, type[Exception], str]] = [
        (0, ValueError, "0"),
        (-64, ValueError, "-64"),
        (64.0, TypeError, "float"),
        ("64", TypeError, "str"),
        (None, TypeError, "NoneType"),
        (True, TypeError, "bool"),
    ]
    limits: list[tuple[Any, type[Exception], str]] = [
        (3.0, TypeError, "3.0"),
        ((1.0,), TypeError, "1.0"),
        ((0.0, 1.0, 2.0), TypeError, "2.0"),
        (("0", "1"), TypeError, "0"),
        (None, TypeError, "None"),
        ((2.0, 1.0), ValueError, "2.0"),
        ((math.nan, 1.0), ValueError, "nan"),
    ]
    for op in (SCAN, CUMSUM):
        for value, error, got in chunk_sizes:
            yield op, "chunk_size", value, error, (got, "int" if error is TypeError else "at least 1")
        for value, error, got in limits:
            yield op, "dt_limit", value, error, (got, "low")
        for value, got in ((1, "int"), (None, "NoneType"), ("yes", "str")):
            yield op, "dt_softplus", value, TypeError, (got, "bool")
    yield DECODE, "dt_softplus", 1, TypeError, ("int", "bool")
    for name in ("return_final_states", "return_varlen_states"):
        yield SCAN, name, "no", TypeError, ("str", "bool")
        yield SCAN, name, None, TypeError, ("NoneType", "bool")
    for op in (SCAN, PASSING):
        yield op, "state_dtype", torch.int32, TypeError, ("torch.int32", "float32")
        yield op, "state_dtype", "float32", TypeError, ("str", "float32")


@pytest.mark.parametrize(("op", "name", "value", "error", "words"), list(_values()))
def test_value(
    op: str, name: str, value: Any, error: type[Exception], words: tuple[str, ...], launches: list[str]
) -> None:
    refused(op, {**valid(op), name: value}, error, launches, name, *words)


@pytest.mark.parametrize("op", [SCAN, PASSING, OUT])
def test_groups_must_divide_heads(op: str, launches: list[str]) -> None:
    arguments = valid(op)
    for name in {"B", "C"} & set(arguments):
        arguments[name] = arguments[name].repeat_interleave(3, 2)[:, :, :3]
    refused(op, arguments, ValueError, launches, "B", "ngroups=3", "nheads=4")


def test_groups_must_divide_heads_in_decode(launches: list[str]) -> None:
    arguments = valid(DECODE)
    for name in ("B", "C"):
        arguments[name] = arguments[name].repeat_interleave(3, 1)[:, :3]
    refused(DECODE, arguments, ValueError, launches, "B", "ngroups=3", "nheads=4")


@pytest.mark.parametrize(("dim", "size", "owner"), [(2, "nheads", "x"), (3, "headdim", "x")])
def test_no_heads(dim: int, size: str, owner: str, launches: list[str]) -> None:
    arguments = op_inputs("mamba_chunk_scan", PROBLEMS["plain"].inputs())
    arguments["x"] = arguments["x"].narrow(dim, 0, 0)
    if size == "nheads":
        arguments.update(dt=arguments["dt"][:, :, :0], A=arguments["A"][:0])
    refused(SCAN, arguments, ValueError, launches, owner, f"{size}=0")


@pytest.mark.parametrize("size", ["ngroups", "dstate"])
def test_no_groups_or_states(size: str, launches: list[str]) -> None:
    arguments = op_inputs("mamba_chunk_scan", PROBLEMS["plain"].inputs())
    arguments["B"] = arguments["B"].narrow(2 if size == "ngroups" else 3, 0, 0)
    refused(SCAN, arguments, ValueError, launches, "B", f"{size}=0")


@pytest.mark.parametrize("op", [PASSING, OUT])
def test_chunks_must_hold_the_tokens(op: str, launches: list[str]) -> None:
    arguments = valid(op)
    for name in ("dt_out", "dA_cumsum"):
        arguments[name] = arguments[name][:, :, :-1]
    refused(op, arguments, ValueError, launches, "dt_out", "nchunks=3", "nchunks=4")


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ((1, 13, 100), ("[1, 13, 100]", "from 0")),
        ((0, 13, 99), ("[0, 13, 99]", "seqlen=100")),
        ((0, 13, 101), ("[0, 13, 101]", "seqlen=100")),
        ((0, 50, 40, 100), ("[0, 50, 40, 100]", "rise")),
        (tuple(range(20)), ("[0, 1, 2, 3, 4, 5, ..., 19]", "seqlen=100")),
        ((), ("cu_seqlens", "(nseq + 1,)")),
    ],
)
def test_offsets_must_rise_over_the_row(offsets: tuple[int, ...], words: tuple[str, ...], launches: list[str]) -> None:
    arguments = PROBLEMS["varlen"].inputs()
    arguments["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens") as caught:
        tilegym_mamba2.mamba_chunk_scan_combined(**arguments, backend="recorder")
    assert all(word in str(caught.value) for word in words)
    assert launches == []


def test_offsets_need_one_row(launches: list[str]) -> None:
    arguments = valid(SCAN, "plain")
    arguments["cu_seqlens"] = torch.tensor([0, 64], dtype=torch.int32)
    refused(SCAN, arguments, ValueError, launches, "cu_seqlens", "batch 1", "batch=2")


def test_states_of_packed_sequences_are_one_each_or_one(launches: list[str]) -> None:
    arguments = PROBLEMS["varlen_states"].inputs()
    arguments["initial_states"] = arguments["initial_states"][:2]
    refused(SCAN, arguments, ValueError, launches, "initial_states", "nseq=3", "2, 4, 16, 16")


def test_varlen_states_need_offsets(launches: list[str]) -> None:
    arguments = {**valid(SCAN), "return_varlen_states": True}
    refused(SCAN, arguments, ValueError, launches, "return_varlen_states", "cu_seqlens", "None")


@pytest.mark.parametrize(
    ("indices", "words"), [((0, 1, 6), ("6", "6 rows")), ((2, 1, 2), ("twice",)), ((0, -1, 9), ("9",))]
)
def test_indices_of_states(indices: tuple[int, ...], words: tuple[str, ...], launches: list[str]) -> None:
    arguments = {**valid(DECODE), "state_batch_indices": torch.tensor(indices)}
    refused(DECODE, arguments, ValueError, launches, "state_batch_indices", *words)


def test_a_state_that_shares_memory_cannot_be_updated(launches: list[str]) -> None:
    arguments = valid(DECODE)
    arguments["state"] = arguments["state"][:1].expand(6, -1, -1, -1)
    refused(DECODE, arguments, ValueError, launches, "state", "stride 0")


def test_a_state_whose_gradient_is_wanted_cannot_be_overwritten(launches: list[str]) -> None:
    arguments = valid(DECODE)
    arguments["state"] = arguments["state"].requires_grad_()
    refused(DECODE, arguments, ValueError, launches, "state", "leaf", "state.clone()")
    with torch.no_grad():
        tilegym_mamba2.selective_state_update(**arguments, backend="torch-reference")


def test_wrong_use_leaves_the_state_alone() -> None:
    arguments = valid(DECODE)
    state = arguments["state"].clone()
    with pytest.raises(TypeError):
        tilegym_mamba2.selective_state_update(**{**arguments, "dt_softplus": None})
    assert torch.equal(arguments["state"], state)


@pytest.mark.parametrize("op", ["chunk_cumsum", "mamba_chunk_scan"])
def test_implementations_get_chunk_size_as_an_int(op: str, fresh_registry: None) -> None:
    sizes: list[Any] = []
    registry.register_backend(registry.Backend("recorder", lambda device: None))
    registry.register(op, "recorder")(lambda *arguments: sizes.append(arguments[2 if op == CUMSUM else 5]))
    for value in (torch.tensor(7), torch.tensor([7]).numpy()[0]):
        OPS[op](**{**op_inputs(op, PROBLEMS["plain"].inputs()), "chunk_size": value}, backend="recorder")
    assert [type(size) for size in sizes] == [int, int]


@pytest.mark.parametrize("op", list(FUNCTIONS))
def test_right_use_reaches_the_backend(op: str, launches: list[str]) -> None:
    if op == SCAN:
        with pytest.raises(TypeError, match="unpack"):  # the recorder returns None
            FUNCTIONS[op](**valid(op), backend="recorder")
    else:
        FUNCTIONS[op](**valid(op), backend="recorder")
    assert launches == ["mamba_chunk_scan" if op == SCAN else op]


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="chunk"):
        tilegym_mamba2.mamba_chunk_scan_combined(**valid(SCAN), chunks=4)  # pyright: ignore[reportCallIssue]


def test_a_valid_call_off_the_cpu_is_validated_once_and_a_wrong_one_every_time() -> None:
    """On a GPU problems are remembered by all that validation looks at; "meta" stands for one here."""
    x = torch.empty(1, 8, 2, 4, device="meta")
    dt, A, B = (torch.empty(shape, device="meta") for shape in ((1, 8, 2), (2,), (1, 8, 1, 3)))

    def validated(x: Any = x, chunk_size: Any = 1, softplus: Any = True, dt_limit: Any = (0.0, 1.0)) -> Problem:
        return scan_problem(x, dt, A, B, B, chunk_size, *(None,) * 6, softplus, dt_limit, None)

    assert validated() is validated()
    assert validated(chunk_size=2).chunk_size == 2
    assert validated(x=x.half()).dtypes["x"] == torch.float16
    assert validated(x=x.clone().requires_grad_()).differentiated_argument == "x"
    with torch.no_grad():
        assert validated(x=x.clone().requires_grad_()).differentiated_argument is None
    assert validated(dt_limit=[0.0, 1.0]).seqlen == 8  # can't be hashed
    wrong: tuple[tuple[str, dict[str, Any]], ...] = (
        ("chunk_size", {"chunk_size": True}),
        ("dt_softplus", {"softplus": 1}),
        ("dt_limit", {"dt_limit": (False, True)}),
        ("dt has shape", {"x": x[:, :7]}),
        ("x must be", {"x": None}),
    )
    for message, changes in wrong:
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=message):
                validated(**changes)
