"""The command line as a user runs it: its own process, a pipe or a pseudo-terminal, and wrong uses."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from tilegym_mamba2 import cli, registry
from tilegym_mamba2.cli import run as run_command
from tilegym_mamba2.cli import terminal, timing
from tilegym_mamba2.models import MODELS
from tilegym_mamba2.testing import layer_inputs, oracle_scan, relative_error

COMMAND = [sys.executable, "-m", "tilegym_mamba2"]
CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
NOT_INHERITED = ("TRITON_INTERPRET", "TILEGYM_MAMBA2_CUTILE_INTERPRET", "NO_COLOR", "FORCE_COLOR", "COLUMNS")

PLUGIN = """
    import os, pathlib, time
    import torch
    from tilegym_mamba2.registry import Backend, register, register_backend
    from tilegym_mamba2.ops.mamba_chunk_scan import mamba_chunk_scan

    def backend(name, forward):
        register_backend(Backend(name=name, why_unavailable=lambda device: None))
        register("mamba_chunk_scan", name)(forward)

    def reference(arguments):
        return mamba_chunk_scan(*arguments, backend="torch-reference")

    def imprecise(*arguments):
        out, final_states, varlen_states = reference(arguments)
        return out * 1.01, final_states, varlen_states

    def imprecise_state(*arguments):
        out, final_states, varlen_states = reference(arguments)
        return out, final_states * 1.01, varlen_states

    def nan(*arguments):
        out, final_states, varlen_states = reference(arguments)
        return out * float("nan"), final_states, varlen_states

    def crashing(*arguments):
        raise RuntimeError("the kernel\\nexploded")

    def slow(*arguments):
        pathlib.Path(os.environ["MARKER"]).touch()
        time.sleep(float(os.environ["NAP"]))
        return reference(arguments)

    def refusing(*arguments):
        raise NotImplementedError("headdim is 32: too large")

    for forward in (imprecise, imprecise_state, nan, crashing, slow, refusing):
        backend(forward.__name__.replace("_", "-"), forward)
"""


def environment(**changes: str) -> dict[str, str]:
    """This process's variables without what changes the outcome; PYTHONPATH is extended, not replaced."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    path = [changes.pop("PYTHONPATH", ""), str(Path(__file__).parent.parent), kept.get("PYTHONPATH", "")]
    return {**kept, **CPU, **changes, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def call(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=environment(**changes), capture_output=True, text=True, timeout=240
    )


def call_on_terminal(*arguments: str, columns: int = 120, **changes: str) -> tuple[int, str]:
    """Exit status, and everything that a terminal would have got."""
    terminal_end, process_end = pty.openpty()
    changes = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40", **changes}
    with subprocess.Popen(
        [*COMMAND, *arguments],
        env=environment(**changes),
        stdin=process_end,
        stdout=process_end,
        stderr=process_end,
    ) as process:
        os.close(process_end)
        received = b""
        while True:
            try:
                received += os.read(terminal_end, 65536)
            except OSError:  # Linux's end of file: the process closed its end
                break
        os.close(terminal_end)
        return process.wait(timeout=60), received.decode()


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of an environment in which a package of other, mostly bad, backends is installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "other_backends.py").write_text(textwrap.dedent(PLUGIN))
    info = site / "other_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-backends\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tilegym_mamba2.backends]\nothers = other_backends\n")
    return {"PYTHONPATH": str(site), "MARKER": str(site / "marker"), "NAP": "0"}


def test_help_names_every_command():
    for arguments in ([], ["--help"]):
        done = call(*arguments)
        assert done.returncode == 0
        assert not done.stderr
        for command in ("info", "run", "check"):
            assert re.search(rf"\b{command}\b", done.stdout)


