"""What imports what: nothing optional with the package, and the arrows of the layout."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilegym_mamba2

PACKAGE = Path(tilegym_mamba2.__file__).parent
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
OPS = sorted(path.name for path in (PACKAGE / "ops").iterdir() if (path / "__init__.py").exists())
OPTIONAL = ("triton", "cuda", "tilegym", "transformers", "mamba_ssm", "typer", "rich", "numpy", "pytest")


def python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_imports_nothing_optional() -> None:
    """What torch itself imports does not count."""
    code = f"""
import sys, torch
before = set(sys.modules)
import tilegym_mamba2, tilegym_mamba2.testing, tilegym_mamba2.models
from tilegym_mamba2 import registry
tilegym_mamba2.available_backends()
tilegym_mamba2.explain_backends("cpu")
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(new & set({OPTIONAL!r})))
"""
    assert python(code).strip() == "[]"


def test_the_reference_works_without_anything_optional() -> None:
    """On a machine without triton, cuda.tile and the rest, simulated by refusing their import."""
    code = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"refused: {{name}}", name=name)

import torch
for name in [name for name in sys.modules if name.partition(".")[0] in {OPTIONAL!r}]:
    del sys.modules[name]
sys.meta_path.insert(0, Refuse())
import importlib.metadata
real = importlib.metadata.version
def version(name):
    if name in ("triton", "cuda-tile", "tilegym"):
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version

import os
os.environ["TRITON_INTERPRET"] = os.environ["TILEGYM_MAMBA2_CUTILE_INTERPRET"] = "1"
import tilegym_mamba2 as package
from tilegym_mamba2.testing import make_inputs, oracle_scan, relative_error
inputs = make_inputs(seqlen=100)
out = package.mamba_chunk_scan_combined(**inputs)
assert relative_error(out, oracle_scan(**inputs)[0]) < 5e-6
assert package.available_backends("cpu") == ["torch-reference"]
for name, package_name in (("triton", "triton"), ("cutile", "cuda-tile")):
    explained = package.explain_backends("cpu")[name]
    assert package_name in explained and "pip install" in explained, explained
    try:
        package.mamba_chunk_scan_combined(**inputs, backend=name)
    except package.BackendUnavailableError as error:
        assert "pip install" in str(error), error
    else:
        raise AssertionError(name)
print("works")
"""
    assert python(code).strip() == "works"


# The arrows


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        for field in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _top_level(getattr(node, field, []))


def imports(name: str, *, everywhere: bool = True) -> set[str]:
    """Modules that a file imports: anywhere in it, or only when it is itself imported."""
    tree = ast.parse(FILES[name].read_text())
    nodes = list(ast.walk(tree)) if everywhere else list(_top_level(tree.body))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = node.module or ""
            if node.level:
                package = ["tilegym_mamba2", *name.split("/")][: -node.level]
                parent = ".".join([*package, *filter(None, [node.module])])
            found |= {_module(f"{parent}.{alias.name}", parent) for alias in node.names}
    return found


def _module(full: str, parent: str) -> str:
    """`from a import b` imports a.b if that is a module, else a."""
    relative = full.removeprefix("tilegym_mamba2.").replace(".", "/")
    inside = full.startswith("tilegym_mamba2.") and (f"{relative}.py" in FILES or f"{relative}/__init__.py" in FILES)
    return full if inside else parent


def own(name: str) -> set[str]:
    return {module for module in imports(name) if module.partition(".")[0] == "tilegym_mamba2"}


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_the_parser_sees_imports() -> None:
    assert "tilegym_mamba2.scan" in own("__init__.py")
    assert "tilegym_mamba2.registry" in own("ops/chunk_cumsum/reference.py")
    assert "tilegym_mamba2.ops.chunk_cumsum" in own("ops/mamba_chunk_scan/__init__.py")


@pytest.mark.parametrize("name", ["registry.py", "problem.py", "models.py", "_version.py"])
def test_the_foundation_imports_torch_and_the_standard_library(name: str) -> None:
    outside = {module.partition(".")[0] for module in imports(name)} - set(sys.stdlib_module_names)
    assert outside <= {"torch"}


IMPLEMENTATIONS = [name for name in FILES if name.startswith("ops/") and not name.endswith("__init__.py")]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_implementations_never_import_each_other(name: str) -> None:
    """An op's files see their own op's `__init__` and private helpers, the backend's, and the registry."""
    package = ".".join(["tilegym_mamba2", *name.split("/")[:2]])
    siblings = {f"{package}.{Path(other).stem}" for other in FILES if other.startswith(name.rpartition("/")[0])}
    private = {sibling for sibling in siblings if sibling.rpartition(".")[2].startswith("_")}
    for module in own(name):
        allowed = (
            module in {package, *private}
            or within(module, "tilegym_mamba2.backends")
            or module in ("tilegym_mamba2.registry", "tilegym_mamba2.problem", "tilegym_mamba2.tuning")
        )
        assert allowed, f"{name} imports {module}"


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("backends/")])
def test_backends_know_nothing_of_ops(name: str) -> None:
    for module in own(name):
        allowed = ("tilegym_mamba2.registry", "tilegym_mamba2.backends", "tilegym_mamba2.tuning")
        assert within(module, *allowed), f"{name} imports {module}"


@pytest.mark.parametrize("name", [f"ops/{op}/__init__.py" for op in OPS])
def test_ops_import_ops_and_what_is_below(name: str) -> None:
    below = {f"tilegym_mamba2.{module}" for module in ("registry", "problem", "torch_operator")}
    below |= {f"tilegym_mamba2.ops.{op}" for op in OPS}
    assert own(name) <= below


def test_the_top() -> None:
    """__init__ -> scan -> ops -> registry; nothing of these imports what is beside or above it."""
    assert all(within(module, "tilegym_mamba2.ops") for module in own("scan.py"))
    assert own("torch_operator.py") <= {"tilegym_mamba2.registry", "tilegym_mamba2.problem"}
    for module in own("__init__.py"):
        assert within(module, *(f"tilegym_mamba2.{part}" for part in ("_version", "ops", "registry", "scan"))), module


@pytest.mark.parametrize("name", list(FILES))
def test_only_kernel_files_import_optional_packages_when_imported(name: str) -> None:
    """All others import them, if at all, inside the function that needs them."""
    kernels = Path(name).name in ("triton_.py", "cutile_.py") or Path(name).name.startswith(("_triton", "_cutile"))
    allowed = kernels or name.startswith(("cli/", "bench/", "backends/cutile_interpreter"))
    optional = {module for module in imports(name, everywhere=False) if module.partition(".")[0] in OPTIONAL}
    assert allowed or not optional, f"{name} imports {optional}"
