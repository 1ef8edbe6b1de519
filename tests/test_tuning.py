"""Which configuration is chosen, how a choice is kept, and the search for it."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import missing
from tests.test_cli import call
from tilegym_mamba2 import cli, registry, tuning
from tilegym_mamba2.bench import search
from tilegym_mamba2.bench.workloads import Workload
from tilegym_mamba2.cli import tune
from tilegym_mamba2.cli.run import Dtype
from tilegym_mamba2.models import MODELS
from tilegym_mamba2.ops.mamba_chunk_scan import mamba_chunk_scan
from tilegym_mamba2.testing import PROBLEMS, budget, make_inputs, oracle_scan, relative_error


class Options(NamedTuple):
    num_warps: int
    num_stages: int | None = None


class Config(NamedTuple):
    block: int
    options: Options


CANDIDATES = (Config(64, Options(4)), Config(32, Options(4)), Config(32, Options(8, 3)))
KEY: dict[str, int | str] = {"headdim": 64, "dstate": 128, "products": "bfloat16", "compensated": False}
PLACE = tuning.Place("fake", "sm_90", "NVIDIA H200", lambda: "compiler 1.2.3")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory of the test's own, and a package without tables; nothing is remembered before or after."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(folder))
    monkeypatch.setattr(tuning, "_TABLES", tmp_path / "tables")
    tuning._of_package.cache_clear()
    tuning._forget()
    yield folder
    tuning._of_package.cache_clear()
    tuning._forget()


def chosen(place: tuning.Place = PLACE, key: dict[str, int | str] = KEY, op: str = "op", candidates: Any = CANDIDATES):
    return tuning.choose(op, place, key, candidates)


def asked(place: tuning.Place = PLACE, key: dict[str, int | str] = KEY, candidates: Any = CANDIDATES) -> tuning.Asked:
    return tuning.Asked("op", place, key, candidates, 0, "rule", None)


def kept(cache: Path) -> Path:
    (path,) = cache.rglob("*.json")
    return path


# What is chosen


def test_by_rule_where_nothing_was_measured(cache: Path):
    assert chosen() == CANDIDATES[0]
    assert not cache.exists()


def test_a_compiler_is_asked_for_its_version_only_if_something_was_tuned_for_the_gpu():
    def asking() -> str:
        raise AssertionError("a process was started")

    assert chosen(PLACE._replace(compiler=asking)) == CANDIDATES[0]
    tuning.store(asked(), 1, {})
    for other in ({"gpu": ""}, {"gpu": "NVIDIA H100"}):
        assert chosen(PLACE._replace(compiler=asking, **other)) == CANDIDATES[0]
    with pytest.raises(AssertionError, match="process"):
        chosen(PLACE._replace(compiler=asking))


def test_what_was_stored_is_used_from_the_next_call_on():
    plans = list[Config]()

    @tuning.planned
    def plan(shape: int) -> Config:
        plans.append(chosen())
        return plans[-1]

    assert plan(1) is plan(1)
    tuning.store(asked(), 2, {"a": [2.0, 1.0]})
    assert plan(1) == CANDIDATES[2]
    tuning._forget()  # as in another process
    assert plan(1) == plan(2) == CANDIDATES[2]
    assert plans == [CANDIDATES[0], CANDIDATES[2], CANDIDATES[2], CANDIDATES[2]]


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "other"},
        {"architecture": "sm_100"},
        {"gpu": "NVIDIA H100"},
        {"gpu": ""},
        pytest.param({"compiler": lambda: "compiler 1.2.4"}, id="compiler"),
    ],
    ids=str,
)
def test_a_choice_holds_for_its_gpu_and_compiler_alone(change: dict[str, Any]):
    tuning.store(asked(), 1, {})
    other = PLACE._replace(**change)
    if change == {"architecture": "sm_100"}:  # the same name and another architecture: something is wrong
        with pytest.warns(UserWarning, match="made for something else"):
            assert chosen(other) == CANDIDATES[0]
    else:
        assert chosen(other) == CANDIDATES[0]
    assert chosen() == CANDIDATES[1]


def test_a_choice_holds_for_its_version_of_the_package_alone(monkeypatch: pytest.MonkeyPatch):
    tuning.store(asked(), 1, {})
    monkeypatch.setattr(tuning, "__version__", "99")
    tuning._forget()
    assert chosen() == CANDIDATES[0]
    assert not tuning.holds(tuning.stored()[0][0], PLACE)


def test_a_choice_holds_for_its_key_and_op_alone():
    tuning.store(asked(), 1, {})
    assert chosen(key={**KEY, "dstate": 64}) == chosen(key={**KEY, "compensated": True}) == CANDIDATES[0]
    assert chosen(op="op2") == CANDIDATES[0]


def test_here_goes_before_the_package_and_the_package_before_the_rule(tmp_path: Path):
    tables = tmp_path / "tables"
    tables.mkdir()
    of_package = tuning.Choice(
        "op", "fake", "sm_90", "NVIDIA H200", "compiler 1", "0.0", KEY, tuning.as_json(CANDIDATES[2]), {}, "2026-01-01"
    )
    tuning.write_table(tables / "sm_90.json", [of_package])
    assert chosen() == chosen(PLACE._replace(gpu="")) == chosen(PLACE._replace(gpu="NVIDIA H100")) == CANDIDATES[2]
    assert chosen(PLACE._replace(architecture="sm_80")) == chosen(PLACE._replace(architecture="")) == CANDIDATES[0]
    tuning.store(asked(), 1, {})
    assert chosen() == CANDIDATES[1]
    tuning.store(asked(), 0, {})
    assert chosen() == CANDIDATES[0]
    with tuning.observing() as observed:
        chosen()
        chosen(PLACE._replace(gpu=""))
    assert [(one.source, one.position) for one in observed] == [("here", 0), ("package", 2)]
    assert observed[1].choice == of_package


def test_a_table_is_added_to(tmp_path: Path):
    path = tmp_path / "table.json"
    first = tuning.store(asked(), 1, {"a": [2.0, 1.0]})
    second = replace(first, key={**KEY, "dstate": 64})
    tuning.write_table(path, [first, second])
    tuning.write_table(path, [replace(first, date="2030-01-01")])
    found = [tuning.Choice(**entry) for entry in json.loads(path.read_text())]
    assert sorted(found, key=lambda one: one.date) == [second, replace(first, date="2030-01-01")]


def test_trying_ends_with_the_block():
    assert chosen() == CANDIDATES[0]
    with tuning.using("op", "fake", KEY, 1):
        assert chosen() == CANDIDATES[1]
        with tuning.using("op", "fake", KEY, 99):
            assert chosen() == CANDIDATES[2]
        assert chosen() == CANDIDATES[1]
        assert chosen(PLACE._replace(backend="other")) == chosen(op="op2") == CANDIDATES[0]
        assert chosen(key={**KEY, "dstate": 64}) == CANDIDATES[0]
    assert chosen() == CANDIDATES[0]
    with pytest.raises(ZeroDivisionError), tuning.using("op", "fake", KEY, 1):
        raise ZeroDivisionError
    assert chosen() == CANDIDATES[0]


# The files


DAMAGES = {
    "empty": b"",
    "half": b'{"op": "op", "backend": ',
    "a list": b"[]",
    "a number": b"1",
    "other fields": b'{"op": "op"}',
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "of another type": json.dumps(
        {**asdict(tuning.Choice("op", "fake", "", "", "", "", {}, {}, {}, "")), "key": 3}
    ).encode(),
}


@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_ignored_with_one_warning_that_names_it(content: bytes, cache: Path):
    tuning.store(asked(), 1, {})
    kept(cache).write_bytes(content)
    tuning._forget()
    with pytest.warns(UserWarning, match="is ignored") as caught:
        assert chosen() == chosen() == CANDIDATES[0]
    assert len(caught) == 1
    assert str(kept(cache)) in str(caught[0].message)
    choices, damaged = tuning.stored()
    assert not choices
    assert list(damaged) == [kept(cache)]
    tuning.store(asked(), 1, {})
    assert chosen() == CANDIDATES[1]


@pytest.mark.parametrize(
    "configuration",
    [{}, {"block": 7, "options": {"num_warps": 4, "num_stages": None}}, {"block": 32, "options": {"num_warps": 4}}],
    ids=str,
)
def test_a_configuration_that_the_op_does_not_list_is_ignored_with_a_warning(configuration: Any, cache: Path):
    tuning.store(asked(), 1, {})
    content = {**json.loads(kept(cache).read_text()), "configuration": configuration}
    kept(cache).write_text(json.dumps(content))
    tuning._forget()
    with pytest.warns(UserWarning, match="none of those") as caught:
        assert chosen() == chosen() == CANDIDATES[0]
    assert len(caught) == 1
    assert str(kept(cache)) in str(caught[0].message)


def test_a_directory_that_can_not_be_read_is_none(cache: Path):
    cache.write_text("a file where the directory should be")
    assert chosen() == CANDIDATES[0]
    assert tuning.stored() == ([], {})
    with pytest.raises(OSError, match=str(cache)):
        tuning.store(asked(), 1, {})


def test_nothing_is_left_of_a_write_that_failed(cache: Path, monkeypatch: pytest.MonkeyPatch):
    tuning.store(asked(), 1, {})

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(tuning.os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        tuning.store(asked(), 2, {})
    monkeypatch.undo()
    assert [path.name for path in kept(cache).parent.iterdir()] == [kept(cache).name]
    assert json.loads(kept(cache).read_text())["configuration"] == tuning.as_json(CANDIDATES[1])


WRITER = """
import sys, types
package = types.ModuleType("tilegym_mamba2")  # without torch, which takes seconds to import
package.__path__ = [{package!r}]
sys.modules["tilegym_mamba2"] = package
from typing import NamedTuple
from tilegym_mamba2 import tuning

