"""The bench of transformers' models measures what is right, and says why it does not measure the rest."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegym_mamba2 import registry
from tilegym_mamba2.ops.mamba_chunk_scan import mamba_chunk_scan
from tilegym_mamba2.ops.selective_state_update import selective_state_update

pytest.importorskip("transformers", reason="transformers is not installed", minversion="5.16")
SCRIPT = Path(__file__).parents[1] / "bench/transformers_models.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("transformers_models", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {"PREFILLS": ((1, 40),), "DECODES": (2,), "PROMPT": 8, "CHECKED_TOKENS": 64, "CALL_SECONDS": 0.01}
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    return module


@pytest.mark.usefixtures("fresh_registry")
def test_wrong_logits_are_not_timed(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry.register_backend(registry.Backend("wrong", why_unavailable=lambda device: None))

    @registry.register("mamba_chunk_scan", "wrong")
    def wrong(*arguments: Any) -> Any:
        out, *states = mamba_chunk_scan(*arguments, backend="torch-reference")
        return 2 * out, *states

    @registry.register("selective_state_update", "wrong")
    def right(*arguments: Any) -> Any:
        return selective_state_update(*arguments, backend="torch-reference")

    file = tmp_path / "models.json"
    with torch.no_grad():
        bench.measure(file, ["tiny"], ["torch-reference", "wrong", "mamba_ssm"], seconds=100)
    found = json.loads(file.read_text())
    records = {(record["what"], record["implementation"]): record for record in found["records"]}
    assert len(records) == 6
    for what, batch, seqlen in (("decode", 2, 1), ("prefill", 1, 40)):
        record = records[what, "torch-reference"]
        assert (record["batch"], record["seqlen"], record["failed"]) == (batch, seqlen, None)
        assert record["eager"] > 0
        assert 0 < record["error"] < 0.1
        assert "WrongLogitsError: the error of the logits is" in records[what, "wrong"]["failed"]
        assert records[what, "wrong"]["eager"] is None
        assert "runs on GPUs only" in records[what, "mamba_ssm"]["failed"]
    capsys.readouterr()
    bench.show(found)
    shown = capsys.readouterr().out
    assert "| model | case | torch-reference | wrong | mamba_ssm |" in shown
    assert f"({records['prefill', 'torch-reference']['eager'] * 1e3:.2f}) ms | - | - |" in shown
