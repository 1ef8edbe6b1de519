"""What must hold between calls: causality, invariances, determinism, containment of NaN."""

import inspect
import math
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_mamba2.ops.chunk_cumsum import chunk_cumsum
from tilegym_mamba2.ops.compute_out import compute_out
from tilegym_mamba2.ops.fwd_pass_state import fwd_pass_state
from tilegym_mamba2.ops.mamba_chunk_scan import mamba_chunk_scan
from tilegym_mamba2.ops.selective_state_update import selective_state_update
from tilegym_mamba2.testing.errors import budget
from tilegym_mamba2.testing.inputs import Inputs, make_decode_inputs, make_inputs, relayout
from tilegym_mamba2.testing.oracle import (
    oracle_chunk_cumsum,
    oracle_compute_out,
    oracle_fwd_pass_state,
    oracle_scan,
    oracle_selective_state_update,
)
from tilegym_mamba2.testing.problems import DECODE_PROBLEMS, PROBLEMS
from tilegym_mamba2.testing.running import Output, op_inputs, ops_of, run_op


@contextmanager
def poisoned_memory() -> Generator[None, None, None]:
    """Context manager: torch fills whatever memory it allocates with NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            warnings.filterwarnings("ignore", message=".*CuBLAS.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = filled


@contextmanager
def _tf32_allowed() -> Generator[None, None, None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _scan(inputs: Inputs, backend: str) -> tuple[Tensor, Tensor, Tensor | None]:
    return mamba_chunk_scan(**inputs, backend=backend)


def _tokens(inputs: Inputs, start: int, stop: int) -> Inputs:
    """The inputs of a part of each row."""
    sliced = ("x", "dt", "B", "C", "z", "seq_idx")
    return {
        name: value[:, start:stop] if name in sliced and value is not None else value for name, value in inputs.items()
    }


def _causality(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """Other tokens from 40 on leave the outputs before as they are."""
    inputs = make_inputs(dtype, device, z=True)
    other = make_inputs(dtype, device, z=True, seed=1)
    changed = dict(inputs)
    for name in ("x", "dt", "B", "C", "z"):
        changed[name] = torch.cat([inputs[name][:, :40], other[name][:, 40:]], 1)
    out, _, _ = _scan(inputs, backend)
    got, _, _ = _scan(changed, backend)
    return [Output("out[:, :40]", got[:, :40], out[:, :40].double(), dtype, budget(dtype))]


def _chunk_size_invariance(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    inputs = make_inputs(dtype, device, initial_states=True, decay=(1e-3, 1.0))
    want, want_final, _ = oracle_scan(**inputs)
    outputs: list[Output] = []
    for chunk_size in (1, 16, 40, 64, 256):
        out, final, _ = _scan({**inputs, "chunk_size": chunk_size}, backend)
        outputs.append(Output(f"out of chunk_size {chunk_size}", out, want, dtype, budget(dtype)))
        final_dtype = torch.promote_types(dtype, torch.float32)
        outputs.append(
            Output(f"final_states of chunk_size {chunk_size}", final, want_final, final_dtype, budget(dtype))
        )
    return outputs


def _split_and_carry(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """A row cut at a token, the second part given the first's final state, is the whole row."""
    inputs = make_inputs(dtype, device, initial_states=True, decay=(1e-3, 1.0), seqlen=100)
    want, want_final, _ = oracle_scan(**inputs)
    outputs: list[Output] = []
    for cut in (1, 41, 64):
        first, state, _ = _scan(_tokens(inputs, 0, cut), backend)
        second, final, _ = _scan({**_tokens(inputs, cut, 100), "initial_states": state}, backend)
        outputs.append(Output(f"out cut at {cut}", torch.cat([first, second], 1), want, dtype, budget(dtype)))
        outputs.append(Output(f"final_states cut at {cut}", final, want_final, final.dtype, budget(dtype)))
    return outputs


