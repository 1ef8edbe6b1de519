"""What the documents say is so: their code runs, their links lead somewhere, their figures and claims hold."""

import ast
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tilegym_mamba2
from tilegym_mamba2 import registry
from tilegym_mamba2.testing import budget, make_inputs, oracle_scan, relative_error

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tilegym_mamba2"
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def table_rows(heading: str, text: str = README) -> list[list[str]]:
    """The cells of the first table after a heading, its head left out."""
    after = text.partition(f"\n{heading}\n")[2]
    lines = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE)
    assert lines, f"no table after {heading!r}"
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines[0].splitlines()[2:]]


def environment(**changes: str) -> dict[str, str]:
    interpreters = ("TRITON_INTERPRET", "TILEGYM_MAMBA2_CUTILE_INTERPRET")
    kept = {name: value for name, value in os.environ.items() if name not in interpreters}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", **changes}


def call(*command: str, cwd: Path, **changes: str) -> str:
    path = os.pathsep.join(filter(None, [changes.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command, cwd=cwd, env=environment(PYTHONPATH=path, **changes), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


# The README's code


INTEGRATIONS = [block for block in blocks("python") if "tilegym_mamba2.integrations" in block]
EXAMPLES = [
    block for block in blocks("python") if not block.startswith("# plain_backend.py") and block not in INTEGRATIONS
]
COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("tilegym-mamba2 ")]


def test_examples_run_and_are_right(tmp_path: Path):
    checks = """
from tilegym_mamba2.testing import budget, oracle_scan, relative_error
want_out, want_final, _ = oracle_scan(x, dt, A, B, C, dt_softplus=True)
assert out.shape == x.shape and out.dtype == x.dtype
assert final_states.shape == (batch, nheads, headdim, dstate) and final_states.dtype == torch.float32
assert relative_error(out, want_out) <= budget(x.dtype)
assert relative_error(final_states, want_final) <= budget(x.dtype)
"""
    assert len(EXAMPLES) == 2
    program = tmp_path / "program.py"
    program.write_text("\n".join([*EXAMPLES, checks]))
    printed = call(sys.executable, str(program), cwd=tmp_path)
    assert "['torch-reference']" in printed
    assert "TILEGYM_MAMBA2_CUTILE_INTERPRET=1" in printed


def test_integrations_do_what_they_say(tmp_path: Path):
    assert len(INTEGRATIONS) == 2
    family = "transformers.models.mamba2.modeling_mamba2"
    checks = {
        "integration.disable()": f"""
from {family} import mamba2_chunk_scan
kept = [mamba2_chunk_scan]
assert mamba2_chunk_scan.__module__.startswith("transformers"), "disable() restores"
with integration.enable("torch-reference") as enabled:
    assert "{family}.mamba2_chunk_scan" in enabled.names
    from {family} import mamba2_chunk_scan
    assert mamba2_chunk_scan is not kept[0]
assert mamba2_chunk_scan is kept[0]
""",
        "mamba_ssm.withdraw()": """
import torch
x = torch.ones(1, 3, 1, 2)
out = mamba_chunk_scan_combined(x, x[..., 0], torch.zeros(1), x, x, 2)
assert torch.equal(out, torch.tensor([2.0, 4.0, 6.0])[:, None, None].expand_as(x))
""",
    }
    for block, (end, check) in zip(INTEGRATIONS, checks.items(), strict=True):
        assert block.rstrip().endswith(end)
        program = tmp_path / "program.py"
        program.write_text(block + check)
        call(sys.executable, str(program), cwd=tmp_path, PYTHONWARNINGS="default")


def test_the_first_example_is_short():
    assert len([line for line in EXAMPLES[0].splitlines() if line]) <= 12


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(line: str, tmp_path: Path):
    (tmp_path / "README.md").write_text(README)
    arguments = shlex.split(line, comments=True)[1:]
    if arguments[0] == "check":
        arguments += ["--dtype", "bfloat16"]  # a quarter of it: the whole runs in test_conformance.py
    assert call(sys.executable, "-m", "tilegym_mamba2", *arguments, cwd=tmp_path)
    if "--json" in arguments:
        assert (tmp_path / "result.json").stat().st_size > 0


def test_every_command_of_the_readme_was_found():
    assert len(COMMANDS) == 5


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder in which the README's example of a backend is installed."""
    (example,) = [block for block in blocks("python") if block.startswith("# plain_backend.py")]
    (metadata,) = blocks("toml")
    table, entry = metadata.strip().splitlines()
    group = re.fullmatch(r'\[project\.entry-points\."(.+)"\]', table)
    name = re.fullmatch(r'(\w+) = "(\w+)"', entry)
    assert group
    assert name
    (tmp_path / f"{name[2]}.py").write_text(example)
    info = tmp_path / "plain-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group[1]}]\n{name[1]} = {name[2]}\n")
    return tmp_path


def test_the_example_of_a_backend_passes_the_conformance_suite(plain: Path):
    assert "`tilegym-mamba2 check --backend plain`" in README
    command = [sys.executable, "-m", "tilegym_mamba2", "check", "--backend", "plain"]
    printed = call(*command, cwd=plain, PYTHONPATH=str(plain))
    assert re.search(r"^plain: none of [1-9]\d+ checks failed$", printed, re.MULTILINE)
    # float64 is what it refuses, and nothing else.
    assert re.search(r"chunk_cumsum +float64 +(\d+) +\1 +0 ", printed)
    assert re.search(r"chunk_cumsum +bfloat16 +\d+ +0 +0 ", printed)


def test_the_example_of_a_backend_is_broken_by_a_change(plain: Path):
    module = plain / "plain_backend.py"
    module.write_text(module.read_text().replace(".cumsum(-1)", ".cumsum(-1).roll(1, -1)"))
    command = [sys.executable, "-m", "tilegym_mamba2", "check", "--backend", "plain", "--dtype", "float32"]
    with pytest.raises(AssertionError, match="checks failed"):
        call(*command, cwd=plain, PYTHONPATH=str(plain))


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", "\n".join(blocks("sh")), re.MULTILINE))
def test_make_targets_exist(target: str, tmp_path: Path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    printed = call("make", "--dry-run", target, cwd=tmp_path)
    assert "-m venv .venv" in printed
    assert {"run": "tilegym_mamba2 run", "test": "pytest"}[target] in printed


def test_extras_exist():
    pyproject = (ROOT / "pyproject.toml").read_text()
    for extra in {name for names in re.findall(r"\.\[([\w,]+)\]", README) for name in names.split(",")}:
        assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE)


# Links, tables, layout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path):
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if not target.startswith("https://"):
            assert (document.parent / target.partition("#")[0]).exists(), target


def test_ops_and_backends():
    documented = {row[0].strip("`"): row[2:] for row in table_rows("## Ops and backends")}
    names = ("torch-reference", "triton", "cutile")
    assert f"| op | computes | {' | '.join(names)} |" in README
    registry.explain_backends("cpu")
    there = {
        op: ["yes" if registry.has_implementation(op, name) else "not yet" for name in names] for op in registry.ops()
    }
    assert documented == there


def test_budgets():
    found = {row[0]: float(row[1]) for row in table_rows("## Accuracy")}
    for name in ("float64", "float16", "bfloat16"):
        (row,) = [value for text, value in found.items() if text.split()[0] == name]
        assert row == budget(getattr(torch, name))
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            (row,) = [value for text, value in found.items() if f'"{precision}"' in text]
            assert row == budget(torch.float32)
    finally:
        torch.set_float32_matmul_precision(before)


def test_order_of_choice():
    """The five ways, each winning over all that come after it."""
    ways = re.findall(r"^\d\. (.*)", README.partition("### How a backend is chosen")[2], re.MULTILINE)
    marks = ("argument", "use_backend", "set_backend", registry.ENVIRONMENT_VARIABLE, "automatic")
    assert len(ways) == len(marks)
    assert all(mark in way for mark, way in zip(marks, ways, strict=True))


def test_layout_exists():
    tree = README.partition("## How the code is laid out")[2]
    names = re.findall(r"^ {8}([\w/<>.]+?)/? {2,}", tree, re.MULTILINE)
    assert len(names) > 5
    for name in names:
        assert (PACKAGE / name.replace("<op>", "chunk_cumsum")).exists(), name
    for name in re.findall(r"`(?:tilegym_mamba2/)?([\w/]+\.py)`", README + CONTRIBUTING):
        assert list(PACKAGE.rglob(name)), name


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            source = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
USERS = ("bench", "cli", "integrations", "testing", "models", "__main__")


def own_imports(module: str) -> set[str]:
    """Modules of this package that a module imports, in full: a name in a package is not one."""
    found: set[str] = set()
    for name in imports_of(MODULES[module]):
        while name.startswith("tilegym_mamba2") and name not in MODULES:
            name = name.rpartition(".")[0]
        if name.startswith("tilegym_mamba2"):
            found.add(name.removeprefix("tilegym_mamba2").removeprefix("."))
    return found


def is_op(name: str) -> bool:
    return name in {f"ops.{op}" for op in registry.ops()}


def is_implementation(name: str) -> bool:
    return name.startswith("ops.") and name.count(".") == 2


@pytest.mark.parametrize("module", [name for name in MODULES if name.count(".")])
def test_imports_follow_the_arrows(module: str):
    name = module.removeprefix("tilegym_mamba2.")
    imported = own_imports(module) - {""}
    if name.split(".")[0] in USERS:
        assert not any(is_implementation(other) for other in imported)
        return
    assert not any(other.split(".")[0] in USERS for other in imported), imported
    if is_implementation(name):
        folder = name.rpartition(".")[0]
        others = {other for other in imported if other.startswith("ops.") and not other.startswith(folder)}
        siblings = {other for other in imported if is_implementation(other) and other.split(".")[-1][0] != "_"}
        assert not others | siblings
    elif is_op(name):
        assert not any(is_implementation(other) or other.startswith("backends") for other in imported), imported
        assert "registry" in imported
    elif name.startswith("backends"):
        assert all(other in ("registry", "tuning") or other.startswith("backends") for other in imported), imported
    elif name == "tuning":
        assert imported == {"_version"}
    elif name == "registry":
        assert not imported
        assert {other.split(".")[0] for other in imports_of(PACKAGE / "registry.py")} <= {
            *sys.stdlib_module_names,
            "torch",
        }
    elif name == "scan":
        assert all(is_op(other) for other in imported), imported


def test_nothing_optional_is_imported(tmp_path: Path):
    optional = ("triton", "cuda.tile", "typer", "rich", "transformers", "mamba_ssm", "tilegym")
    program = f"""
import sys
import tilegym_mamba2
tilegym_mamba2.explain_backends()
print([name for name in {optional} if name in sys.modules])
"""
    assert call(sys.executable, "-c", program, cwd=tmp_path).strip() == "[]"


def test_contributing_names_the_files_of_the_backends():
    named = set(re.findall(r"`(\w+)`", re.search(r"says \((.*?)\)", CONTRIBUTING)[1]))
    registry.explain_backends("cpu")
    used = {backend.module for backend, _ in registry._backends.values() if backend.module is not None}
    assert used == named


def test_licence():
    licence = (ROOT / "LICENSE").read_text()
    assert licence.startswith("MIT License\n\nCopyright (c) 2026 The tilegym_mamba2 authors\n")
    assert tilegym_mamba2.__version__


# docs/math.md


def by_chunks(inputs: dict, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """docs/math.md's (2) and (3) word for word, for one head, in float64."""
    x, B, C, z = (inputs[name][0].double() for name in "xBCz")
    x, B, C, z = x[:, 0], B[:, 0], C[:, 0], z[:, 0]
    A, D = float(inputs["A"]), float(inputs["D"])
    low, high = inputs["dt_limit"]
    d = torch.log1p(torch.exp(inputs["dt"][0, :, 0].double() + float(inputs["dt_bias"]))).clamp(low, high)
    ids = inputs["seq_idx"][0].tolist()
    run = [sum(ids[s] != ids[s - 1] for s in range(1, t + 1)) for t in range(len(ids))]
    S = inputs["initial_states"][0, 0].double()
    y = torch.zeros_like(x)
    for begin in range(0, len(ids), chunk_size):
        chunk = range(begin, min(begin + chunk_size, len(ids)))
        run_before = run[begin - 1] if begin else run[0]
        last = chunk[-1]
        a = dict(zip(chunk, (d[begin : last + 1] * A).cumsum(0), strict=True))
        for i in chunk:
            if run[i] == run_before:
                y[i] += torch.exp(a[i]) * S @ C[i]
            for j in range(begin, i + 1):
                if run[j] == run[i]:
                    y[i] += C[i].dot(B[j]) * torch.exp(a[i] - a[j]) * d[j] * x[j]
            y[i] += D * x[i]
        S = torch.exp(a[last]) * S if run[last] == run_before else torch.zeros_like(S)
        for j in chunk:
            if run[j] == run[last]:
                S = S + torch.exp(a[last] - a[j]) * d[j] * x[j].outer(B[j])
    return y * z * torch.sigmoid(z), S


@pytest.mark.parametrize("chunk_size", [1, 4, 5, 23, 64])
def test_chunk_form_is_the_recurrence(chunk_size: int):
    inputs = make_inputs(
        torch.float64, batch=1, seqlen=23, nheads=1, headdim=3, ngroups=1, dstate=4, z=True, initial_states=True,
        seq_idx=([7, 3, 2, 6, 7, 2, 1, 1, 4, 11],), decay=(1e-3, 2.0),
    )  # fmt: skip
    want_out, want_final, _ = oracle_scan(**inputs)
    out, final = by_chunks(inputs, chunk_size)
    assert relative_error(out, want_out[0, :, 0]) < 1e-13
    assert relative_error(final, want_final[0, 0]) < 1e-13


MATH = (ROOT / "docs/math.md").read_text()


def spacing(value: float) -> float:
    """The distance from a float32 number to the next."""
    number = torch.tensor(value, dtype=torch.float32)
    return float(torch.nextafter(number, torch.tensor(math.inf)) - number)


def test_precision_table():
    rows = table_rows("## The precision of the sum", MATH)
    assert len(rows) == 4
    for _, allowed, size in rows:
        threshold = float(size.replace(",", ""))
        assert spacing(threshold) > float(allowed) >= spacing(threshold * 0.999)
    assert f"{spacing(1000.0):.1e}".replace("e-05", "e-5") in MATH
    assert spacing(3200.0) < 6e-4


def test_a_pair_of_float32_is_enough_and_one_is_not():
    a = torch.tensor([50.0] * 63 + [1e-3] * 64, dtype=torch.float64).neg().cumsum(0)
    difference = a[-1] - a[-64]
    exact = difference.exp()
    high = a.float()
    low = (a - high.double()).float()
    alone = (high[-1] - high[-64]).double().exp()
    pair = ((high[-1] - high[-64]) + (low[-1] - low[-64])).double().exp()
    assert abs(alone / exact - 1) > 5e-6
    assert abs(pair / exact - 1) < 2.2e-8
    assert float((high.double() + low.double() - a).abs().max() / a.abs().max()) < 2**-48
