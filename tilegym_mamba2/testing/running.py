"""Running an op beside the oracle, and judging what came out."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_mamba2 import registry
from tilegym_mamba2.ops.chunk_cumsum import chunk_cumsum
from tilegym_mamba2.ops.compute_out import compute_out
from tilegym_mamba2.ops.fwd_pass_state import fwd_pass_state
from tilegym_mamba2.ops.mamba_chunk_scan import mamba_chunk_scan
from tilegym_mamba2.ops.selective_state_update import selective_state_update
from tilegym_mamba2.testing.errors import INFINITY, budget, elementwise_error, relative_error
from tilegym_mamba2.testing.inputs import Inputs
from tilegym_mamba2.testing.oracle import ORACLES, oracle_chunk_cumsum, oracle_fwd_pass_state

_ELEMENTWISE_BUDGET = {torch.float32: 1e-5, torch.float64: 1e-10}  # of each time step


OPS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "chunk_cumsum": chunk_cumsum,
        "compute_out": compute_out,
        "fwd_pass_state": fwd_pass_state,
        "mamba_chunk_scan": mamba_chunk_scan,
        "selective_state_update": selective_state_update,
    }
)


def ops_of(backend: str) -> list[str]:
    return [op for op in registry.ops() if op in OPS and registry.has_implementation(op, backend)]


class Output(NamedTuple):
    """One tensor that an op returned, what it should be, and how far it may be off."""

    name: str
    got: Tensor
    want: Tensor
    dtype: torch.dtype
    budget: float
    elementwise: bool = False


def op_inputs(op: str, inputs: Inputs) -> Inputs:
    """The op's own keyword arguments for the problem whose inputs, of the whole forward, are given.

    What an earlier stage would have made comes from the oracle, rounded as that stage rounds.
    """
    given = dict(inputs)
    names = list(inspect.signature(ORACLES[op]).parameters)
    if "dt_out" in names:
        wide = torch.float64 if torch.float64 in (given["dt"].dtype, given["A"].dtype) else torch.float32
        cumsum = {name: given[name] for name in inspect.signature(oracle_chunk_cumsum).parameters}
        dA_cumsum, dt_out = oracle_chunk_cumsum(**cumsum)
        given.update(dA_cumsum=dA_cumsum.to(wide), dt_out=dt_out.to(wide))
    if "states" in names:
        passing = {name: given[name] for name in inspect.signature(oracle_fwd_pass_state).parameters}
        given["states"] = oracle_fwd_pass_state(**passing)[0].to(_state_dtype(given))
    return {name: given[name] for name in names}


def _state_dtype(inputs: Inputs) -> torch.dtype:
    default = torch.float32 if inputs["x"].dtype == torch.float16 else inputs["x"].dtype
    return inputs["state_dtype"] or default


def run_op(op: str, inputs: Inputs, backend: str | None = None) -> list[Output]:
    """Runs an op on its own keyword arguments (see `op_inputs`): every output beside what the oracle says.

    Raises AssertionError if an argument, but for the decode step's state, was written to.
    """
    want: Any = ORACLES[op](**inputs)
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    state = None
    if op == "selective_state_update":
        inputs = {**inputs, "state": _clone_strided(inputs["state"])}
        state = before.pop("state")
    got: Any = OPS[op](**inputs, backend=backend)
    for name, value in before.items():
        assert _same_bits(inputs[name], value), f"{op} wrote to its argument {name}"
    if op == "chunk_cumsum":
        wide = torch.float64 if torch.float64 in (inputs["dt"].dtype, inputs["A"].dtype) else torch.float32
        return [
            Output("dA_cumsum", got[0], want[0], wide, budget(wide)),
            Output("dt_out", got[1], want[1], wide, _ELEMENTWISE_BUDGET[wide], elementwise=True),
        ]
    x = inputs["x"]
    precision = [x.dtype, inputs["B"].dtype]
    final_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if op == "fwd_pass_state":
        state_dtype = _state_dtype(inputs)
        return [
            Output("states", got[0], want[0], state_dtype, budget(*precision, state_dtype)),
            Output("final_states", got[1], want[1], final_dtype, budget(*precision)),
        ]
    if op == "selective_state_update":
        assert state is not None
        return [
            Output("out", got, want[0], x.dtype, budget(x.dtype)),
            Output("state", inputs["state"], want[1], state.dtype, budget(state.dtype)),
        ]
    precision.append(inputs["C"].dtype)
    if op == "compute_out":
        return [Output("out", got, want, x.dtype, budget(*precision, inputs["states"].dtype))]
    precision.append(_state_dtype(inputs))
    outputs = [
        Output("out", got[0], want[0], x.dtype, budget(*precision)),
        Output("final_states", got[1], want[1], final_dtype, budget(*precision)),
    ]
    assert (got[2] is None) == (want[2] is None), "varlen_states belong to cu_seqlens, and to nothing else"
    if want[2] is not None:
        outputs.append(Output("varlen_states", got[2], want[2], final_dtype, budget(*precision)))
    return outputs


def _clone_strided(tensor: Tensor) -> Tensor:
    """A copy with the same strides, the memory between the elements included."""
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _same_bits(tensor: Tensor, other: Tensor) -> bool:
    return torch.equal(tensor.nan_to_num(1e30), other.nan_to_num(1e30)) and torch.equal(tensor.isnan(), other.isnan())


@dataclass(frozen=True)
class Result:
    """What one check found. `ok` is True too where the backend refuses a problem as it may; `detail` says so."""

    op: str
    problem: str
    dtype: torch.dtype
    error: float
    budget: float
    ok: bool
    detail: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Check:
    """One thing that is asked of a backend: of an op, a problem of the table or a property, in a dtype."""

    op: str
    problem: str
    dtype: torch.dtype
    outputs: Callable[[str, torch.device], list[Output]] = field(repr=False)

    @property
    def id(self) -> str:
        return f"{self.op}-{self.problem}-{str(self.dtype).removeprefix('torch.')}"

    def run(self, backend: str, device: torch.device | str = "cpu") -> Result:
        """Runs the check on a backend; raises nothing but what stops the process."""
        worst, allowed, complaints = 0.0, budget(self.dtype), list[str]()
        try:
            outputs = self.outputs(backend, torch.device(device))
            for output in outputs:
                error, complaint = _judge(output)
                if error / output.budget >= worst / allowed:
                    worst, allowed = error, output.budget
                if complaint:
                    complaints.append(complaint)
        except NotImplementedError as refusal:
            return Result(self.op, self.problem, self.dtype, math.nan, allowed, True, str(refusal), refused=True)
        except Exception as failure:  # whatever a backend raises is its failure, not the suite's
            detail = f"{type(failure).__name__}: {failure}"
            return Result(self.op, self.problem, self.dtype, INFINITY, allowed, False, detail)
        return Result(self.op, self.problem, self.dtype, worst, allowed, not complaints, "; ".join(complaints))


def _judge(output: Output) -> tuple[float, str]:
    """An output's error, and what is wrong with it, if anything."""
    name, got, want, dtype, allowed, elementwise = output
    if got.shape != want.shape:
        return INFINITY, f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.dtype != dtype:
        return INFINITY, f"{name} has dtype {got.dtype}, expected {dtype}"
    if got.device != want.device:
        return INFINITY, f"{name} is on {got.device}, expected {want.device}"
    if name == "out" and not got.is_contiguous():
        return INFINITY, f"{name} is not contiguous"
    error = elementwise_error(got, want) if elementwise else relative_error(got, want)
    if error <= allowed:
        return error, ""
    worst = (got.double() - want).abs().nan_to_num(INFINITY, INFINITY)
    worst = torch.where(want.isfinite(), worst, -1)
    index = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
    place = f"[{', '.join(map(str, index))}]"
    return (
        error,
        f"{name} is off by {error:.2g}; at {place} it is {float(got[index]):.6g}, not {float(want[index]):.6g}",
    )
