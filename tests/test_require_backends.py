"""The test suite's own option: a missing backend is a skip that says why, and a failure if it is required."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DEVICE

ROOT = Path(__file__).parents[1]


def pytest_run(*arguments: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", "-q", *arguments],
        cwd=ROOT,
        env={**os.environ, "TILEGYM_MAMBA2_CUTILE_INTERPRET": "0", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.skipif(DEVICE != "cpu", reason="with a GPU no backend can be taken away")
def test_a_missing_backend_is_a_skip_or_a_failure() -> None:
    test = "tests/test_scan.py::test_offsets_isolate_whether_or_not_states_are_returned"
    status, output = pytest_run(test)
    assert status == 0, output
    assert "1 passed, 2 skipped" in output
    assert "backend cutile: " in output
    assert "TILEGYM_MAMBA2_CUTILE_INTERPRET=1" in output
    assert "backend triton: " in output
    status, output = pytest_run(test, "--require-backends=cutile,torch-reference")
    assert status == 1, output
    assert "1 passed, 1 skipped, 1 error" in output
    status, output = pytest_run(
        "tests/test_conformance.py", "--require-backends=cutile", "-k", "cutile-chunk_cumsum-plain"
    )
    assert status == 1, output
    assert "3 failed" in output
    status, output = pytest_run(test, "--require-backends=cutil")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "cutil" in output