class Config(NamedTuple):
    block: int

place = tuning.Place("fake", "sm_90", "NVIDIA H200", lambda: "compiler 1")
for number in range(30):
    for key in ({{"writer": {writer}, "number": number}}, {{"shared": "by all"}}):
        asked = tuning.Asked("op", place, key, (Config({writer}), Config(100)), 0, "rule", None)
        tuning.store(asked, 0, {{"a": [1.0] * 1000}})
assert "torch" not in sys.modules
"""


def test_processes_that_write_at_once_lose_nothing(cache: Path):
    package = str(Path(tuning.__file__).parent)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER.format(package=package, writer=writer)]) for writer in range(4)
    ]
    while any(writer.poll() is None for writer in writers):
        assert tuning.stored()[1] == {}
    assert [writer.wait() for writer in writers] == [0] * 4
    choices, damaged = tuning.stored()
    assert not damaged
    assert len(choices) == 4 * 30 + 1
    shared = [one for one in choices if "shared" in one.key]
    assert [one.configuration["block"] in range(4) for one in shared] == [True]
    assert not list(cache.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {tuning.CACHE_VARIABLE: "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/tilegym-mamba2"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/tilegym-mamba2"),
        ("linux", {}, "/home/me/.cache/tilegym-mamba2"),
        ("darwin", {}, "/home/me/Library/Caches/tilegym-mamba2"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/tilegym-mamba2"),
    ],
)
def test_the_cache_directory(platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch):
    for name in (tuning.CACHE_VARIABLE, "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(tuning.sys, "platform", platform)
    assert tuning.cache_directory() == Path(expected)


def test_without_a_home_nothing_is_kept_and_calls_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(tuning.CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(tuning.Path, "home", homeless)
    assert chosen() == CANDIDATES[0]
    with pytest.raises(OSError, match=tuning.CACHE_VARIABLE):
        tuning.store(asked(), 1, {})


def test_it_imports_the_standard_library_alone():
    tree = ast.parse(Path(tuning.__file__).read_text())
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    outside = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
    assert outside == {"tilegym_mamba2._version"}


# The forward


def _asked_by(backend: str, inputs: dict[str, Any]) -> list[tuning.Asked]:
    with torch.inference_mode(), tune._supposed(backend, "sm_90"), tuning.observing() as observed:
        mamba_chunk_scan(**inputs, backend=backend)
    return observed


@pytest.mark.parametrize("backend", tune.BACKENDS)
@settings(max_examples=20, deadline=None)
@given(batch=st.integers(1, 9), seqlen=st.integers(1, 300), nheads=st.sampled_from([4, 8]), ngroups=st.integers(1, 2))
def test_keys_and_candidates_do_not_depend_on_batch_or_seqlen(
    backend: str, batch: int, seqlen: int, nheads: int, ngroups: int
):
    def question(**sizes: int) -> list[Any]:
        inputs = make_inputs(torch.bfloat16, headdim=16, dstate=32, **sizes)
        return [(one.op, one.key, one.candidates) for one in _asked_by(backend, inputs)]

    first = question(batch=2, seqlen=70, nheads=4, ngroups=2)
    assert first
    assert first == question(batch=batch, seqlen=seqlen, nheads=nheads, ngroups=ngroups)


@pytest.mark.parametrize("backend", tune.BACKENDS)
def test_keys_tell_apart_what_a_configuration_depends_on(backend: str, monkeypatch: pytest.MonkeyPatch):
    def key(dtype: torch.dtype, **options: Any) -> str:
        (one,) = _asked_by(backend, make_inputs(dtype, **options))
        return str(one.key)

    keys = [key(torch.bfloat16), key(torch.bfloat16, headdim=32), key(torch.bfloat16, dstate=32)]
    keys += [key(torch.bfloat16, D=None), key(torch.float32)]
    assert len(set(keys)) == 5
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert key(torch.float32) not in keys
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("backend", tune.BACKENDS)
def test_every_candidate_computes_the_same(backend: str, device: str, request: pytest.FixtureRequest):
    missing(request.config, backend, "mamba_chunk_scan")
    size = 64 if device == "cuda" else 16  # what is interpreted is slow
    inputs = make_inputs(torch.bfloat16, device, batch=1, seqlen=130, nheads=2, ngroups=1, headdim=size, dstate=size)
    want = oracle_scan(**inputs)
    with tuning.observing() as observed:
        mamba_chunk_scan(**inputs, backend=backend)
    (one,) = observed
    assert len(set(one.candidates)) == len(one.candidates) > 1
    for position in range(len(one.candidates)):
        with tuning.using(one.op, backend, one.key, position), tuning.observing() as observed:
            out, final_states, _ = mamba_chunk_scan(**inputs, backend=backend)
        assert [(tried.position, tried.source) for tried in observed] == [(position, "tried")]
        assert relative_error(out, want[0]) < budget(torch.bfloat16), one.candidates[position]
        assert relative_error(final_states, want[1]) < budget(torch.bfloat16), one.candidates[position]


def test_what_the_package_brings_was_measured_and_is_a_candidate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()  # the package's own tables
    monkeypatch.setenv(tuning.CACHE_VARIABLE, "/nowhere")
    tables = Path(tuning.__file__).parent / "tuned"
    choices = {(path.stem, one) for path in tables.glob("*.json") for one in map(str, tuning.table(path.stem))}
    assert choices
    used = set[tuple[str, str]]()
    for backend in tune.BACKENDS:
        for dtype in Dtype:
            for architecture in {path.stem for path in tables.glob("*.json")}:
                for one in tune._asked_on(backend, architecture, dtype):
                    if one.choice is not None:
                        assert one.choice.architecture == architecture
                        assert one.choice.gpu
                        assert one.choice.measured
                        used.add((architecture, str(one.choice)))
    assert used == choices, "a choice that no call takes: make the table anew, with `tilegym-mamba2 tune --table FILE`"


def test_the_default_models_have_every_size_of_a_released_model():
    sizes = [(MODELS[name].headdim, MODELS[name].dstate) for name in tune.KEY_MODELS]
    assert len(set(sizes)) == len(sizes)
    assert set(sizes) == {(model.headdim, model.dstate) for model in MODELS.values()}


# The search


SMALL = [Workload("rows", 2, 64, 2, 16, 1, 16, dtype="float32"), Workload("row", 1, 100, 2, 16, 1, 16, dtype="float32")]
SECONDS = {0: 4.0, 1: 1.0, 2: 2.0, 3: 0.5, 4: 0.5, 5: 20.0}
FORWARDS = tuple(Config(number, Options(1)) for number in SECONDS)


@pytest.fixture
def timed(fresh_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend whose configurations are said to take different times; the fourth is wrong, and the fifth fails."""
    last = FORWARDS[0]

    def forward(*arguments: Any) -> Any:
        nonlocal last
        last = tuning.choose("mamba_chunk_scan", PLACE._replace(backend="timed"), {"n": 1}, FORWARDS)
        if last.block == 4:
            raise RuntimeError("too many registers")
        out, final_states, varlen_states = mamba_chunk_scan(*arguments, backend="torch-reference")
        return out * (1.1 if last.block == 3 else 1), final_states, varlen_states

    class Stopwatch:
        def __init__(self, calls: Any, *_: Any):
            self.results = [call() for call in calls]
            self._seconds = SECONDS[last.block]

        def replays_for(self, seconds: float) -> list[float]:
            return [self._seconds * (1 + part / 1000) for part in range(5)]

    registry.register_backend(registry.Backend(name="timed", why_unavailable=lambda device: None))
    registry.register("mamba_chunk_scan", "timed")(forward)
    monkeypatch.setattr(search, "Stopwatch", Stopwatch)


