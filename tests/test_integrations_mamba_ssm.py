"""mamba_ssm's two functions replaced, or provided where there is no mamba_ssm."""

import importlib
import importlib.util
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tilegym_mamba2 as tm
from tilegym_mamba2.integrations import mamba_ssm as integration

SCAN = "mamba_ssm.ops.triton.ssd_combined"
UPDATE = "mamba_ssm.ops.triton.selective_state_update"
FAKE = {
    "mamba_ssm/__init__.py": "",
    "mamba_ssm/ops/__init__.py": "",
    "mamba_ssm/ops/triton/__init__.py": "",
    "mamba_ssm/ops/triton/ssd_combined.py": "def mamba_chunk_scan_combined(*args, **kwargs): return 'theirs'\n",
    "mamba_ssm/ops/triton/selective_state_update.py": "def selective_state_update(*args, **kwargs): return 'theirs'\n",
    "mamba_ssm/modules/__init__.py": "",
    "mamba_ssm/modules/mamba2.py": f"""
        from {SCAN} import mamba_chunk_scan_combined
        from {UPDATE} import selective_state_update as update

        class Mamba2:
            def forward(self, *args, **kwargs):
                return mamba_chunk_scan_combined(*args, **kwargs)
    """,
    "user_of_mamba_ssm.py": f"from {SCAN} import mamba_chunk_scan_combined as scan\n",
}


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mamba_ssm", "user_of_mamba_ssm")]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def fake_mamba_ssm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget()
    for name, source in FAKE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    assert integration.disable() == [], "a test left functions replaced"
    forget()


@pytest.fixture
def no_mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if importlib.util.find_spec("mamba_ssm") is not None:
        pytest.skip("mamba_ssm is installed")
    yield
    integration.withdraw()
    assert "mamba_ssm" not in sys.modules


def inputs() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(1, 9, 4, 8),
        "dt": torch.rand(1, 9, 4),
        "A": -torch.rand(4),
        "B": torch.randn(1, 9, 2, 16),
        "C": torch.randn(1, 9, 2, 16),
        "chunk_size": 4,
    }


def modules(*names: str) -> list[ModuleType]:
    return [importlib.import_module(name) for name in names]


@pytest.mark.usefixtures("fake_mamba_ssm")
def test_enable_replaces_what_was_imported_before_and_after() -> None:
    scan, update, layer = modules(SCAN, UPDATE, "mamba_ssm.modules.mamba2")
    theirs = (scan.mamba_chunk_scan_combined, update.selective_state_update)
    wanted = tm.mamba_chunk_scan_combined(**inputs())
    assert isinstance(wanted, Tensor)
    with integration.enable() as replaced:
        assert replaced.names == [
            "mamba_ssm.modules.mamba2.mamba_chunk_scan_combined",
            "mamba_ssm.modules.mamba2.update",
            f"{UPDATE}.selective_state_update",
            f"{SCAN}.mamba_chunk_scan_combined",
        ]
        (user,) = modules("user_of_mamba_ssm")
        assert torch.equal(layer.Mamba2().forward(**inputs()), wanted)
        assert torch.equal(user.scan(**inputs()), wanted)
        assert layer.update is update.selective_state_update
    assert (scan.mamba_chunk_scan_combined, update.selective_state_update) == theirs
    assert (layer.mamba_chunk_scan_combined, layer.update) == theirs
    assert user.scan is theirs[0]
    assert user.scan() == "theirs"
    assert "backend" in inspect.signature(tm.mamba_chunk_scan_combined).parameters


@pytest.mark.usefixtures("fake_mamba_ssm")
def test_disable_restores_all_and_says_so() -> None:
    (scan,) = modules(SCAN)
    theirs = scan.mamba_chunk_scan_combined
    integration.enable()
    integration.enable("torch-reference")
    assert integration.disable() == [f"{UPDATE}.selective_state_update", f"{SCAN}.mamba_chunk_scan_combined"]
    assert scan.mamba_chunk_scan_combined is theirs


