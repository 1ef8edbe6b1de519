"""torch-reference beside transformers' torch path on the CPU: mamba2-130m, 4,096 tokens, batch 1, float32."""

import time
from typing import Any

import pytest
import torch

from tilegym_mamba2.bench.peers import find_implementation
from tilegym_mamba2.testing import budget, layer_inputs, oracle_scan, relative_error

TEXT = "What a state remembers of a text depends on how fast it forgets. "


@pytest.fixture(scope="module")
def inputs() -> dict[str, Any]:
    return layer_inputs("mamba2-130m", 4096, TEXT, dtype=torch.float32)


@pytest.fixture(scope="module")
def truth(inputs: dict[str, Any]) -> Any:
    return oracle_scan(**inputs)


@pytest.mark.benchmark(timer=time.perf_counter)
@pytest.mark.parametrize("case", ["mamba2-130m at 4096 tokens"])
@pytest.mark.parametrize("implementation", ["torch-reference", "transformers"])
def test_reference_on_cpu(
    case: str, turn: str, implementation: str, inputs: dict[str, Any], truth: Any, benchmark: Any
) -> None:
    arguments = {name: value for name, value in inputs.items() if name != "chunk_size"}
    call = find_implementation(implementation).bind(arguments, inputs["chunk_size"])
    out, final_states = call()
    error = relative_error(out, truth[0])
    assert error <= budget(torch.float32)
    assert relative_error(final_states, truth[1]) <= budget(torch.float32)
    benchmark.extra_info.update(error_out=error, threads=torch.get_num_threads())
    benchmark.pedantic(call, rounds=5, warmup_rounds=1)