def _all_fine(asked: tuning.Asked, positions: Any, *_: Any) -> dict[int, str | None]:
    return dict.fromkeys(positions)


def _search(**options: Any) -> search.Found:
    (one,) = search.questions("timed", SMALL[0], torch.device("cpu"))
    return search.search(one, SMALL, torch.device("cpu"), **{"seconds": 60.0, "run_apart": _all_fine, **options})


@pytest.mark.usefixtures("timed")
def test_the_search_finds_the_fastest_that_is_right():
    found = _search()
    assert found.position == 1
    assert found.gain == pytest.approx(4.0)
    assert set(found.seconds) == {0, 1, 2}
    assert set(found.failures) == {3, 4, 5}
    assert "more than" in found.failures[3]
    assert "too many registers" in found.failures[4]
    assert found.failures[5] == "5.00 times the time of the choice by rule"
    assert found.measured() == {one.shape: pytest.approx([4.0, 1.0], rel=0.01) for one in SMALL}
    tuning.store(found.asked, found.position, found.measured())
    (after,) = search.questions("timed", SMALL[0], torch.device("cpu"))
    assert (after.position, after.source) == (1, "here")


@pytest.mark.usefixtures("timed")
def test_the_search_leaves_out_what_fails_apart():
    def apart(asked: tuning.Asked, positions: Any, workloads: Any, device: Any, seconds: float, alike: bool = False):
        return {position: "wrong" if alike and position == 1 else None for position in positions}

    found = _search(run_apart=apart)
    assert found.position == 2
    assert found.failures[1] == "wrong"
    with pytest.raises(RuntimeError, match="by rule failed: lost"):
        _search(run_apart=lambda asked, positions, *_: dict.fromkeys(positions, "lost"))


