"""The bench of transformers' models measures what is right, and says why it does not measure the rest."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegym_mamba2 import registry
from tilegym_mamba2.bench import report
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
    assert "| model | rows x tokens | torch-reference | wrong | mamba_ssm | over mamba_ssm |" in shown
    row = f"| tiny | prefill, 1 x 40 | ({records['prefill', 'torch-reference']['eager'] * 1e3:.2f}) ms | - | - | - |"
    assert row in shown
    assert "tiny, decode 2 x 1, wrong: WrongLogitsError" in shown


def test_documents_have_times_and_gains(tmp_path: Path) -> None:
    def record(name: str, eager: float | None, graph: float | None, failed: str | None = None) -> dict[str, Any]:
        return {
            "model": "m", "implementation": name, "what": "prefill", "batch": 1, "seqlen": 8192, "eager": eager,
            "graph": graph, "failed": failed,
        }  # fmt: skip

    records = [
        record("cutile", 8e-3, 4e-3),
        record("triton", 5e-3, None),
        record("mamba_ssm", 10e-3, 6e-3),
        record("transformers", 0.12, None),
    ]
    (tmp_path / "t.json").write_text(json.dumps({"records": records}))
    text = report.updated("<!-- figures: whole-models t.json -->old<!-- /figures -->", tmp_path)
    assert (
        "| m | prefill, 1 x 8,192 | 4.00 (8.00) ms | (5.00) ms | 6.00 (10.00) ms | (120.00) ms | 1.50x | 30.0x |"
        in text
    )
    assert "old" not in text
    failed = report.whole_models([record("cutile", None, None, "no"), *records[2:]])
    assert failed.rows[0][2:] == ["-", "6.00 (10.00) ms", "(120.00) ms", "-", "-"]
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match=r"t.json holds no times of whole models"):
        report.updated(text, tmp_path)
