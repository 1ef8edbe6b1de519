"""Times of transformers' Mamba-2 models of random weights in bfloat16, on each implementation of the scan.

    python bench/transformers_models.py FILE.json [--model mamba2-130m]... [--seconds 120]
    python bench/transformers_models.py FILE.json --show      # the tables of an existing file, in Markdown

Implementations: "transformers" is its own torch path, "mamba_ssm" the kernels that it takes where mamba_ssm is
installed, and each backend of this package through `integrations.transformers.enable`. Each first has to give logits
no further from the float32 model's than 1.25 times those of the torch path.

A prefill goes through the model once with an empty cache and makes the last token's logits. A decode step goes through
it with one token a row. Times are of the device, between CUDA events: of eager calls, where Python is what limits a
small model, and of replays of a CUDA graph, where it could be captured. All implementations of a case are timed there
and back. A case that would begin after so many SECONDS is left out.
"""

import argparse
import datetime
import gc
import importlib
import inspect
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tilegym_mamba2 import registry
from tilegym_mamba2.bench.measure import one_line
from tilegym_mamba2.bench.peers import find_implementation, version_of
from tilegym_mamba2.bench.report import whole_models
from tilegym_mamba2.bench.timing import synchronize
from tilegym_mamba2.cli.info import devices, versions
from tilegym_mamba2.integrations import transformers as integration
from tilegym_mamba2.integrations._substitution import Substitution
from tilegym_mamba2.testing import relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GEOMETRY = {  # hidden_size, layers, heads of the released models
    "mamba2-130m": (768, 24, 24),
    "mamba2-2.7b": (2560, 64, 80),
    "tiny": (64, 2, 2),  # to try this script
}
PREFILLS = ((1, 8192), (8, 2048))
DECODES = (1, 64)
PROMPT, CHECKED_TOKENS = 32, 1024
IMPLEMENTATIONS = ("cutile", "triton", "mamba_ssm", "transformers")  # and torch-reference, if asked
WORSE = 1.25  # how much further from the float32 logits than the torch path's an implementation's may be
CALL_SECONDS, SLOW_SECONDS = 0.15, 1.5  # for which each pass times calls; and of a call that one pass is enough for
GRAPH_BYTES = 20 * 2**30  # of an eager call; one that holds more is not captured


@dataclass
class Record:
    """Seconds of a call; None for what was not measured, and `failed` says why there is nothing.

    Attributes:
        what: "prefill" or "decode".
        seqlen: tokens a row that the call goes through.
        error: of the logits, relative to the float32 model's.
    """

    model: str
    implementation: str
    what: str
    batch: int
    seqlen: int
    eager: float | None = None
    graph: float | None = None
    peak_memory: int | None = None
    error: float | None = None
    failed: str | None = None


class WrongLogitsError(AssertionError):
    """The logits are further from the float32 model's than they may be."""