@pytest.mark.usefixtures("timed")
def test_without_time_the_rule_stays():
    found = _search(seconds=0.0)
    assert (found.position, set(found.seconds)) == (0, {0})
    assert found.failures[1] == "there was no time for it"


@pytest.mark.usefixtures("timed")
def test_no_search_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch):
    (one,) = search.questions("timed", SMALL[0], torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def apart(*_: Any) -> Any:
        raise AssertionError("nothing may be run")

    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        search.search(one, SMALL, torch.device("cpu"), 60.0, run_apart=apart)


@pytest.mark.parametrize(
    ("seconds", "noise", "expected"),
    [
        ({0: [1.0, 1.0], 1: [0.8, 0.9], 2: [0.7, 0.9]}, [0.01, 0.01], [2, 1]),
        ({0: [1.0, 1.0], 1: [0.98, 0.98]}, [0.03, 0.01], []),  # within noise
        ({0: [1.0, 1.0], 1: [0.5, 1.05]}, [0.01, 0.01], []),  # slower somewhere
        ({0: [1.0, 1.0], 1: [0.5, 1.005]}, [0.01, 0.01], [1]),
        ({0: [1.0]}, [0.0], []),
    ],
)
def test_better_is_by_more_than_noise_and_slower_nowhere(
    seconds: dict[int, list[float]], noise: list[float], expected: list[int]
):
    assert search.better(seconds, noise) == expected


def test_a_candidate_that_ends_its_process_is_blamed_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        "for position in json.loads(sys.argv[3])['positions']:\n"
        "    if position == 1: sys.exit('illegal access')\n"
        "    print('ptxas says something')\n"
        "    print(json.dumps(['position', position, 'wrong' if position == 2 else None]), flush=True)\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(search, "sys", SimpleNamespace(executable=str(script)))
    results = search.in_processes(asked(), [0, 1, 2, 3], SMALL, torch.device("cpu"), 20.0)
    assert results == {0: None, 1: "its process ended: illegal access", 2: "wrong", 3: None}
    script.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    late = search.in_processes(asked(), [0, 1], SMALL, torch.device("cpu"), 0.3)
    assert late == dict.fromkeys([0, 1], "it was not compiled in time")


@pytest.mark.parametrize("alike", [False, True])
def test_the_process_calls_the_candidate(alike: bool, capsys: pytest.CaptureFixture[str], request: Any):
    missing(request.config, "cutile", "mamba_chunk_scan")
    workload = Workload("small", 1, 40, 2, 8, 1, 16, dtype="bfloat16")
    problem = {"ragged_tail": PROBLEMS["ragged_tail"]} if alike else {}
    with pytest.MonkeyPatch.context() if alike else nullcontext() as patch:
        if patch is not None:
            patch.setattr(search, "_ALIKE", tuple(problem))
        (one,) = search.questions("cutile", workload, torch.device("cpu"))
        orders = {"backend": "cutile", "op": one.op, "key": one.key, "positions": [1], "alike": alike}
        search.main([json.dumps({**orders, "workloads": [asdict(workload)]})])
        search.main([json.dumps({**orders, "workloads": [asdict(replace(workload, dstate=32))]})])
    right, strange = capsys.readouterr().out.splitlines()
    assert json.loads(right) == ["position", 1, None]
    assert "no call had the key" in json.loads(strange)[2]


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to tune without a GPU"),
        (["--shape", "1,2,3"], "give 6 sizes"),
        (["--shape", "1,64,3,64,2,128"], "no multiple of ngroups"),
        (["--model", "mamba2-130"], "mamba2-130m"),
        (["--list", "--backends", "torch-reference"], "has no configurations"),
    ],
    ids=str,
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would tune")
def test_wrong_uses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["tune", *arguments]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert message in output.err
    assert output.err.count("\n") == 1


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The command believes that there is a GPU; searches, which it lists, find the second candidate in no time."""
    searched: list[tuple[str, int]] = []

    def questions(backend: str, workload: Workload, device: torch.device) -> list[tuning.Asked]:
        place, key = PLACE._replace(backend=backend), {**KEY, "dstate": workload.dstate}
        with tuning.observing() as observed:
            chosen(place, key)
        return observed

    def found(asked: tuning.Asked, workloads: Any, device: Any, seconds: float, progress: Any) -> search.Found:
        assert 0 < seconds <= 60
        progress("timing")
        searched.append((asked.place.backend, int(asked.key["dstate"])))
        if asked.key["dstate"] == 256:
            raise RuntimeError("too many registers")
        if asked.key["dstate"] == 16:
            raise KeyboardInterrupt
        return search.Found(asked, workloads, 1, {at: [2.0 - at] * len(workloads) for at in (0, 1)}, {}, [0.01])

    monkeypatch.setattr(search, "questions", questions)
    monkeypatch.setattr(search, "search", found)
    monkeypatch.setattr(tune, "_runnable", lambda names, device: names)
    monkeypatch.setattr(tune, "is_usable", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return searched


def test_tune_keeps_what_it_finds_and_does_not_search_again(
    on_a_gpu: list[tuple[str, int]], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    table = tmp_path / "sm_90.json"
    arguments = ["tune", "--backends", "one,two", "--model", "mamba2-130m", "--model", "mamba2-370m"]
    assert cli.main([*arguments, "--table", str(table)]) == 0
    assert on_a_gpu == [("one", 128), ("two", 128)]  # the models share a key
    output = capsys.readouterr().out
    assert output.count("2.00x by rule") == 2
    assert output.count("block 32") == 2
    assert output.count("as above") == 2
    assert [entry["backend"] for entry in json.loads(table.read_text())] == ["one", "two"]
    for backend in ("one", "two"):
        assert chosen(PLACE._replace(backend=backend)) == CANDIDATES[1]
    assert cli.main(arguments) == 0
    assert len(on_a_gpu) == 2
    assert capsys.readouterr().out.count("kept already") == 2
    assert cli.main([*arguments, "--again"]) == 0
    assert len(on_a_gpu) == 4


def test_a_failed_search_is_told_and_the_others_go_on(
    on_a_gpu: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
):
    shapes = ["--shape", "1,64,2,64,1,256", "--shape", "1,64,2,64,1,128"]
    assert cli.main(["tune", "--backends", "one", *shapes]) == 1
    assert on_a_gpu == [("one", 256), ("one", 128)]
    assert "too many registers" in capsys.readouterr().out
    assert len(tuning.stored()[0]) == 1


def test_an_interrupt_keeps_what_was_found(on_a_gpu: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]):
    shapes = ["--shape", "1,64,2,64,1,128", "--shape", "1,64,2,64,1,16", "--shape", "1,64,2,64,1,64"]
    assert cli.main(["tune", "--backends", "one", *shapes]) == 130
    assert on_a_gpu == [("one", 128), ("one", 16)]
    assert "2.00x by rule" in capsys.readouterr().out
    assert [one.key["dstate"] for one in tuning.stored()[0]] == [128]


@pytest.mark.usefixtures("on_a_gpu")
def test_a_directory_that_can_not_be_written_is_told(cache: Path, capsys: pytest.CaptureFixture[str]):
    cache.write_text("a file where the directory should be")
    assert cli.main(["tune", "--backends", "one", "--model", "mamba2-130m"]) == 2
    assert tuning.CACHE_VARIABLE in capsys.readouterr().err


def test_list_shows_what_is_chosen_and_whether_it_was_measured(cache: Path):
    done = call("tune", "--list", TILEGYM_MAMBA2_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.split()[:1] in (["cutile"], ["triton"])]
    assert {line[0] for line in lines} == {"cutile", "triton"}
    for line in lines:
        assert "measured" in line
    assert any("sm_90" in line or "sm_90," in line for line in lines)


def test_info_says_where_choices_are_kept(cache: Path):
    tuning.store(asked(), 1, {})
    broken = kept(cache).with_name("broken.json")
    broken.write_text("{")
    done = call("info", TILEGYM_MAMBA2_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    assert f"Tuned choices: {cache} (0 in use, 1 for others)." in done.stdout
    assert f"{broken} is ignored" in done.stdout
