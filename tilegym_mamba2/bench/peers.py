"""Implementations of the whole forward that are compared: this package's backends, and peers if they are installed.

A peer computes with its own defaults and its own search for configurations, except where its class says otherwise.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilegym_mamba2 import registry
from tilegym_mamba2.bench.timing import Call
from tilegym_mamba2.bench.workloads import Inputs, Workload, cost_of
from tilegym_mamba2.scan import mamba_chunk_scan_combined

CHUNK_SIZES = (64, 128, 256)

_AUTOTUNE_MILLISECONDS = {"warmup": 2, "rep": 10}  # of each configuration, by triton.testing.do_bench
_WHOLE_SEARCHES = 2
_MOST_CAPTURED_BYTES = 2**33  # of a tensor of transformers
_MOST_SHAPES = 128  # that torch.compile compiles, in one process
_MOST_SLOW_TOKENS = 2048  # per row; a slow peer takes minutes to compile or to run what is longer


class Implementation:
    """One way of computing the forward.

    Attributes:
        name: of a backend or a peer.
        peer: not of this package, so not held to its error budget.
        slow: not measured on long rows on a GPU unless it was asked for by name.
        searches_every_shape: so that what is compiled for one is not enough for others of the same headdim and dstate.
        compiles: something, so that it is worth a call ahead of the measurements.
        compiles_every_shape: so that nothing that is compiled for one is enough for another.
        chunk_sizes: those to try.
    """

    name: str
    peer: bool = True
    slow: bool = False
    searches_every_shape: bool = False
    compiles: bool = True
    compiles_every_shape: bool = False
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES

    def __init__(self, asked: bool):
        self._asked = asked

    def why_not(self, workload: Workload, device: torch.device) -> str | None:
        """None if it can do a workload here, else the reason."""
        reason = self._why_not(workload, device)
        if reason is None and self.slow and not self._asked and device.type == "cuda":
            return "it is slow on long rows: ask for it by name" if workload.seqlen > _MOST_SLOW_TOKENS else None
        return reason

    def _why_not(self, workload: Workload, device: torch.device) -> str | None:
        raise NotImplementedError

    def capturable(self, workload: Workload) -> bool:
        """Whether a CUDA graph can hold its calls."""
        return True

    def bind(self, inputs: Inputs, chunk_size: int) -> Call:
        """A call without arguments that returns (out, final_states). What `bind` itself does is not timed."""
        raise NotImplementedError


class BackendForward(Implementation):
    """The public function of this package with a backend's name."""

    peer = False

    def __init__(self, name: str, asked: bool):
        super().__init__(asked)
        self.name = name
        self.slow = name == "torch-reference"
        self.compiles = not self.slow
        if registry.has_implementation("mamba_chunk_scan", name) and not self.slow:
            self.chunk_sizes = (64,)  # its fused forward has chunks of its own

    def _why_not(self, workload: Workload, device: torch.device) -> str | None:
        reason = registry.explain_backends(device)[self.name]
        return None if reason == "available" else reason

    def capturable(self, workload: Workload) -> bool:
        return not (workload.lengths and self.name == "torch-reference")  # which reads cu_seqlens on the host

    def bind(self, inputs: Inputs, chunk_size: int) -> Call:
        def call() -> Any:
            return mamba_chunk_scan_combined(
                **inputs, chunk_size=chunk_size, return_final_states=True, backend=self.name
            )

        return call


class _Peer(Implementation):
    """A package's function, which computes what this package's does."""

    module: str
    needs_gpu = False

    def _why_not(self, workload: Workload, device: torch.device) -> str | None:
        package = self.module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
        if self.needs_gpu and device.type != "cuda":
            return "it runs on GPUs only"
        return self._why_not_workload(workload)

    def _why_not_workload(self, workload: Workload) -> str | None:
        return None


class MambaSsm(_Peer):
    """mamba_ssm's Triton kernels, autotuned by themselves. Packed sequences go in as seq_idx.

    Its tuner tries all of its configurations, each for a tenth of the 100 ms that are Triton's default. Chunks of 64
    are not tried: on an H200 they were the best on no shape of the table.
    """

    name = "mamba_ssm"
    module = "mamba_ssm.ops.triton.ssd_combined"
    needs_gpu = True
    chunk_sizes = (128, 256)

    def _why_not_workload(self, workload: Workload) -> str | None:
        if workload.dtype == "float32" and workload.precision == "highest":
            return "its float32 products are TF32"
        return None

    def bind(self, inputs: Inputs, chunk_size: int) -> Call:
        scan = importlib.import_module(self.module).mamba_chunk_scan_combined
        _tune_briefly(self.module.rpartition(".")[0])
        arguments = {name: value for name, value in inputs.items() if name != "cu_seqlens"}
        if inputs.get("cu_seqlens") is not None:
            lengths = inputs["cu_seqlens"].diff()
            numbers = torch.arange(len(lengths), device=lengths.device, dtype=torch.int32)
            arguments["seq_idx"] = numbers.repeat_interleave(lengths)[None]
        return lambda: scan(**arguments, chunk_size=chunk_size, return_final_states=True)