def test_script_is_installed():
    script = Path(sys.executable).with_name("tilegym-mamba2")
    if not script.exists():
        pytest.skip("the package is on the path, not installed, here")
    done = subprocess.run([script, "run", "--help"], env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    assert "--model" in done.stdout


def test_info(tmp_path: Path):
    done = call("info", "--json", str(tmp_path / "info.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "info.json").read_text())
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["versions"]) >= {"python", "torch", "triton", "cuda-tile", "tileiras", "driver"}
    assert set(found["ops"]) == set(registry.ops())
    assert found["devices"] == []
    assert found["automatic"] == "torch-reference"
    for op, cells in found["ops"].items():
        assert op in done.stdout
        assert cells["torch-reference"] == "available"
        assert "INTERPRET" in cells["cutile"]
    assert torch.__version__ in done.stdout
    assert found["backends"]["cutile"] in done.stdout


def test_info_reports_what_it_can_not_load(tmp_path: Path):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tilegym_mamba2.backends]\nbroken = no_such_module\n")
    done = call("info", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    assert "no_such_module" in done.stdout


def test_run_measures_what_it_says(tmp_path: Path):
    text, result = tmp_path / "text", tmp_path / "result.json"
    text.write_bytes(bytes(range(256)) * 2)
    sizes = ("--model", "falcon-h1-tiny", "--seqlen", "300", "--dtype", "float16")
    done = call("run", *sizes, "--file", str(text), "--json", str(result))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    found = json.loads(result.read_text())
    rows = {row["backend"]: row for row in found["results"]}
    inputs = layer_inputs("falcon-h1-tiny", 300, text.read_bytes(), dtype=torch.float16)
    want_out, want_final, _ = oracle_scan(**inputs)
    out, final, _ = run_command.mamba_chunk_scan(**inputs, backend="torch-reference")
    row = rows["torch-reference"]
    assert row["error_out"] == pytest.approx(relative_error(out, want_out), rel=1e-3)
    assert row["error_final_states"] == pytest.approx(relative_error(final, want_final), rel=1e-3)
    assert (row["status"], row["tokens"], found["budget"]) == ("ok", 300, 6e-4)
    assert found["reference"] == "oracle"
    assert 0 < row["seconds"] < 60
    assert f"{row['error_out']:.1e}" in done.stdout
    assert rows["cutile"]["status"] == "not run"
    assert rows["cutile"]["reason"] in done.stdout
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout


def test_run_cuts_the_text_into_rows():
    inputs = layer_inputs("falcon-h1-tiny", 24, b"a text of a few bytes")
    rows = run_command._rows(inputs, 3)
    for name in ("x", "dt", "B", "C"):
        assert rows[name].shape[:2] == (3, 8)
        assert rows[name].data_ptr() == inputs[name].data_ptr()
        assert torch.equal(rows[name].flatten(0, 1), inputs[name][0])


@pytest.mark.parametrize("backend", ["imprecise", "imprecise-state", "nan", "crashing"])
def test_run_fails_for_a_wrong_backend(plugins: dict[str, str], backend: str, tmp_path: Path):
    result = tmp_path / "result.json"
    done = call(
        "run", "--model", "falcon-h1-tiny", "--seqlen", "64", "--backend", backend, "--json", str(result), **plugins
    )
    assert done.returncode == 1, done.stdout + done.stderr
    status = "failed" if backend == "crashing" else "wrong"
    assert status in done.stdout
    assert "Traceback" not in done.stderr
    assert json.loads(result.read_text())["results"][0]["status"] == status
    if backend == "crashing":
        assert "crashing: RuntimeError: the kernel exploded" in done.stdout


def test_run_fails_where_nothing_ran(plugins: dict[str, str]):
    done = call("run", "--model", "falcon-h1-tiny", "--seqlen", "8", "--backend", "refusing", **plugins)
    assert done.returncode == 1, done.stderr
    assert "refusing: headdim is 32: too large." in done.stdout


def test_run_fails_for_one_wrong_backend_among_good_ones(plugins: dict[str, str]):
    done = call("run", "--model", "falcon-h1-tiny", "--seqlen", "64", **plugins)
    assert done.returncode == 1
    assert re.search(r"^ *torch-reference +ok ", done.stdout, re.MULTILINE)
    assert re.search(r"^ *imprecise +wrong ", done.stdout, re.MULTILINE)


def test_check_fails_for_a_wrong_backend(plugins: dict[str, str]):
    done = call("check", "--backend", "imprecise", "--dtype", "float64", **plugins)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^imprecise: [1-9]\d* of \d+ checks failed", done.stdout, re.MULTILINE)
    assert re.search(r"^imprecise: mamba_chunk_scan, plain, float64: ", done.stdout, re.MULTILINE)


def test_long_inputs_are_compared_with_the_reference_in_float64(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(run_command, "_ORACLE_NUMBERS", 1)
    arguments = ["run", "--model", "falcon-h1-tiny", "--seqlen", "100", "--backend", "torch-reference"]
    assert cli.main(arguments) == 0
    assert "want being torch-reference in float64" in capsys.readouterr().out


def test_slow_backends_are_given_fewer_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(run_command, "_CPU_SECONDS", 0.0)
    arguments = ["run", "--model", "falcon-h1-tiny", "--seqlen", "100", "--backend", "torch-reference"]
    if torch.cuda.is_available():
        pytest.skip("on a GPU nothing is cut short")
    assert cli.main(arguments) == 0
    assert "given the first 64 of 100 tokens" in capsys.readouterr().out


def test_an_unknown_model_is_answered_with_the_list():
    done = call("run", "--model", "mamba2-130")
    assert done.returncode == 2
    for name in MODELS:
        assert name in done.stderr


WRONG_USES = {
    "unknown command": (["rnu"], "run"),
    "unknown option": (["run", "--modle", "x"], "--modle"),
    "option without a value": (["run", "--seqlen"], "--seqlen"),
    "extra argument": (["run", "mamba2-130m"], "mamba2-130m"),
    "unknown model": (["run", "--model", "mamba2-13om"], "did you mean 'mamba2-130m'"),
    "seqlen 0": (["run", "--seqlen", "0"], "--seqlen is 0"),
    "seqlen of letters": (["run", "--seqlen", "many"], "--seqlen"),
    "seqlen beyond memory": (["run", "--seqlen", "10000000000"], "give a --seqlen below"),
    "batch 0": (["run", "--batch", "0"], "--batch is 0"),
    "unknown dtype": (["run", "--dtype", "float8"], "bfloat16"),
    "missing file": (["run", "--file", "{tmp}/none"], "No such file"),
    "directory as file": (["run", "--file", "{tmp}"], "is a directory"),
    "empty file": (["run", "--file", "{tmp}/empty"], "is empty"),
    "unknown backend": (["run", "--backend", "tritn"], "did you mean 'triton'"),
    "unavailable backend": (["run", "--backend", "cutile"], "TILEGYM_MAMBA2_CUTILE_INTERPRET=1"),
    "json in no directory": (["run", "--json", "{tmp}/none/result.json"], "there is no directory"),
    "json is a directory": (["info", "--json", "{tmp}"], "is a directory"),
    "json of a name that is too long": (["info", "--json", "{tmp}/" + 300 * "a"], "name too long"),
    "json on a full disk": (["info", "--json", "/dev/full"], "No space left"),
    "check of an unknown backend": (["check", "--backend", "torch-refrence"], "did you mean 'torch-reference'"),
    "check of an unavailable backend": (["check", "--backend", "cutile"], "TILEGYM_MAMBA2_CUTILE_INTERPRET=1"),
    "check of an unknown dtype": (["check", "--dtype", "int8"], "float64"),
}


# Importing torch takes most of a wrong use: one process does that, and each use is a child forked from it.
FORKS = """
import json, os, sys
from tilegym_mamba2 import cli
from tilegym_mamba2.__main__ import main

folder, uses = sys.argv[1], json.load(sys.stdin)
for name, arguments in uses.items():
    child = os.fork()
    if child == 0:
        for descriptor, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}.{stream}", os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv[1:] = arguments
        try:
            main()
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code)  # without taking torch down, which takes longer than all else
    with open(f"{folder}/{name}.status", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


@pytest.fixture(scope="module")
def wrong_uses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the exit status and what was printed of each wrong use."""
    folder, files = tmp_path_factory.mktemp("wrong_uses"), tmp_path_factory.mktemp("files")
    (files / "empty").touch()
    uses = {use: [argument.format(tmp=files) for argument in given] for use, (given, _) in WRONG_USES.items()}
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(folder)],
        input=json.dumps(uses), env=environment(), stderr=subprocess.PIPE, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("use", WRONG_USES)
def test_wrong_use_is_one_line_and_status_2(use: str, wrong_uses: Path):
    arguments, message = WRONG_USES[use]
    if "/dev/full" in arguments and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    status, out, err = ((wrong_uses / f"{use}.{end}").read_text() for end in ("status", "out", "err"))
    assert status == "2", out + err
    assert re.fullmatch(r"tilegym-mamba2: [^\n]+\n", err)
    assert message in err


def test_unreadable_file(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("text")
    secret.chmod(0)
    if os.access(secret, os.R_OK):
        pytest.skip("this user may read every file")
    done = call("run", "--file", str(secret))
    assert done.returncode == 2
    assert "can't be read (Permission denied)" in done.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages_the_command_says_what_to_install(package: str):
    block = f"import sys; sys.modules[{package!r}] = None; from tilegym_mamba2.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", block], env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert re.fullmatch(r"[^\n]+pip install 'tilegym_mamba2\[cli\]'\n", done.stderr)


SLOW = ("run", "--model", "falcon-h1-tiny", "--seqlen", "8", "--backend", "slow")


def test_a_terminal_gets_colour_and_a_progress_bar(plugins: dict[str, str]):
    status, received = call_on_terminal(*SLOW, **{**plugins, "NAP": "0.7"})
    assert status == 0, received
    assert "\x1b[32mok" in received
    assert re.search(r"slow.*━.*1/2", received)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", received)
    assert "falcon-h1-tiny: batch 1, seqlen 8" in last


def test_a_pipe_gets_neither(plugins: dict[str, str]):
    done = call(*SLOW, **{**plugins, "NAP": "0.7"})
    assert done.returncode == 0
    assert not done.stderr
    assert "\x1b" not in done.stdout


def test_a_pipe_that_nobody_reads_is_no_wrong_result():
    with subprocess.Popen([*COMMAND, "info"], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as one:
        assert one.stdout is not None
        one.stdout.close()
        assert one.stderr is not None
        assert not one.stderr.read()
        assert one.wait(timeout=240) == 141


def test_a_narrow_terminal_loses_nothing():
    status, received = call_on_terminal("run", "--model", "falcon-h1-tiny", "--seqlen", "8", columns=40)
    assert status == 0, received
    assert "…" not in received


@pytest.mark.parametrize("on_terminal", [False, True])
def test_interrupt(plugins: dict[str, str], tmp_path: Path, on_terminal: bool):
    marker = tmp_path / "marker"
    variables = environment(**{**plugins, "NAP": "100", "MARKER": str(marker), "TERM": "xterm"})
    terminal_end, process_end = pty.openpty()
    streams = process_end if on_terminal else subprocess.PIPE
    # Whoever runs the tests may ignore interrupts, and children inherit that.
    heed_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        [*COMMAND, *SLOW], env=variables, stdout=streams, stderr=streams, preexec_fn=heed_interrupts
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not marker.exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(1.5 if on_terminal else 0.2)  # on a terminal: once the bar is there
            process.send_signal(signal.SIGINT)
            if on_terminal:
                process.wait(timeout=60)
                stderr = os.read(terminal_end, 65536).decode()
            else:
                stderr = process.communicate(timeout=60)[1].decode()
        finally:
            process.kill()
    os.close(process_end)
    os.close(terminal_end)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr


def test_json_of_numbers_that_json_has_not(tmp_path: Path):
    path = tmp_path / "result.json"
    terminal.write_json(path, {"rows": [float("nan"), {"error": float("inf")}], "whole": 1, "part": 0.5})
    assert json.loads(path.read_text()) == {"rows": ["nan", {"error": "inf"}], "whole": 1, "part": 0.5}


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.5, "2.50 s"), (123.4, "123 s"), (0.0123, "12.3 ms"), (0.1, "100 ms"), (4.56e-5, "45.6 us"), (1e-6, "1.00 us")],
)
def test_times_have_three_digits(value: float, text: str):
    assert terminal.seconds(value) == text


