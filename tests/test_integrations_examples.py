"""Every script in examples/ runs, as a user runs it, and says what it should."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "torch_compile": "seqlen 257: the compiled layer agrees",
    "transformers_generate": "the generated tokens are the same: True",
    "mamba_ssm_code": "agree with the whole sequence, on tilegym_mamba2.scan",
    "tilegym_crosscheck": "it needs a CUDA device",
}
NEEDS = {"transformers_generate": "transformers", "tilegym_crosscheck": "tilegym"}


def test_every_example_is_tested() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example(name: str, device: str) -> None:
    package = NEEDS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if name == "transformers_generate" and importlib.util.find_spec("mamba_ssm") is not None:
        pytest.skip("with mamba_ssm installed the unpatched model computes in TF32, and may choose other tokens")
    wanted = "tilegym: " if (name, device) == ("tilegym_crosscheck", "cuda") else SAYS[name]
    interpreters = {"TRITON_INTERPRET": "0", "TILEGYM_MAMBA2_CUTILE_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=os.environ | interpreters,
    )
    assert result.returncode == 0, result.stderr
    assert wanted in result.stdout