def _packed_is_separate(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """Sequences packed in a row, by seq_idx or by cu_seqlens, are what each is alone."""
    offsets = (0, 13, 14, 64, 100)
    options: Inputs = {"batch": 1, "seqlen": 100, "z": True, "decay": (1e-3, 1.0)}
    inputs = make_inputs(dtype, device, **options)
    ids = [number for i in range(4) for number in (i % 2, offsets[i + 1] - offsets[i])]
    by_ids = make_inputs(dtype, device, **options, seq_idx=[ids])
    by_offsets = make_inputs(dtype, device, **options, cu_seqlens=offsets)
    alone = [_scan(_tokens(inputs, i, j), backend) for i, j in pairwise(offsets)]
    want = torch.cat([out for out, _, _ in alone], 1).double()
    wanted_states = torch.cat([final for _, final, _ in alone]).double()
    out, final, _ = _scan(by_ids, backend)
    packed, packed_final, states = _scan(by_offsets, backend)
    assert states is not None
    return [
        Output("out", out, want, dtype, budget(dtype)),
        Output("final_states", final, wanted_states[-1:], final.dtype, budget(dtype)),
        Output("out of cu_seqlens", packed, want, dtype, budget(dtype)),
        Output("final_states of cu_seqlens", packed_final, wanted_states[-1:], final.dtype, budget(dtype)),
        Output("varlen_states", states, wanted_states, final.dtype, budget(dtype)),
    ]


def _batch_invariance(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """A row is the same alone, and beside rows of NaN."""
    inputs = make_inputs(dtype, device, batch=3, z=True, initial_states=True)
    rows = ("x", "dt", "B", "C", "z", "initial_states")
    outputs: list[Output] = []
    whole, whole_final, _ = _scan(inputs, backend)
    for row in range(3):
        alone = {name: value[row : row + 1] if name in rows else value for name, value in inputs.items()}
        beside = dict(inputs)
        for name in rows:
            beside[name] = torch.full_like(inputs[name], math.nan)
            beside[name][row] = inputs[name][row]
        for name, case, place in (("alone", alone, 0), ("beside NaN", beside, row)):
            out, final, _ = _scan(case, backend)
            want, want_final = whole[row].double(), whole_final[row].double()
            outputs.append(Output(f"out of row {row} {name}", out[place], want, dtype, budget(dtype)))
            outputs.append(
                Output(f"final_states of row {row} {name}", final[place], want_final, final.dtype, budget(dtype))
            )
    return outputs


def _groups_sliced(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """The heads of one group, given alone, are what they are among all."""
    inputs = make_inputs(dtype, device, nheads=6, ngroups=3, z=True)
    whole, whole_final, _ = _scan(inputs, backend)
    outputs: list[Output] = []
    for group in range(3):
        heads = slice(2 * group, 2 * group + 2)
        part = dict(inputs)
        for name, dim in {"x": 2, "z": 2, "dt": 2, "A": 0, "D": 0, "dt_bias": 0}.items():
            part[name] = inputs[name].narrow(dim, heads.start, 2)
        for name in ("B", "C"):
            part[name] = inputs[name][:, :, group : group + 1]
        out, final, _ = _scan(part, backend)
        outputs.append(Output(f"out of group {group}", out, whole[:, :, heads].double(), dtype, budget(dtype)))
        want = whole_final[:, heads].double()
        outputs.append(Output(f"final_states of group {group}", final, want, final.dtype, budget(dtype)))
    return outputs


def _determinism(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """The same bits each time."""
    inputs = make_inputs(dtype, device, z=True, initial_states=True)
    first = _scan(inputs, backend)
    outputs: list[Output] = []
    for _ in range(2):
        again = _scan(inputs, backend)
        outputs += [
            Output(name, got, want.double(), want.dtype, 1e-300)
            for name, got, want in zip(("out", "final_states"), again[:2], first[:2], strict=True)
        ]
    return outputs


def _strided_is_contiguous(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    inputs = make_inputs(dtype, device, z=True, initial_states=True, D="channels")
    want, want_final, _ = _scan(inputs, backend)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    outputs: list[Output] = []
    for layout in ("projection", "transposed", "unaligned"):
        out, final, _ = _scan({**inputs, **relayout(tensors, layout)}, backend)
        outputs.append(Output(f"out of {layout}", out, want.double(), dtype, budget(dtype)))
        outputs.append(Output(f"final_states of {layout}", final, want_final.double(), final.dtype, budget(dtype)))
    return outputs


def _fresh_memory(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """Nothing is read from memory that was not written, on every op that the backend has."""
    outputs: list[Output] = []
    for problem in ("ragged_tail", "packed_gate", "varlen_empty_sequences", "decode_padding"):
        scenario = {**PROBLEMS, **DECODE_PROBLEMS}[problem]
        for op in ops_of(backend):
            if scenario.suits(op):
                inputs = op_inputs(op, scenario.inputs(dtype, device))
                with poisoned_memory():
                    outputs += [output._replace(name=f"{op}: {output.name}") for output in run_op(op, inputs, backend)]
    return outputs


def _mixed_stages(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """Each stage of the backend between the others of torch-reference, and the other way round."""
    inputs = make_inputs(dtype, device, initial_states=True, decay=(1e-3, 1.0), chunk_size=16)
    want, want_final, _ = oracle_scan(**inputs)
    outputs: list[Output] = []
    for chosen in range(1, 7):
        names = [backend if chosen >> stage & 1 else "torch-reference" for stage in range(3)]
        values = dict(inputs)
        cumsum = {name: values[name] for name in inspect.signature(oracle_chunk_cumsum).parameters}
        values["dA_cumsum"], values["dt_out"] = chunk_cumsum(**cumsum, backend=names[0])
        passing = {name: values[name] for name in inspect.signature(oracle_fwd_pass_state).parameters}
        values["states"], final = fwd_pass_state(**passing, backend=names[1])
        last = {name: values[name] for name in inspect.signature(oracle_compute_out).parameters}
        out = compute_out(**last, backend=names[2])
        mix = ", ".join(names)
        outputs.append(Output(f"out of {mix}", out, want, dtype, budget(dtype)))
        outputs.append(Output(f"final_states of {mix}", final, want_final, final.dtype, budget(dtype)))
    return outputs


def _tf32(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """Within the wider budget where TF32 is allowed."""
    with _tf32_allowed():
        inputs = PROBLEMS["ragged_tail"].inputs(dtype, device)
        return run_op("mamba_chunk_scan", inputs, backend)


def _headless_decode(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """The decode step's form without a head dimension, of models with one head."""
    inputs = make_decode_inputs(dtype, device, nheads=1, ngroups=1, z=True)
    want, want_state = oracle_selective_state_update(**inputs)
    squeezed = {name: value.squeeze(1) for name, value in inputs.items() if name in ("state", "x", "dt", "B", "C", "z")}
    squeezed.update({name: inputs[name].squeeze(0) for name in ("A", "D", "dt_bias")})
    out = selective_state_update(**squeezed, dt_softplus=True, backend=backend)
    return [
        Output("out", out, want.squeeze(1), dtype, budget(dtype)),
        Output("state", squeezed["state"], want_state.squeeze(1), dtype, budget(dtype)),
    ]


def _decode_is_scan(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """Token after token through the decode step is the scan."""
    inputs = make_inputs(dtype, device, seqlen=9, z=True, initial_states=True, decay=(1e-3, 1.0))
    want, want_final, _ = oracle_scan(**inputs)
    state = inputs["initial_states"].clone()
    shape = inputs["x"].shape[2:]
    outs: list[Tensor] = []
    for t in range(9):
        token = {name: inputs[name][:, t] for name in ("x", "B", "C", "z")}
        tied = {name: inputs[name][:, None].expand(shape) for name in ("D", "dt_bias")}
        A = inputs["A"][:, None, None].expand(*shape, inputs["B"].shape[3])
        dt = inputs["dt"][:, t, :, None].expand(-1, *shape)
        outs.append(selective_state_update(state, dt=dt, A=A, **token, **tied, dt_softplus=True, backend=backend))
    return [
        Output("out", torch.stack(outs, 1), want, dtype, budget(dtype)),
        Output("state", state, want_final, state.dtype, budget(state.dtype)),
    ]


class Property(NamedTuple):
    op: str
    outputs: Callable[[torch.dtype, str, torch.device], list[Output]]
    dtypes: tuple[torch.dtype, ...] | None = None


PROPERTIES: Mapping[str, Property] = MappingProxyType(
    {
        "causality": Property("mamba_chunk_scan", _causality),
        "chunk_size_invariance": Property("mamba_chunk_scan", _chunk_size_invariance),
        "split_and_carry": Property("mamba_chunk_scan", _split_and_carry),
        "packed_is_separate": Property("mamba_chunk_scan", _packed_is_separate),
        "batch_invariance": Property("mamba_chunk_scan", _batch_invariance),
        "groups_sliced": Property("mamba_chunk_scan", _groups_sliced),
        "determinism": Property("mamba_chunk_scan", _determinism),
        "strided_is_contiguous": Property("mamba_chunk_scan", _strided_is_contiguous),
        "fresh_memory": Property("mamba_chunk_scan", _fresh_memory),
        "mixed_stages": Property("compute_out", _mixed_stages),
        "tf32_allowed": Property("mamba_chunk_scan", _tf32, (torch.float32,)),
        "headless_decode": Property("selective_state_update", _headless_decode),
        "decode_is_scan": Property("selective_state_update", _decode_is_scan),
    }
)
