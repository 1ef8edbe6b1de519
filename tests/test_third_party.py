"""A backend from outside: a package with its own metadata, found by its entry point, checked by check_backend."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

PLUGIN = """
    from tilegym_mamba2.registry import Backend, register, register_backend
    from tilegym_mamba2.ops.chunk_cumsum import reference as cumsum
    from tilegym_mamba2.ops.compute_out import reference as out
    from tilegym_mamba2.ops.fwd_pass_state import reference as state

    register_backend(Backend(name="acme", why_unavailable=lambda device: None, priority={"cpu": 3}))


    def needs_even_headdim(problem):
        return f"headdim is {problem.headdim}: acme does even ones only" if problem.headdim % 2 else None


    @register("chunk_cumsum", "acme", differentiable=True)
    def chunk_cumsum(*arguments):
        return cumsum.chunk_cumsum(*arguments)


    @register("fwd_pass_state", "acme", supports=needs_even_headdim, differentiable=True)
    def fwd_pass_state(*arguments):
        return state.fwd_pass_state(*arguments)


    @register("compute_out", "acme", supports=needs_even_headdim, differentiable=True)
    def compute_out(*arguments):
        return out.compute_out(*arguments)
"""


def install(folder: Path, name: str, source: str | None, entry_point: str | None = None) -> None:
    """Puts a distribution on an importable path as an installer would: its module, and its metadata."""
    if source is not None:
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tilegym_mamba2.backends]\n{name} = {entry_point or name}\n")


def python(folder: Path, code: str, **environment: str) -> Any:
    """What `code` printed, as JSON, in a new process that sees `folder`."""
    paths = [str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_an_installed_backend_is_found_chosen_and_checked(tmp_path: Path) -> None:
    install(tmp_path, "acme_backend", PLUGIN)
    found = python(
        tmp_path,
        """
        import json, torch
        import tilegym_mamba2 as package
        from tilegym_mamba2 import registry, testing

        inputs = testing.make_inputs(seqlen=8)
        want = testing.oracle_scan(**inputs)[0]
        error = testing.relative_error(package.mamba_chunk_scan_combined(**inputs, backend="acme"), want)
        odd = testing.make_inputs(seqlen=8, headdim=3)
        try:
            package.mamba_chunk_scan_combined(**odd, backend="acme")
        except NotImplementedError as refusal:
            refused = str(refusal)
        results = testing.check_backend("acme", dtypes=[torch.bfloat16])
        with package.use_backend("acme"):
            package.mamba_chunk_scan_combined(**inputs)
        chosen = registry.select("chunk_cumsum", testing_problem := __import__(
            "tilegym_mamba2.problem", fromlist=["x"]).chunk_cumsum_problem(
            inputs["dt"], inputs["A"], 8, None, False, (0.0, 1.0))).backend
        print(json.dumps(dict(
            available=package.available_backends("cpu"), explained=package.explain_backends("cpu"), error=error,
            refused=refused, chosen=chosen, checked=len(results), ops=sorted({result.op for result in results}),
            failed=[result.detail for result in results if not result.ok],
            refusals=sorted({result.problem for result in results if result.refused}),
        )))
        """,
    )
    assert found["available"][0] == "acme"
    assert found["explained"]["acme"] == "available"
    assert found["error"] < 5e-6
    assert found["chosen"] == "acme"
    assert "'acme'" in found["refused"]
    assert "headdim is 3" in found["refused"]
    assert found["ops"] == ["chunk_cumsum", "compute_out", "fwd_pass_state", "mamba_chunk_scan"]
    assert found["checked"] > 150
    assert found["failed"] == []
    assert found["refusals"] == ["one_dim", "tiny_headdim"]


def test_a_backend_chosen_by_the_environment(tmp_path: Path) -> None:
    install(tmp_path, "acme_backend", PLUGIN)
    code = """
        import json
        from tilegym_mamba2 import registry
        from tilegym_mamba2.testing import make_inputs
        from tilegym_mamba2.ops.chunk_cumsum import chunk_cumsum
        inputs = make_inputs(seqlen=8)
        try:
            chunk_cumsum(inputs["dt"], inputs["A"], 8)
            print(json.dumps(registry.current_backend()))
        except ValueError as error:
            print(json.dumps(str(error)))
    """
    assert python(tmp_path, code, TILEGYM_MAMBA2_BACKEND="acme") == "acme"
    assert "'acne', did you mean 'acme'?" in python(tmp_path, code, TILEGYM_MAMBA2_BACKEND="acne")


FAILING = {
    "licence_backend": ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
    "package_backend": (
        "import a_package_that_is_missing",
        "ModuleNotFoundError: No module named 'a_package_that_is_missing'",
    ),
    "syntax_backend": ("def broken(:", "SyntaxError"),
    "exit_backend": ("raise SystemExit('no GPU')", "SystemExit: no GPU"),
    "absent_backend": (None, "ModuleNotFoundError: No module named 'absent_backend'"),
    "twin_backend": (
        """
        from tilegym_mamba2.registry import Backend, register_backend
        register_backend(Backend(name="triton", why_unavailable=lambda device: None))
        """,
        "backend 'triton' is registered twice",
    ),
    "twin_op_backend": (
        """
        from tilegym_mamba2.registry import register
        register("chunk_cumsum", "torch-reference")(lambda *arguments: None)  # which is not imported yet
        """,
        "chunk_cumsum on 'torch-reference' is registered twice: in ",
    ),
}


def test_plugins_that_fail_are_reported_and_harm_nobody(tmp_path: Path) -> None:
    for name, (source, _) in FAILING.items():
        install(tmp_path, name, source)
    install(tmp_path, "acme_backend", PLUGIN)
    found = python(
        tmp_path,
        """
        import json
        import tilegym_mamba2 as package
        from tilegym_mamba2 import registry
        available = package.available_backends("cpu")
        try:
            package.set_backend("bad")
        except ValueError as error:
            message = str(error)
        print(json.dumps(dict(available=available, failures=registry.load_failures(), message=message)))
        """,
    )
    assert {"acme", "torch-reference"} <= set(found["available"])
    assert set(found["failures"]) == set(FAILING)
    for name, (_, reason) in FAILING.items():
        assert reason in found["failures"][name]
        assert reason in found["message"], "the failure is told where the backend is missed"


def test_discovery_waits_until_it_is_needed(tmp_path: Path) -> None:
    install(tmp_path, "acme_backend", PLUGIN)
    loaded = python(
        tmp_path,
        """
        import json, sys
        import tilegym_mamba2
        before = "acme_backend" in sys.modules
        tilegym_mamba2.available_backends("cpu")
        print(json.dumps([before, "acme_backend" in sys.modules]))
        """,
    )
    assert loaded == [False, True]


def test_discovery_waits_for_a_thread_that_imports_a_plugin(tmp_path: Path) -> None:
    source = """
        import builtins
        builtins.importing.set()
        builtins.discovering.wait(60)
    """
    install(tmp_path, "acme_backend", textwrap.dedent(source) + textwrap.dedent(PLUGIN))
    available = python(
        tmp_path,
        """
        import builtins, faulthandler, importlib.metadata, json, threading
        import tilegym_mamba2

        faulthandler.dump_traceback_later(60, exit=True)
        builtins.importing, builtins.discovering = threading.Event(), threading.Event()
        importer = threading.Thread(target=__import__, args=("acme_backend",))
        importer.start()
        importing.wait()
        load = importlib.metadata.EntryPoint.load

        def announced(entry_point):
            threading.Timer(0.2, discovering.set).start()
            return load(entry_point)

        importlib.metadata.EntryPoint.load = announced
        print(json.dumps(tilegym_mamba2.available_backends("cpu")))
        importer.join()
        """,
    )
    assert available[0] == "acme"