class TileGym(_Peer):
    """tilegym's cuTile kernels. It searches again for every shape, minutes each, so its lists are cut.

    On an H200 the whole search was seen to choose, in its state pass: not swapped with a state block of 16 or 32, or
    swapped with 64, second latency 4; in its output: state block of 64 or 128, persistent, occupancy 2, latencies 3
    or 4. These are left of its lists, and of its cumulative sum's the occupancies 4 and 8. From the third shape of
    equal headdim and dstate on (of equal nheads for the cumulative sum), only what was chosen before is tried. Chunks
    are of 64: those of 128 were slower on every shape of the table.
    """

    name = "tilegym"
    module = "tilegym.ops.cutile.mamba2"
    needs_gpu = True
    searches_every_shape = True
    chunk_sizes = (64,)

    def _why_not_workload(self, workload: Workload) -> str | None:
        if workload.headdim & (workload.headdim - 1):
            return f"it can't do headdim {workload.headdim}"
        if workload.lengths or workload.model:
            return "it has no packed sequences, dt_bias or softplus"
        if workload.precision != "highest":
            return "its float32 products are not TF32"
        return None

    def bind(self, inputs: Inputs, chunk_size: int) -> Call:
        module = importlib.import_module(self.module)
        _cut(module, "_chunk_cumsum", "_autotune_configs", lambda config: config.occupancy in (4, 8))
        _cut(module, "_fwd_pass_state", "_autotune_configs", _won_state_pass)
        _cut(module, "_compute_out", "_swap_configs", _won_output)
        for name in ("chunk_cumsum_kernel", "fwd_pass_state_kernel", "compute_out_swap_kernel"):
            _keep_variants(getattr(module, name))
        x, B = inputs["x"], inputs["B"]
        zeros = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3], dtype=torch.float32)

        def call() -> Any:
            return module.mamba2_chunk_forward(
                x, inputs["A"], B, inputs["C"], inputs["D"], inputs["dt"], zeros, chunk_size=chunk_size
            )

        return call


def _won_state_pass(config: Any) -> bool:
    return config.BDD_LAT == 4 and config.BLOCK_STATE in ((64,) if config.SWAP else (16, 32))


def _won_output(config: Any) -> bool:
    latencies = (getattr(config, "LATENCY", 3), config.H_LAT)
    return config.BLOCK_STATE >= 64 and config.persistent and config.occupancy == 2 and max(latencies) <= 4


def _cut(module: Any, stage: str, suffix: str, keep: Callable[[Any], bool]) -> None:
    """Replaces the function of a module that lists a stage's configurations by one that lists fewer, once.

    It lists those to keep, and for arguments that it had twice before, only those of them that won some search.
    """
    whole = getattr(module, stage + suffix)
    if hasattr(whole, "cut"):
        return
    asked: Counter[tuple[Any, ...]] = Counter()

    def cut(*args: Any, **kwargs: Any) -> list[Any]:
        kept = [config for config in whole(*args, **kwargs) if keep(config)]
        key = (*args, *sorted(kwargs.items()))
        asked[key] += 1
        won = [config for config, _ in getattr(module, f"{stage}_tune_cache").values()]
        return kept if asked[key] <= _WHOLE_SEARCHES else [config for config in kept if config in won] or kept

    cut.cut = True  # pyright: ignore[reportFunctionMemberAccess]
    setattr(module, stage + suffix, cut)


def _keep_variants(kernel: Any) -> None:
    """Lets searches share what was compiled: a cuTile kernel with equal hints is one object."""
    if "replace_hints" not in vars(kernel):
        kernel.replace_hints = cache(kernel.replace_hints)


def _tune_briefly(package: str) -> None:
    """Makes the tuners of the Triton kernels in a package's imported modules spend less time on each configuration."""
    import triton

    brief = partial(triton.testing.do_bench, **_AUTOTUNE_MILLISECONDS)
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for value in vars(module).values():
                if isinstance(value, triton.runtime.Autotuner):
                    value.do_bench = brief


class TorchCompile(_Peer):
    """torch.compile of torch-reference's stages, whose chunks are rows of a batch: only the recurrence is unrolled.

    The stages' own functions, since torch.compile sees a call of the public one as an operator, and compiles nothing
    of it. Chunks of 64 are not tried: the time to compile grows with the number of chunks in a row.
    """

    name = "torch.compile"
    module = "torch"
    slow = True
    compiles_every_shape = True
    chunk_sizes = (128, 256)

    def _why_not_workload(self, workload: Workload) -> str | None:
        if workload.lengths:
            return "it would unroll packed sequences"
        if workload.seqlen % min(max(self.chunk_sizes), workload.seqlen):
            return f"its chunks divide no row of {workload.seqlen} tokens"
        return None

    def bind(self, inputs: Inputs, chunk_size: int) -> Call:
        compiled = _compiled_reference()
        length = min(chunk_size, inputs["x"].shape[1])
        problem = cost_of(inputs)
        stages = [registry.select(op, problem, "torch-reference").function for op in _STAGES]
        return lambda: compiled(stages, **inputs, chunk_size=length)


