"""What a backend is tested with: an oracle, inputs, error budgets, and the conformance suite `check_backend`.

    from tilegym_mamba2.testing import check_backend

    for result in check_backend("my-backend"):
        print(result.op, result.problem, result.dtype, result.error, result.budget, result.detail)
        assert result.ok

The oracle is the recurrence itself, token by token in float64. It shares no code with any backend.
"""

from tilegym_mamba2.testing.conformance import DTYPES, check_backend, checks
from tilegym_mamba2.testing.errors import budget, elementwise_error, relative_error
from tilegym_mamba2.testing.inputs import make_decode_inputs, make_inputs, relayout
from tilegym_mamba2.testing.layer import layer_inputs
from tilegym_mamba2.testing.oracle import (
    ORACLES,
    oracle_chunk_cumsum,
    oracle_compute_out,
    oracle_fwd_pass_state,
    oracle_scan,
    oracle_selective_state_update,
)
from tilegym_mamba2.testing.problems import DECODE_PROBLEMS, PROBLEMS, Scenario
from tilegym_mamba2.testing.properties import poisoned_memory
from tilegym_mamba2.testing.running import Check, Result, op_inputs, run_op

__all__ = [
    "DECODE_PROBLEMS",
    "DTYPES",
    "ORACLES",
    "PROBLEMS",
    "Check",
    "Result",
    "Scenario",
    "budget",
    "check_backend",
    "checks",
    "elementwise_error",
    "layer_inputs",
    "make_decode_inputs",
    "make_inputs",
    "op_inputs",
    "oracle_chunk_cumsum",
    "oracle_compute_out",
    "oracle_fwd_pass_state",
    "oracle_scan",
    "oracle_selective_state_update",
    "poisoned_memory",
    "relative_error",
    "relayout",
    "run_op",
]