def make_model(name: str) -> Any:
    hidden_size, layers, heads = GEOMETRY[name]
    layout = transformers.Mamba2Config(
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_heads=heads,
        head_dim=64,
        state_size=128,
        n_groups=1,
        chunk_size=256,
        vocab_size=50288,
        initializer_range=0.02,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with DEVICE:
        return transformers.Mamba2ForCausalLM(layout).eval().to(torch.bfloat16)


def on(implementation: str) -> AbstractContextManager[Any]:
    """Context manager: transformers' layers run on it. Raises if it can't run here."""
    if implementation == "mamba_ssm":
        if DEVICE.type != "cuda":
            raise RuntimeError("it runs on GPUs only")
        importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
        find_implementation(implementation).bind({}, 256)  # its tuners spend less time on each configuration
        return nullcontext()
    if implementation == "transformers":
        return torch_path()
    reason = registry.explain_backends(DEVICE)[implementation]
    if reason != "available":
        raise RuntimeError(reason)
    return integration.enable(implementation)


@contextmanager
def torch_path() -> Iterator[None]:
    """Without mamba_ssm's kernels, whether it is installed or not."""
    module = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    wrapped = [getattr(module, name) for name in ("mamba2_chunk_scan", "mamba2_selective_state_update")]

    def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        plain = inspect.unwrap(function)
        known = set(inspect.signature(plain).parameters)
        return lambda *args, **kwargs: plain(*args, **{name: value for name, value in kwargs.items() if name in known})

    with Substitution({function: unwrapped(function) for function in wrapped}, []):
        yield


def random_tokens(batch: int, seqlen: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(3, 50000, (batch, seqlen), generator=generator, device=DEVICE)


def new_cache(model: Any) -> dict[str, Any]:
    names = inspect.signature(model.forward).parameters
    name = next(name for name in ("cache", "cache_params", "past_key_values") if name in names)
    return {name: transformers.DynamicCache(config=model.config)}


def prefill(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Any]]:
    cache = new_cache(model)
    hidden = model.backbone(input_ids=ids, use_cache=True, **cache).last_hidden_state
    return model.lm_head(hidden[:, -1:].to(model.lm_head.weight.dtype)), cache


def checked_logits(model: Any, ids: Tensor) -> Tensor:
    """Of all tokens but the last through the scan, and of the last through the one-token update."""
    cache = new_cache(model)
    parts = ids.split([ids.shape[1] - 1, 1], 1)
    return torch.cat([model(input_ids=part, use_cache=True, **cache).logits for part in parts], 1)


def errors_of(model: Any, names: list[str]) -> dict[str, float | Exception]:
    """How far each implementation's logits are from those of the same weights in float32, or why it can't run."""
    ids = random_tokens(1, CHECKED_TOKENS)
    with torch_path():
        right = checked_logits(model.float(), ids).cpu()
    model.to(torch.bfloat16)
    found: dict[str, float | Exception] = {}
    with torch_path():
        allowed = WORSE * relative_error(checked_logits(model, ids).cpu(), right)
    for name in names:
        try:
            with on(name):
                error = relative_error(checked_logits(model, ids).cpu(), right)
            found[name] = error
            if not error <= allowed:
                found[name] = WrongLogitsError(f"the error of the logits is {error:.1e}, and {allowed:.1e} is allowed")
        except Exception as error:  # whatever its compiler raises: the others are still timed
            found[name] = error
        free()
    return found


def free() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def seconds_of(call: Callable[[], Any]) -> float:
    """Device time of one call."""
    if DEVICE.type != "cuda":
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def timed(call: Callable[[], Any]) -> list[float]:
    """Seconds of warm calls, for a while."""
    call()  # it may compile
    times = [seconds_of(call)]
    number = min(50, math.ceil(CALL_SECONDS / max(times[0], 1e-6)))
    return [*times, *(seconds_of(call) for _ in range(number - 1))]


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class Case:
    """A prefill or a decode step of one model, on each implementation in turn."""

    def __init__(self, model: Any, name: str, what: str, batch: int, seqlen: int):
        self.model = model
        self.name = name
        self.what = what
        self.batch = batch
        self.seqlen = seqlen

    def call(self) -> Callable[[], Any]:
        """To be made and run on the same implementation."""
        if self.what == "prefill":
            ids = random_tokens(self.batch, self.seqlen)
            return lambda: prefill(self.model, ids)
        _, cache = prefill(self.model, random_tokens(self.batch, PROMPT))
        token = random_tokens(self.batch, 1, seed=1)
        return lambda: self.model(input_ids=token, use_cache=True, **cache).logits

    def measure(self, errors: dict[str, float | Exception]) -> list[Record]:
        records = {name: Record(self.name, name, self.what, self.batch, self.seqlen) for name in errors}
        eager: dict[str, list[float]] = {}
        graphs: dict[str, list[float]] = {}
        for name, error in errors.items():
            if isinstance(error, Exception):
                records[name].failed = one_line(error)
            else:
                records[name].error = error
        for names in (list(errors), list(errors)[::-1]):
            for name in names:
                record = records[name]
                if record.failed is not None or (record.eager or 0) > SLOW_SECONDS:
                    continue
                try:
                    self._measure(record, eager.setdefault(name, []), graphs.setdefault(name, []))
                except Exception as error:  # out of memory, say: the others are still timed
                    record.failed = one_line(error)
                free()
        return list(records.values())

    def _measure(self, record: Record, eager: list[float], graphs: list[float]) -> None:
        with on(record.implementation):
            call = self.call()
            if DEVICE.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            eager += timed(call)
            record.eager = statistics.median(eager)
            if DEVICE.type != "cuda":
                return
            record.peak_memory = torch.cuda.max_memory_allocated() - before
            if record.peak_memory <= GRAPH_BYTES:
                graphs += timed(captured(call))
                record.graph = statistics.median(graphs)


def about() -> dict[str, Any]:
    packages = {"transformers": "transformers", "mamba_ssm": "mamba-ssm"}
    gpus = devices()
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": gpus[0]["name"] if gpus else "CPU",
        "versions": versions() | {name: version_of(name, package) for name, package in packages.items()},
    }


def measure(file: Path, names: list[str], compared: list[str], seconds: float) -> None:
    begun = time.monotonic()
    found: dict[str, Any] = {"about": about(), "records": []}

    def save() -> None:
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    save()
    for name in names:
        free()
        model = make_model(name)
        synchronize(DEVICE)
        errors = errors_of(model, compared)
        print(f"{name}: checked after {time.monotonic() - begun:.0f} s", flush=True)
        cases = [Case(model, name, "decode", batch, 1) for batch in DECODES]
        cases += [Case(model, name, "prefill", *sizes) for sizes in PREFILLS]
        for case in cases:
            if time.monotonic() - begun > seconds:
                break
            found["records"] += [asdict(record) for record in case.measure(errors)]
            save()
            print(f"{name}: {case.what} {case.batch}x{case.seqlen} after {time.monotonic() - begun:.0f} s", flush=True)
        del model, cases


def show(found: dict[str, Any]) -> None:
    """A row for each case, then errors, then why the rest was not measured."""
    print(whole_models(found["records"]).markdown() + "\n")
    records = [Record(**record) for record in found["records"]]
    for record in {(record.model, record.implementation): record for record in records}.values():
        if record.error is not None:
            print(f"{record.model} on {record.implementation}: error of the logits {record.error:.2e}")
    for record in records:
        if record.failed is not None:
            print(
                f"{record.model}, {record.what} {record.batch} x {record.seqlen:,}, {record.implementation}: "
                f"{record.failed}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", action="append", choices=list(GEOMETRY))
    parser.add_argument("--implementation", action="append", choices=[*IMPLEMENTATIONS, "torch-reference"])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    if not options.show:
        with torch.no_grad():
            models = options.model or ["mamba2-130m", "mamba2-2.7b"]
            measure(options.file, models, options.implementation or list(IMPLEMENTATIONS), options.seconds)
    show(json.loads(options.file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
