"""One place that validates a call: shapes, dtypes, devices and values, each error naming its argument.

Every op's call becomes a `Problem` before any work starts. Kernels rely on it and check nothing again.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch

Tensor = torch.Tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Problem:
    """A validated call: its sizes and dtypes, what it costs, and whether autograd would go through it.

    Sizes that an op does not have are 0 (`nseq` without cu_seqlens, `chunk_size` in the decode step).
    """

    op: str
    device: torch.device
    dtypes: Mapping[str, torch.dtype]
    differentiated_argument: str | None
    batch: int = 0
    seqlen: int = 0
    nheads: int = 0
    headdim: int = 0
    ngroups: int = 0
    dstate: int = 0
    chunk_size: int = 0
    nchunks: int = 0
    nseq: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole forward in chunk form, causal halves counted as halves."""
        tokens, states = self.batch * self.seqlen, self.nheads * self.headdim * self.dstate
        inside = self.chunk_size * (self.ngroups * self.dstate + self.nheads * self.headdim) // 2
        return 2 * tokens * (2 * states + inside)

    @property
    def min_bytes(self) -> int:
        """Bytes of the whole forward if every input is read once and every output written once."""
        tokens = self.batch * self.seqlen
        rows = self.nseq or self.batch
        sizes = {
            "x": 2 * tokens * self.nheads * self.headdim,  # out is as large, in x's dtype
            "z": tokens * self.nheads * self.headdim,
            "dt": tokens * self.nheads,
            "B": tokens * self.ngroups * self.dstate,
            "C": tokens * self.ngroups * self.dstate,
            "seq_idx": tokens,
            "initial_states": rows * self.nheads * self.headdim * self.dstate,
        }
        final_states = 4 * sizes["initial_states"]
        return final_states + sum(sizes[name] * dtype.itemsize for name, dtype in self.dtypes.items() if name in sizes)


def float64_reason(problem: Problem, converted: str = "initial_states") -> str | None:
    """Why kernels that compute in float32 can't do a problem: a float64 argument, but for the one that they convert."""
    for name, dtype in problem.dtypes.items():
        if dtype == torch.float64 and name != converted:
            return (
                f"{name} is float64, and its kernels compute in float32: convert it, or use backend='torch-reference'"
            )
    return None


@cache
def _dims(layout: str) -> tuple[str, ...]:
    return tuple(layout.split())


class Call:
    """Binds a call's arguments to named sizes, and raises at the first that does not fit.

    `bind("x", x, "batch seqlen nheads headdim")` fixes sizes that are still free and compares the others.
    """

    def __init__(self, op: str, device: torch.device | None = None, **sizes: int):
        self.op = op
        self.device = device
        self.device_owner = ""
        self.sizes = sizes
        self.dtypes: dict[str, torch.dtype] = {}
        self.differentiated_argument: str | None = None
        self._grad_enabled = torch.is_grad_enabled()

    def bind(
        self, name: str, value: Any, *layouts: str, dtypes: tuple[torch.dtype, ...] = _FLOATS, optional: bool = False
    ) -> None:
        """Checks that `value` is a tensor on the call's device with one of the dtypes and one of the layouts."""
        if value is None and optional:
            return
        if not isinstance(value, Tensor):
            wanted = "a torch.Tensor or None" if optional else "a torch.Tensor"
            raise TypeError(f"{self.op}: {name} must be {wanted}, got {type(value).__name__}")
        if value.dtype not in dtypes:
            raise TypeError(f"{self.op}: {name} has dtype {value.dtype}, expected one of {_names(dtypes)}")
        if value.layout != torch.strided:
            raise TypeError(f"{self.op}: {name} has layout {value.layout}, expected torch.strided")
        if self.device is None:
            self.device, self.device_owner = value.device, name
        elif value.device != self.device:
            raise ValueError(
                f"{self.op}: {name} is on {value.device}, but {self.device_owner} is on {self.device}; "
                "all tensors must be on one device"
            )
        self._match(name, value.shape, layouts)
        self.dtypes[name] = value.dtype
        if self._grad_enabled and value.requires_grad and self.differentiated_argument is None:
            self.differentiated_argument = name

    def _match(self, name: str, shape: torch.Size, layouts: tuple[str, ...]) -> None:
        sizes = self.sizes
        for layout in layouts:
            dims = _dims(layout)
            if len(dims) == len(shape):
                for dim, size in zip(dims, shape):  # noqa: B905 (the lengths are equal, and this runs at every call)
                    if sizes.get(dim, size) != size:
                        break
                else:
                    sizes.update(zip(dims, shape))  # noqa: B905
                    return
        expected = " or ".join(
            "(" + ", ".join(f"{dim}={sizes[dim]}" if dim in sizes else dim for dim in layout.split()) + ")"
            for layout in layouts
        )
        raise ValueError(f"{self.op}: {name} has shape {tuple(shape)}, expected {expected}")

    def positive(self, **owners: str) -> None:
        """Checks that sizes are at least 1; `owners` maps a size to the argument that sets it."""
        for dim, owner in owners.items():
            if self.sizes[dim] < 1:
                raise ValueError(f"{self.op}: {owner} has {dim}={self.sizes[dim]}, which must be at least 1")

    def groups(self) -> None:
        nheads, ngroups = self.sizes["nheads"], self.sizes["ngroups"]
        if nheads % ngroups:
            raise ValueError(
                f"{self.op}: B has ngroups={ngroups}, which must divide nheads={nheads} (from x) without a remainder"
            )

    def problem(self) -> Problem:
        assert self.device is not None
        known = ("batch", "seqlen", "nheads", "headdim", "ngroups", "dstate", "chunk_size", "nchunks", "nseq")
        sizes = {name: self.sizes[name] for name in known if name in self.sizes}
        return Problem(
            self.op,
            self.device,
            self.dtypes,
            self.differentiated_argument,
            **sizes,
        )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _chunk_size(op: str, value: Any) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = None
    if size is None or isinstance(value, bool):
        raise TypeError(f"{op}: chunk_size must be an int, got {type(value).__name__}")
    if size < 1:
        raise ValueError(f"{op}: chunk_size is {size}, which must be at least 1")
    return size