_STAGES = ("chunk_cumsum", "fwd_pass_state", "compute_out")


def _reference_of_chunks(
    stages: Sequence[Callable[..., Any]],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """torch-reference, of whose stages these are the functions, for rows of whole chunks.

    Other arguments and results as of `mamba_chunk_scan_combined`.
    """
    chunk_cumsum, fwd_pass_state, compute_out = stages
    batch, seqlen = dt.shape[:2]
    dA_cumsum, dt_out = chunk_cumsum(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit)
    total = dA_cumsum[..., -1].exp()  # (batch, nheads, nchunks)
    x_chunks, B_chunks, C_chunks = (value.reshape(-1, chunk_size, *value.shape[2:]) for value in (x, B, C))
    dA_cumsum, dt_out = (value.transpose(1, 2).flatten(0, 1)[:, :, None] for value in (dA_cumsum, dt_out))
    own = fwd_pass_state(x_chunks, B_chunks, dt_out, dA_cumsum, None, None, None)[1].unflatten(0, (batch, -1))
    state = torch.zeros_like(own[:, 0])
    states: list[Tensor] = []
    for chunk in range(seqlen // chunk_size):
        states.append(state.to(x.dtype))
        state = state * total[:, :, chunk, None, None] + own[:, chunk]
    entry = torch.stack(states, 1).flatten(0, 1)[:, None]
    out = compute_out(x_chunks, B_chunks, C_chunks, dt_out, dA_cumsum, entry, D, None, None)
    return out.reshape(batch, seqlen, *out.shape[2:]), state


@cache
def _compiled_reference() -> Callable[..., Any]:
    # Beyond the limit, which is 8 shapes, torch.compile would run the function as it is.
    torch._dynamo.config.recompile_limit = _MOST_SHAPES  # pyright: ignore[reportPrivateUsage]
    return torch.compile(_reference_of_chunks, dynamic=False, fullgraph=True)


class Transformers(_Peer):
    """The plain torch path of transformers' Mamba-2 layers.

    It holds tensors of tokens by nheads by headdim by dstate and of tokens by chunk size by nheads by dstate. Where
    they are large a call takes many milliseconds, and no CUDA graph holds as much memory again.
    """

    name = "transformers"
    module = "transformers.models.mamba2.modeling_mamba2"
    slow = True
    compiles = False

    def _why_not_workload(self, workload: Workload) -> str | None:
        return "it has no packed sequences" if workload.lengths else None

    def capturable(self, workload: Workload) -> bool:
        elements = workload.batch * workload.seqlen * workload.nheads * workload.headdim * workload.dstate
        return 4 * elements <= _MOST_CAPTURED_BYTES

    def bind(self, inputs: Inputs, chunk_size: int) -> Call:
        # Unwrapped, because the wrapper calls mamba_ssm where that is installed.
        scan = inspect.unwrap(importlib.import_module(self.module).mamba2_chunk_scan)
        names = ("dt_bias", "dt_softplus", "dt_limit", "D")
        options = {name: inputs[name] for name in names if inputs.get(name) is not None}
        x, dt, A, B, C = (inputs[name] for name in ("x", "dt", "A", "B", "C"))

        def call() -> tuple[Tensor, Tensor]:
            out, final_states = scan(x, dt, A, B, C, chunk_size, **options, return_final_states=True)
            return out.to(x.dtype), final_states

        return call


PEERS = {peer.name: peer for peer in (MambaSsm, TileGym, TorchCompile, Transformers)}


def implementations(names: Sequence[str] | None, peers: bool, device: torch.device) -> list[Implementation]:
    """Those of the names (default: every backend that is available), and all peers if asked.

    Raises ValueError for a name that is neither a backend nor a peer.
    """
    chosen = [find_implementation(name) for name in names or []]
    if not names:
        chosen = [BackendForward(name, asked=False) for name in registry.available_backends(device)]
    named = {one.name for one in chosen}
    return chosen + [peer(asked=False) for name, peer in PEERS.items() if peers and name not in named]


def find_implementation(name: str) -> Implementation:
    """The backend or peer that was asked for by that name. Raises ValueError if there is none."""
    if name in PEERS:
        return PEERS[name](asked=True)
    backends = registry.explain_backends()
    if name not in backends:
        raise ValueError(f"there is no backend or peer {name!r}; there are {', '.join([*backends, *PEERS])}")
    return BackendForward(name, asked=True)


def version_of(package: str, distribution: str) -> str | None:
    """A package's version: of its distribution, or what its source says if only that is there; None without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(package)
    source = Path(spec.origin).read_text("utf-8") if spec is not None and spec.origin else ""
    match = re.search(r"""^__version__ = ["'](.+?)["']""", source, re.MULTILINE)
    return match[1] if match else None