def test_rotated_inputs_keep_strides_and_sharing(device: str):
    inputs = layer_inputs("falcon-h1-tiny", 20, b"some text", device=device)
    copies = timing.copy_of(inputs)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(copies[name], value)
            assert copies[name].stride() == value.stride()
            assert copies[name].data_ptr() != value.data_ptr()
        else:
            assert copies[name] == value
    assert copies["x"].untyped_storage().data_ptr() == copies["B"].untyped_storage().data_ptr()


def test_rotated_inputs_are_all_timed(monkeypatch: pytest.MonkeyPatch, device: str):
    monkeypatch.setattr(timing, "_copies", lambda arguments: 3)
    inputs = layer_inputs("falcon-h1-tiny", 20, b"some text", device=device)
    seen: set[int] = set()

    def forward(arguments: dict) -> tuple:
        seen.add(arguments["x"].data_ptr())
        return run_command.mamba_chunk_scan(**arguments, backend="torch-reference")

    timed = timing._device_time(forward, inputs, torch.device(device))
    assert len(seen) == 4
    assert timed.method.endswith("over 4 rotated inputs")
    assert 0 < timed.seconds < 10


def test_gpu_times_are_of_the_device(tmp_path: Path):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    result = tmp_path / "result.json"
    visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    done = call("run", "--backend", "torch-reference", "--json", str(result), **visible)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found["device"] == "cuda"
    assert re.fullmatch(r"device time of a CUDA graph over \d+ rotated inputs", found["results"][0]["method"])
