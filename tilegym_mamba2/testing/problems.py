"""The table of problems, each named by the branch that it hits."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from tilegym_mamba2.testing.inputs import Inputs, make_decode_inputs, make_inputs


@dataclass(frozen=True)
class Scenario:
    """A problem named by the branch that it hits: options of `make_inputs` or `make_decode_inputs`.

    `run_op(op, op_inputs(op, scenario.inputs(dtype)), backend)` puts it to any op that it `suits`.
    """

    make: Callable[..., Inputs]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def inputs(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Inputs:
        return self.make(dtype, device, **self.options)

    def suits(self, op: str) -> bool:
        """Whether the problem can be put to an op: only the whole forward has cu_seqlens."""
        if (op == "selective_state_update") != (self.make is make_decode_inputs):
            return False
        return op == "mamba_chunk_scan" or "cu_seqlens" not in self.options


def _scenarios(make: Callable[..., Inputs], **options: Mapping[str, Any]) -> dict[str, Scenario]:
    return {name: Scenario(make, value) for name, value in options.items()}


# Two rows whose sequences begin in different places, more than one in a chunk of 16, 32 or 64.
_PACKED: Inputs = {
    "seqlen": 100,
    "seq_idx": ([3, 13, 4, 1, 5, 10, 3, 30, 9, 46], [0, 70, 1, 30]),
    "initial_states": True,
}
_ONLY_FLOAT32 = {"dt": torch.float32}
_MIXED = {"x": torch.float32, "B": torch.bfloat16, "C": torch.float16, "dt": torch.bfloat16, "z": torch.float16}
_VARLEN: Inputs = {"batch": 1, "seqlen": 100, "cu_seqlens": (0, 13, 47, 100)}
_EMPTY_SEQUENCES: Inputs = {"batch": 1, "seqlen": 70, "cu_seqlens": (0, 0, 30, 30, 30, 70, 70), "initial_states": True}

PROBLEMS: Mapping[str, Scenario] = MappingProxyType(
    _scenarios(
        make_inputs,
        plain={"seqlen": 64},
        bare={"D": None, "dt_bias": False, "dt_softplus": False},
        ragged_tail={"seqlen": 150, "chunk_size": 64},
        many_chunks={"batch": 1, "nheads": 2, "headdim": 8, "seqlen": 300, "chunk_size": 16},
        chunk_24={"chunk_size": 24},
        chunk_of_one={"seqlen": 9, "chunk_size": 1},
        chunk_longer_than_row={"seqlen": 40, "chunk_size": 300},
        chunk_edge_below={"seqlen": 63, "chunk_size": 64, "initial_states": True},
        chunk_edge_exact={"seqlen": 64, "chunk_size": 64, "initial_states": True},
        chunk_edge_above={"seqlen": 65, "chunk_size": 64, "initial_states": True},
        one_token={"seqlen": 1, "nheads": 8, "headdim": 32, "decay": (0.5, 5.0), "initial_states": True, "z": True},
        empty_batch={"batch": 0, "initial_states": True, "z": True},
        empty_seq={"seqlen": 0, "initial_states": True, "z": True},
        empty_seq_no_state={"seqlen": 0},
        groups={"nheads": 8, "ngroups": 4, "headdim": 8},
        one_group={"nheads": 3, "ngroups": 1},
        every_head_a_group={"nheads": 3, "ngroups": 3},
        odd_headdim={"headdim": 20},
        tiny_headdim={"headdim": 3},
        odd_dstate={"dstate": 24},
        tiny_dstate={"dstate": 5},
        one_dim={"headdim": 1, "dstate": 1, "nheads": 8, "chunk_size": 16},
        wide_headdim={"batch": 1, "nheads": 1, "ngroups": 1, "headdim": 136, "seqlen": 40},
        wide_dstate={"batch": 1, "nheads": 1, "ngroups": 1, "dstate": 200, "seqlen": 40},
        long_decay={"seqlen": 150, "decay": (1.0, 50.0), "initial_states": True},
        long_memory={"seqlen": 150, "decay": (1e-6, 1e-3), "initial_states": True},
        extreme_dt={"A": (1e4, 1e4), "decay": (1e4, 5.1e5), "initial_states": True},
        no_decay={"values": {"A": 0.0}, "decay": (1e-3, 1.0), "initial_states": True},
        softplus_ends={
            "seqlen": 64,
            "values": {
                "dt": torch.tensor([-20.0, -40.0, 19.5, 20.5, 25.0, 90.0, -3.0, 0.0])[torch.arange(64) % 8][:, None]
            },
        },
        # Steps of 2e-9 with nothing beside them: what a softplus without log1p loses.
        softplus_tiny={"values": {"dt": -20.0, "x": 2e3, "B": 50.0, "C": 50.0}, "D": None, "dtypes": _ONLY_FLOAT32},
        dt_limits={"dt_limit": (0.05, 0.3), "decay": (0.02, 5.0)},
        dt_limits_no_softplus={"dt_limit": (0.05, 0.3), "dt_softplus": False},
        no_softplus_clamped={"dt_softplus": False, "decay": (1e-2, 1.0)},
        d_vector={"D": "channels"},
        gate={"z": True},
        gate_no_d={"z": True, "D": None},
        initial_states_float16={"initial_states": torch.float16, "decay": (1e-3, 1e-1)},
        initial_states_bfloat16={"initial_states": torch.bfloat16, "decay": (1e-3, 1e-1)},
        initial_states_float32={"initial_states": torch.float32, "decay": (1e-3, 1e-1)},
        initial_states_float64={"initial_states": torch.float64, "decay": (1e-3, 1e-1)},
        state_dtype_float32={"state_dtype": torch.float32, "decay": (1e-3, 1e-1)},
        state_dtype_bfloat16={"state_dtype": torch.bfloat16, "decay": (1e-3, 1e-1)},
        boundary_in_chunk={**_PACKED, "decay": (1e-3, 1.0)},
        boundary_at_chunk_edge={"batch": 1, "seqlen": 96, "seq_idx": ([0, 32, 1, 32, 2, 32],), "initial_states": True},
        reused_ids={
            "batch": 1,
            "seq_idx": ([0, 20, 1, 5, 0, 11, 1, 34],),
            "initial_states": True,
            "decay": (1e-3, 0.1),
        },
        one_id={"seq_idx": ([5, 70], [0, 70]), "initial_states": True, "decay": (1e-3, 0.1)},
        every_token_a_sequence={"batch": 1, "seqlen": 40, "seq_idx": ([0, 1, 1, 1] * 20,), "initial_states": True},
        ids_int64={**_PACKED, "seq_idx_dtype": torch.int64},
        ids_uint8={**_PACKED, "seq_idx_dtype": torch.uint8, "decay": (1e-3, 1.0)},
        packed_gate={**_PACKED, "z": True, "D": "channels"},
        varlen=_VARLEN,
        varlen_states={**_VARLEN, "initial_states": True, "decay": (1e-3, 0.1), "cu_seqlens_dtype": torch.int64},
        varlen_empty_sequences=_EMPTY_SEQUENCES,
        varlen_first_state_only={**_VARLEN, "initial_states": True, "first_state_only": True, "decay": (1e-3, 0.1)},
        varlen_one_sequence={"batch": 1, "cu_seqlens": (0, 70), "initial_states": torch.float16},
        varlen_no_sequence={"batch": 1, "seqlen": 0, "cu_seqlens": (0,)},
        varlen_all_empty={"batch": 1, "seqlen": 0, "cu_seqlens": (0, 0, 0), "initial_states": True},
        varlen_and_ids={**_VARLEN, "seq_idx": ([0, 30, 1, 70],), "initial_states": True, "decay": (1e-3, 0.1)},
        varlen_gate={**_VARLEN, "z": True, "D": "channels", "dt_limit": (0.01, 2.0)},
        mixed_dtypes={"dtypes": _MIXED, "z": True},
        mixed_with_float32={"dtypes": {"x": torch.bfloat16, "dt": torch.float32, "A": torch.bfloat16}, "z": True},
        strided_views={"layout": "projection", "z": True},
        transposed={"layout": "transposed", "z": True, "initial_states": True, "D": "channels"},
        unaligned={"layout": "unaligned", "nheads": 3, "ngroups": 1, "z": True, **_PACKED},
        expanded={"layout": "expanded", "z": True, "initial_states": True, "D": "channels"},
        varlen_unaligned={**_VARLEN, "layout": "unaligned", "initial_states": True},
        state_past_float16={
            "seqlen": 100,
            "values": {"A": -1e-4, "x": 30.0, "B": 30.0, "C": 1e-4},
            "decay": (1.0, 50.0),
        },
        poison_x={**_PACKED, "z": True, "poison": ("x", 0, 20, math.nan)},
        poison_x_infinite={"poison": ("x", 1, 40, math.inf)},
        poison_B={**_PACKED, "poison": ("B", 0, 20, math.nan)},
        poison_C={**_PACKED, "poison": ("C", 0, 20, math.inf)},
        poison_z={"z": True, "poison": ("z", 1, 40, math.nan)},
        poison_dt={**_PACKED, "poison": ("dt", 0, 20, math.nan)},
        poison_dt_infinite={**_PACKED, "poison": ("dt", 0, 20, math.inf)},
        poison_varlen={**_VARLEN, "poison": ("x", 0, 20, math.nan), "initial_states": True},
    )
)

DECODE_PROBLEMS: Mapping[str, Scenario] = MappingProxyType(
    _scenarios(
        make_decode_inputs,
        decode_plain={},
        decode_bare={"D": False, "dt_bias": False, "dt_softplus": False},
        decode_gate={"z": True},
        decode_untied={"tied": False, "z": True},
        decode_groups={"nheads": 8, "ngroups": 4},
        decode_every_head_a_group={"nheads": 3, "ngroups": 3},
        decode_odd_headdim={"headdim": 20},
        decode_odd_dstate={"dstate": 24},
        decode_one_dim={"headdim": 1, "dstate": 1, "nheads": 16},
        decode_wide_dstate={"dstate": 200},
        decode_one_row={"batch": 1, "nheads": 1, "ngroups": 1},
        decode_empty_batch={"batch": 0},
        decode_empty_batch_indexed={"batch": 0, "indices": ()},
        decode_indices={"indices": (4, 0, 3)},
        decode_padding={"indices": (-1, 5, -7), "z": True},
        decode_all_padding={"indices": (-1, -1, -1), "indices_dtype": torch.int64},
        decode_softplus_ends={"batch": 16, "tied": False, "headdim": 8, "values": {
            "dt": (-20.0, -40.0, 19.5, 20.5, 25.0, 90.0, -3.0, 0.0)}},
        decode_softplus_tiny={
            "values": {"dt": -20.0, "state": 0.0}, "D": False, "state_dtype": torch.float32, "dtypes": _ONLY_FLOAT32},
        decode_negative_dt={"dt_softplus": False, "values": {"dt": -0.05, "dt_bias": 0.01}},
        decode_state_float32={"state_dtype": torch.float32},
        decode_state_bfloat16={"state_dtype": torch.bfloat16},
        decode_mixed_dtypes={"dtypes": _MIXED, "z": True},
        decode_transposed={"layout": "transposed", "tied": False, "z": True},
        decode_unaligned={"layout": "unaligned", "tied": False, "z": True, "indices": (4, 0, 3)},
        decode_expanded={"layout": "expanded", "tied": False, "z": True},
    )
)  # fmt: skip