def _flag(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {type(value).__name__}")


def _dt_limit(op: str, value: Any) -> None:
    if not isinstance(value, (tuple, list)) or len(cast(Any, value)) != 2:
        raise TypeError(f"{op}: dt_limit must be a pair of numbers (low, high), got {value!r}")
    low, high = cast(Any, value)
    if not all(isinstance(bound, (int, float)) and not isinstance(bound, bool) for bound in (low, high)):
        raise TypeError(f"{op}: dt_limit must be a pair of numbers (low, high), got {value!r}")
    if math.isnan(low) or math.isnan(high) or low > high:
        raise ValueError(f"{op}: dt_limit is {value!r}, which must be (low, high) with low <= high")


def _state_dtype(op: str, value: Any) -> None:
    if value is not None and value not in _FLOATS:
        got = value if isinstance(value, torch.dtype) else type(value).__name__
        raise TypeError(f"{op}: state_dtype must be one of {_names(_FLOATS)} or None, got {got}")


def nchunks_of(seqlen: int, chunk_size: int) -> int:
    """Number of chunks that hold seqlen tokens; the last may be partly empty."""
    return -(-seqlen // chunk_size)


_Validate = TypeVar("_Validate", bound=Callable[..., Problem])
_remembered: dict[Any, Problem] = {}
_MOST_REMEMBERED = 4096


def _remembers(validate: _Validate) -> _Validate:
    """Decorator: on a GPU, where host time counts and no values are read, a valid call is validated once."""

    @wraps(validate)
    def remembering(*arguments: Any) -> Problem:
        first = arguments[0]
        if type(first) not in (Tensor, torch.nn.Parameter) or first.is_cpu:
            return validate(*arguments)
        key = (validate, torch.is_grad_enabled(), *_signature(arguments))
        try:
            problem = _remembered.get(key)
        except TypeError:  # an argument that can't be hashed
            return validate(*arguments)
        if problem is None:
            problem = validate(*arguments)
            if len(_remembered) >= _MOST_REMEMBERED:
                _remembered.clear()
            _remembered[key] = problem
        return problem

    return cast(Any, remembering)


def _signature(values: Iterable[Any]) -> list[Any]:
    """All of the arguments that validation looks at; types tell equal values such as 1 and True apart."""
    signature: list[Any] = []
    for value in values:
        if value is None:
            signature.append(None)
        elif isinstance(value, Tensor):
            signature += (value.shape, value.dtype, value.device, value.layout, value.requires_grad)
        elif isinstance(value, tuple):
            signature.append(tuple(_signature(cast(Any, value))))
        else:
            signature += (type(value), value)
    return signature


@_remembers
def chunk_cumsum_problem(dt: Any, A: Any, chunk_size: Any, dt_bias: Any, dt_softplus: Any, dt_limit: Any) -> Problem:
    """Validates a call of `chunk_cumsum`."""
    call = Call("chunk_cumsum")
    call.bind("dt", dt, "batch seqlen nheads")
    call.bind("A", A, "nheads")
    call.bind("dt_bias", dt_bias, "nheads", optional=True)
    call.positive(nheads="dt")
    call.sizes["chunk_size"] = _chunk_size(call.op, chunk_size)
    call.sizes["nchunks"] = nchunks_of(call.sizes["seqlen"], call.sizes["chunk_size"])
    _flag(call.op, "dt_softplus", dt_softplus)
    _dt_limit(call.op, dt_limit)
    return call.problem()


def _bind_chunked(call: Call, x: Any, B: Any, dt_out: Any, dA_cumsum: Any, seq_idx: Any) -> None:
    call.bind("x", x, "batch seqlen nheads headdim")
    call.bind("B", B, "batch seqlen ngroups dstate")
    call.positive(nheads="x", headdim="x", ngroups="B", dstate="B")
    call.groups()
    for name, value in (("dt_out", dt_out), ("dA_cumsum", dA_cumsum)):
        call.bind(name, value, "batch nheads nchunks chunk_size", dtypes=(torch.float32, torch.float64))
    call.positive(chunk_size="dt_out")
    sizes = call.sizes
    wanted = nchunks_of(sizes["seqlen"], sizes["chunk_size"])
    if sizes["nchunks"] != wanted:
        raise ValueError(
            f"{call.op}: dt_out has nchunks={sizes['nchunks']} of chunk_size={sizes['chunk_size']}, expected "
            f"nchunks={wanted} for seqlen={sizes['seqlen']} (from x)"
        )
    call.bind("seq_idx", seq_idx, "batch seqlen", dtypes=_INTEGERS, optional=True)


@_remembers
def fwd_pass_state_problem(
    x: Any, B: Any, dt_out: Any, dA_cumsum: Any, initial_states: Any, seq_idx: Any, state_dtype: Any
) -> Problem:
    """Validates a call of `fwd_pass_state`."""
    call = Call("fwd_pass_state")
    _bind_chunked(call, x, B, dt_out, dA_cumsum, seq_idx)
    call.bind("initial_states", initial_states, "batch nheads headdim dstate", optional=True)
    _state_dtype(call.op, state_dtype)
    return call.problem()


@_remembers
def compute_out_problem(
    x: Any, B: Any, C: Any, dt_out: Any, dA_cumsum: Any, states: Any, D: Any, z: Any, seq_idx: Any
) -> Problem:
    """Validates a call of `compute_out`."""
    call = Call("compute_out")
    _bind_chunked(call, x, B, dt_out, dA_cumsum, seq_idx)
    call.bind("C", C, "batch seqlen ngroups dstate")
    call.bind("states", states, "batch nchunks nheads headdim dstate")
    call.bind("D", D, "nheads", "nheads headdim", optional=True)
    call.bind("z", z, "batch seqlen nheads headdim", optional=True)
    return call.problem()


@_remembers
def scan_problem(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    chunk_size: Any,
    D: Any,
    z: Any,
    dt_bias: Any,
    initial_states: Any,
    seq_idx: Any,
    cu_seqlens: Any,
    dt_softplus: Any,
    dt_limit: Any,
    state_dtype: Any,
) -> Problem:
    """Validates a call of the whole forward.

    The values of cu_seqlens are checked where reading them costs nothing, on the CPU: on a GPU it would stall
    the stream and forbid CUDA graph capture.
    """
    call = Call("mamba_chunk_scan")
    call.bind("x", x, "batch seqlen nheads headdim")
    call.bind("dt", dt, "batch seqlen nheads")
    call.bind("A", A, "nheads")
    call.bind("B", B, "batch seqlen ngroups dstate")
    call.positive(nheads="x", headdim="x", ngroups="B", dstate="B")
    call.groups()
    call.bind("C", C, "batch seqlen ngroups dstate")
    call.sizes["chunk_size"] = _chunk_size(call.op, chunk_size)
    call.sizes["nchunks"] = nchunks_of(call.sizes["seqlen"], call.sizes["chunk_size"])
    call.bind("D", D, "nheads", "nheads headdim", optional=True)
    call.bind("z", z, "batch seqlen nheads headdim", optional=True)
    call.bind("dt_bias", dt_bias, "nheads", optional=True)
    call.bind("seq_idx", seq_idx, "batch seqlen", dtypes=_INTEGERS, optional=True)
    if cu_seqlens is None:
        call.bind("initial_states", initial_states, "batch nheads headdim dstate", optional=True)
    else:
        _bind_sequences(call, cu_seqlens)
        call.sizes["first"] = 1
        layouts = ("nseq nheads headdim dstate", "first nheads headdim dstate")
        call.bind("initial_states", initial_states, *layouts, optional=True)
    _flag(call.op, "dt_softplus", dt_softplus)
    _dt_limit(call.op, dt_limit)
    _state_dtype(call.op, state_dtype)
    return call.problem()


def _bind_sequences(call: Call, cu_seqlens: Any) -> None:
    call.bind("cu_seqlens", cu_seqlens, "boundaries", dtypes=(torch.int32, torch.int64))
    sizes = call.sizes
    if sizes["boundaries"] < 1:
        raise ValueError(f"{call.op}: cu_seqlens is empty, expected shape (nseq + 1,)")
    if sizes["batch"] != 1:
        raise ValueError(
            f"{call.op}: cu_seqlens needs batch 1, the sequences packed in one row; x has batch={sizes['batch']}"
        )
    sizes["nseq"] = sizes["boundaries"] - 1
    if _readable(cu_seqlens):
        offsets = cast(list[int], cu_seqlens.tolist())
        rising = all(start <= stop for start, stop in itertools.pairwise(offsets))
        if offsets[0] != 0 or offsets[-1] != sizes["seqlen"] or not rising:
            raise ValueError(
                f"{call.op}: cu_seqlens must rise from 0 to seqlen={sizes['seqlen']}, got {_shortened(offsets)}"
            )


def _readable(indices: Any) -> bool:
    """Whether there are values and reading them costs nothing: not those of a fake tensor, nor while tracing."""
    if indices.device.type != "cpu" or type(indices) is not Tensor:
        return False
    return torch._C._len_torch_dispatch_stack() == 0  # pyright: ignore[reportPrivateUsage]


def _shortened(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:6]))}, ..., {numbers[-1]}]"