@pytest.mark.usefixtures("fake_mamba_ssm", "fresh_registry")
def test_enable_fixes_the_backend() -> None:
    from tilegym_mamba2.registry import Backend, register_backend

    register_backend(Backend("nothing", why_unavailable=lambda device: "it never runs"))
    with integration.enable("nothing"), tm.use_backend("torch-reference"):
        for name, function in ((SCAN, "mamba_chunk_scan_combined"), (UPDATE, "selective_state_update")):
            assert hasattr(importlib.import_module(name), function)
        with pytest.raises(tm.BackendUnavailableError, match="it never runs"):
            importlib.import_module(SCAN).mamba_chunk_scan_combined(**inputs())


@pytest.mark.usefixtures("fake_mamba_ssm")
def test_a_real_package_is_never_hidden() -> None:
    with pytest.raises(ImportError, match=r"mamba_ssm is installed and is not hidden: .*enable\(\)"):
        integration.provide()
    assert importlib.import_module(SCAN).mamba_chunk_scan_combined() == "theirs"


@pytest.mark.usefixtures("fake_mamba_ssm")
def test_a_broken_package_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mamba_ssm/ops/triton/ssd_combined.py").write_text("raise OSError('undefined symbol: _ZN3c10')\n")
    with pytest.raises(ImportError, match=r"ssd_combined can't be imported \(OSError: undefined symbol.*provide\(\)"):
        integration.enable()


@pytest.mark.usefixtures("no_mamba_ssm")
def test_enable_without_mamba_ssm_points_to_provide() -> None:
    with pytest.raises(ImportError, match=r"ModuleNotFoundError.*without mamba_ssm use .*provide\(\)"):
        integration.enable()


@pytest.mark.parametrize("enable", [integration.enable, integration.provide])
def test_unknown_backend(enable: Any) -> None:
    with pytest.raises(ValueError, match="there is no backend 'tritn', did you mean 'triton'"):
        enable("tritn")


@pytest.mark.usefixtures("no_mamba_ssm")
def test_provide_serves_code_written_for_mamba_ssm() -> None:
    assert integration.provide() == ["mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", SCAN, UPDATE]
    import mamba_ssm
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    assert mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined is mamba_chunk_scan_combined
    assert mamba_ssm.__version__.startswith("2.3")
    assert importlib.util.find_spec(SCAN) is not None
    assert torch.equal(mamba_chunk_scan_combined(**inputs()), tm.mamba_chunk_scan_combined(**inputs()))
    assert list(inspect.signature(mamba_chunk_scan_combined).parameters) == [
        "x", "dt", "A", "B", "C", "chunk_size", "D", "z", "dt_bias", "initial_states", "seq_idx", "cu_seqlens",
        "dt_softplus", "dt_limit", "return_final_states", "return_varlen_states", "state_dtype",
    ]  # fmt: skip
    state, x = torch.zeros(2, 4, 8), torch.ones(2, 4)
    out = selective_state_update(state, x, x, -torch.ones(4, 8), torch.ones(2, 8), torch.ones(2, 8))
    assert torch.equal(out, torch.full((2, 4), 8.0))
    with pytest.raises(ImportError, match=r"mamba_ssm\.modules"):
        importlib.import_module("mamba_ssm.modules")
    integration.provide()  # once more is no error
    assert integration.withdraw() == ["mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", SCAN, UPDATE]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(SCAN)
    assert mamba_chunk_scan_combined(**inputs()).shape == (1, 9, 4, 8)


@pytest.mark.usefixtures("no_mamba_ssm")
def test_provided_functions_are_what_transformers_binds() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    code = """
from tilegym_mamba2.integrations.mamba_ssm import provide
provide("torch-reference")
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.utils import logging
model = Mamba2ForCausalLM(Mamba2Config(num_heads=8, head_dim=8, hidden_size=32, state_size=16, n_groups=2,
    num_hidden_layers=1, vocab_size=32, chunk_size=8)).eval()
ids = torch.arange(2, 12)[None]
got = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
from transformers.models.mamba2 import modeling_mamba2
bound = modeling_mamba2.mamba2_chunk_scan.__closure__
assert any(getattr(cell.cell_contents, "__module__", "") == "tilegym_mamba2.scan" for cell in bound), bound
assert got.shape == (1, 14)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