def state_update_problem(
    state: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    z: Any,
    dt_bias: Any,
    dt_softplus: Any,
    state_batch_indices: Any,
) -> Problem:
    """Validates a call of `selective_state_update` whose arguments all have a head dimension.

    The values of state_batch_indices are checked on the CPU only, as those of cu_seqlens are.
    """
    call = Call("selective_state_update")
    call.bind("x", x, "batch nheads headdim")
    rows = "batch" if state_batch_indices is None else "nslots"
    call.bind("state", state, f"{rows} nheads headdim dstate")
    if any(size > 1 and stride == 0 for size, stride in zip(state.shape, state.stride(), strict=True)):
        raise ValueError(f"{call.op}: state has a dimension of stride 0, but is updated in place: pass a copy")
    if call.differentiated_argument is not None and state.requires_grad and state.is_leaf:
        raise ValueError(
            f"{call.op}: state is a leaf that requires grad, but is updated in place: pass state.clone(), or call it "
            "under torch.no_grad()"
        )
    call.bind("dt", dt, "batch nheads headdim")
    call.bind("A", A, "nheads headdim dstate")
    call.bind("B", B, "batch ngroups dstate")
    call.positive(nheads="x", headdim="x", ngroups="B", dstate="state")
    call.groups()
    call.bind("C", C, "batch ngroups dstate")
    call.bind("D", D, "nheads headdim", optional=True)
    call.bind("z", z, "batch nheads headdim", optional=True)
    call.bind("dt_bias", dt_bias, "nheads headdim", optional=True)
    _flag(call.op, "dt_softplus", dt_softplus)
    call.bind("state_batch_indices", state_batch_indices, "batch", dtypes=(torch.int32, torch.int64), optional=True)
    if state_batch_indices is not None and _readable(state_batch_indices):
        used = cast(list[int], state_batch_indices[state_batch_indices >= 0].tolist())
        if used and max(used) >= call.sizes["nslots"]:
            raise ValueError(
                f"{call.op}: state_batch_indices has {max(used)}, but state has only {call.sizes['nslots']} rows"
            )
        if len(set(used)) != len(used):
            raise ValueError(f"{call.op}: state_batch_indices names a row twice, whose update would be lost")
    return call.problem()
