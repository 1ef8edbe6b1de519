"""The tools of the tests: the oracle against numbers worked out by hand, errors and budgets, makers of inputs."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tilegym_mamba2 import BackendUnavailableError, mamba_chunk_scan_combined, registry
from tilegym_mamba2.models import MODELS, Model, find_model
from tilegym_mamba2.registry import Backend, register_backend
from tilegym_mamba2.testing import (
    DECODE_PROBLEMS,
    PROBLEMS,
    budget,
    check_backend,
    checks,
    elementwise_error,
    layer_inputs,
    make_inputs,
    op_inputs,
    oracle_chunk_cumsum,
    oracle_compute_out,
    oracle_fwd_pass_state,
    oracle_scan,
    oracle_selective_state_update,
    poisoned_memory,
    relative_error,
    relayout,
)

# The oracle


def tiny(**changes: Any) -> dict[str, Any]:
    """One head of one channel and one state: x 1, 2, 3; B 1, C 2; A -log 2, so that a step of 1 halves the state."""
    inputs: dict[str, Any] = {
        "x": torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1),
        "dt": torch.ones(1, 3, 1),
        "A": torch.tensor([-math.log(2.0)]).double(),
        "B": torch.ones(1, 3, 1, 1),
        "C": torch.full((1, 3, 1, 1), 2.0),
        "chunk_size": 2,
        **changes,
    }
    return inputs


@pytest.mark.parametrize(
    ("changes", "out", "final"),
    [
        ({}, [2.0, 5.0, 8.5], 4.25),
        ({"D": torch.tensor([10.0])}, [12.0, 25.0, 38.5], 4.25),
        ({"D": torch.tensor([[10.0]])}, [12.0, 25.0, 38.5], 4.25),
        ({"initial_states": torch.tensor(8.0).view(1, 1, 1, 1)}, [10.0, 9.0, 10.5], 5.25),
        ({"seq_idx": torch.tensor([[7, 7, 9]])}, [2.0, 5.0, 6.0], 3.0),
        ({"seq_idx": torch.tensor([[0, 1, 0]])}, [2.0, 4.0, 6.0], 3.0),
        ({"seq_idx": torch.tensor([[5, 5, 5]]), "initial_states": torch.full((1, 1, 1, 1), 8.0)}, [10, 9, 10.5], 5.25),
        ({"dt_limit": (2.0, 3.0)}, [4.0, 9.0, 14.25], 7.125),
        ({"dt_limit": (0.0, 0.0)}, [0.0, 0.0, 0.0], 0.0),
        ({"dt_bias": torch.tensor([1.0])}, [4.0, 9.0, 14.25], 7.125),
        ({"dt_bias": torch.tensor([-3.0])}, [0.0, 0.0, 0.0], 0.0),
        ({"dt": torch.full((1, 3, 1), math.log(math.e - 1)).double(), "dt_softplus": True}, [2.0, 5.0, 8.5], 4.25),
        ({"dt": torch.full((1, 3, 1), 30.0), "dt_softplus": True}, [60.0, 120.0, 180.0], 90.0),
        ({"z": torch.zeros(1, 3, 1, 1)}, [0.0, 0.0, 0.0], 4.25),
        ({"z": torch.full((1, 3, 1, 1), 50.0), "D": torch.tensor([10.0])}, [600.0, 1250.0, 1925.0], 4.25),
    ],
)
def test_the_oracle_by_hand(changes: dict[str, Any], out: list[float], final: float) -> None:
    got, got_final, varlen = oracle_scan(**tiny(**changes))
    assert got.flatten().tolist() == pytest.approx(out, rel=1e-7)
    assert got_final.item() == pytest.approx(final, rel=1e-7)
    assert varlen is None


@pytest.mark.parametrize(
    ("changes", "out", "states"),
    [
        ({"cu_seqlens": torch.tensor([0, 2, 3])}, [2.0, 5.0, 6.0], [2.5, 3.0]),
        ({"cu_seqlens": torch.tensor([0, 0, 1, 1, 3, 3])}, [2.0, 4.0, 8.0], [0.0, 1.0, 0.0, 4.0, 0.0]),
        (
            {
                "cu_seqlens": torch.tensor([0, 2, 2, 3]),
                "initial_states": torch.tensor([8.0, 7.0, 4.0]).view(3, 1, 1, 1),
            },
            [10.0, 9.0, 10.0],
            [4.5, 7.0, 5.0],
        ),
        (
            {"cu_seqlens": torch.tensor([0, 2, 3]), "initial_states": torch.tensor([8.0]).view(1, 1, 1, 1)},
            [10.0, 9.0, 6.0],
            [4.5, 3.0],
        ),
        ({"cu_seqlens": torch.tensor([0, 3]), "seq_idx": torch.tensor([[0, 0, 1]])}, [2.0, 5.0, 6.0], [3.0]),
    ],
)
def test_the_oracle_of_packed_sequences_by_hand(changes: dict[str, Any], out: list[float], states: list[float]) -> None:
    got, final, varlen = oracle_scan(**tiny(**changes))
    assert varlen is not None
    assert got.flatten().tolist() == pytest.approx(out)
    assert varlen.flatten().tolist() == pytest.approx(states)
    assert final.item() == pytest.approx(states[-1])


def test_the_stages_oracles_by_hand() -> None:
    inputs = tiny()
    dA_cumsum, dt_out = oracle_chunk_cumsum(inputs["dt"], inputs["A"], 2)
    assert (dA_cumsum / math.log(2)).flatten().tolist() == pytest.approx([-1.0, -2.0, -1.0, -1.0])
    assert dt_out.flatten().tolist() == [1.0, 1.0, 1.0, 0.0]
    initial = torch.full((1, 1, 1, 1), 8.0)
    states, final = oracle_fwd_pass_state(inputs["x"], inputs["B"], dt_out, dA_cumsum, initial)
    assert states.flatten().tolist() == pytest.approx([8.0, 4.5])
    assert final.item() == pytest.approx(5.25)
    given = states.clone()
    given[:, 1] = 100.0
    out = oracle_compute_out(inputs["x"], inputs["B"], inputs["C"], dt_out, dA_cumsum, given)
    assert out.flatten().tolist() == pytest.approx([10.0, 9.0, 106.0])
    ids = torch.tensor([[0, 0, 1]])
    out = oracle_compute_out(inputs["x"], inputs["B"], inputs["C"], dt_out, dA_cumsum, given, seq_idx=ids)
    assert out.flatten().tolist() == pytest.approx([10.0, 9.0, 6.0]), "the entry state is another sequence's"


def test_the_decode_oracle_by_hand() -> None:
    state = torch.tensor([[8.0], [80.0]]).view(2, 1, 1, 1)
    one = torch.ones(1, 1, 1)
    halving = -torch.full((1, 1, 1), math.log(2.0)).double()
    out, new = oracle_selective_state_update(
        state, 3 * one, one, halving, one, 2 * one, torch.tensor([[10.0]]), state_batch_indices=torch.tensor([1])
    )
    assert out.item() == pytest.approx(2 * 43.0 + 30.0)
    assert new.flatten().tolist() == pytest.approx([8.0, 43.0])
    assert state.flatten().tolist() == [8.0, 80.0]
    out, new = oracle_selective_state_update(
        state, 3 * one, one, halving, one, one, state_batch_indices=torch.tensor([-1])
    )
    assert out.item() == 0.0
    assert torch.equal(new, state.double())
    out, new = oracle_selective_state_update(state[:1], one, -one, halving, one, one)
    assert new.item() == pytest.approx(16.0 - 1.0), "the decode step does not clamp"


@pytest.mark.parametrize("name", ["groups", "packed_gate", "dt_limits", "no_softplus_clamped"])
def test_the_oracle_is_the_sum_over_all_earlier_tokens(name: str) -> None:
    """The quadratic form: y_i = sum over j <= i of (C_i . B_j) * product of the decays in between * d_j * x_j."""
    inputs = PROBLEMS[name].inputs(torch.float64)
    d = inputs["dt"] + inputs["dt_bias"]
    d = (F.softplus(d) if inputs["dt_softplus"] else d).clamp(*inputs["dt_limit"])
    batch, seqlen, nheads, headdim = inputs["x"].shape
    ids = inputs["seq_idx"] if inputs["seq_idx"] is not None else torch.zeros(batch, seqlen)
    group = nheads // inputs["B"].shape[2]
    out, _, _ = oracle_scan(**inputs)
    for b, h in ((0, 0), (batch - 1, nheads - 1), (0, nheads - 1)):
        for i in (0, 1, 17, 40, seqlen - 1):
            y = torch.zeros(headdim, dtype=torch.float64)
            decay = 1.0
            j = i
            while True:
                dot = inputs["C"][b, i, h // group] @ inputs["B"][b, j, h // group]
                y += dot * decay * d[b, j, h] * inputs["x"][b, j, h]
                decay *= float(torch.exp(d[b, j, h] * inputs["A"][h]))
                if j == 0 or ids[b, j] != ids[b, j - 1]:
                    break
                j -= 1
            if j == 0 and inputs["initial_states"] is not None:
                y += decay * inputs["initial_states"][b, h] @ inputs["C"][b, i, h // group]
            y += inputs["D"][h] * inputs["x"][b, i, h]
            if inputs["z"] is not None:
                y *= F.silu(inputs["z"][b, i, h])
            torch.testing.assert_close(out[b, i, h], y, rtol=1e-9, atol=1e-12)


def test_the_oracle_contains_poison() -> None:
    inputs = PROBLEMS["poison_x"].inputs()  # token 20 of row 0; its sequence is tokens 14 to 23
    out, final, _ = oracle_scan(**inputs)
    bad = ~out.isfinite().all(-1).all(-1)
    assert bad[0].nonzero().flatten().tolist() == [20, 21, 22, 23]
    assert not bad[1].any()
    assert final.isfinite().all()


# Errors and budgets


def test_relative_error() -> None:
    want = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert relative_error(want.half(), want.double()) == 0.0
    assert relative_error(torch.tensor([3.0, math.nan]), want) == math.inf
    assert relative_error(torch.tensor([3.0, math.inf]), want) == math.inf
    assert relative_error(torch.tensor([3.0, 1.0]), torch.tensor([3.0, math.nan])) == 0.0
    assert relative_error(torch.tensor([3.5, math.nan]), torch.tensor([3.0, math.inf])) == pytest.approx(1 / 6)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.tensor([1e-30]), torch.zeros(1)) == math.inf
    assert relative_error(torch.empty(0, 3), torch.empty(0, 3)) == 0.0
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(2,\)"):
        relative_error(want[None], want)


def test_elementwise_error() -> None:
    want = torch.tensor([1e-9, 100.0, 0.0])
    assert elementwise_error(torch.tensor([1.1e-9, 100.0, 0.0]), want) == pytest.approx(0.1, rel=1e-4)
    assert elementwise_error(torch.tensor([1e-9, 100.0, 1e-30]), want) == math.inf
    assert elementwise_error(torch.tensor([1e-9, math.nan, 0.0]), want) == math.inf
    assert elementwise_error(want, want) == 0.0
    assert elementwise_error(torch.empty(0), torch.empty(0)) == 0.0


def test_budgets_are_the_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert budget(torch.float64) == 1e-10
    assert budget(torch.float32) == 5e-6
    assert budget(torch.float16) == 6e-4
    assert budget(torch.bfloat16) == 2.5e-3
    assert budget(torch.float32, torch.float16) == 6e-4
    for precision in ("high", "medium"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        assert budget(torch.float32) == 1.5e-3
        assert budget(torch.float64) == 1e-10


# Makers of inputs


def test_inputs_are_well_scaled_and_mixed() -> None:
    inputs = make_inputs(seqlen=1000)
    _, d = oracle_chunk_cumsum(inputs["dt"], inputs["A"], 1000, inputs["dt_bias"], True)
    exponents = (d * inputs["A"][:, None, None]).abs().flatten(1)
    for lowest, highest in ((exponents[0].min(), exponents[0].max()), (exponents.min(), exponents.max())):
        assert 0.9e-3 < lowest < 2e-3
        assert 25 < highest < 51
    assert make_inputs(seed=3)["x"].equal(make_inputs(seed=3)["x"])
    assert not make_inputs(seed=3)["x"].equal(make_inputs(seed=4)["x"])
    mamba_chunk_scan_combined(**make_inputs(seqlen=5), return_final_states=True)  # the arguments are the function's


@pytest.mark.parametrize("name", list(PROBLEMS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_problems_are_what_dtypes_can_hold(name: str, dtype: torch.dtype) -> None:
    """Outputs that overflow or vanish in their dtype would test the dtype."""
    inputs = PROBLEMS[name].inputs(dtype)
    out, final, _ = oracle_scan(**inputs)
    finite = out[out.isfinite()]
    if finite.numel():
        assert finite.abs().max() < 6e4
        assert finite.abs().max() > 1e-2
        assert finite.abs().median() > 1e-4 or "limit" in name or "z" in name
    elif "empty" not in name and "no_sequence" not in name:
        pytest.fail("nothing is left to compare")
    if name.startswith("poison"):
        assert not out.isfinite().all()
        assert final[1:].isfinite().all() or "1" in str(PROBLEMS[name].options["poison"][1])
    else:
        assert out.isfinite().all()


def test_layouts() -> None:
    inputs = {name: value for name, value in make_inputs(z=True).items() if isinstance(value, torch.Tensor)}
    for layout in ("contiguous", "projection", "transposed", "unaligned"):
        for name, value in relayout(inputs, layout).items():
            assert torch.equal(value, inputs[name]), (layout, name)
            assert value.dtype == inputs[name].dtype
    projected = relayout(inputs, "projection")
    width = 4 * 16 * 2 + 2 * 16 * 2 + 4
    for name in ("x", "B", "C", "dt", "z"):
        assert projected[name].stride()[:2] == (70 * width, width)
    turned = relayout(inputs, "transposed")
    assert turned["x"].stride() == (1, 2, 140, 560)
    assert turned["A"].stride() == (2,)
    odd = relayout(inputs, "unaligned")
    for name, value in odd.items():
        assert value.storage_offset() == 1, name
        assert value.dim() == 1 or value.stride(-2) % 2 == 1, name
    storage = torch.empty(0).set_(odd["x"].untyped_storage())
    assert storage.isnan().sum() == storage.numel() - odd["x"].numel() > 0
    for name, value in relayout(inputs, "expanded").items():
        assert 0 in value.stride(), name
        assert value.shape == inputs[name].shape
    with pytest.raises(KeyError, match="spiral"):
        relayout(inputs, "spiral")


def test_stage_inputs_are_rounded_as_the_stages_round() -> None:
    inputs = PROBLEMS["state_dtype_bfloat16"].inputs(torch.float16)
    given = op_inputs("compute_out", inputs)
    assert given["states"].dtype == torch.bfloat16
    assert given["dA_cumsum"].dtype == given["dt_out"].dtype == torch.float32
    assert op_inputs("compute_out", PROBLEMS["plain"].inputs(torch.float16))["states"].dtype == torch.float32
    assert op_inputs("compute_out", PROBLEMS["plain"].inputs(torch.bfloat16))["states"].dtype == torch.bfloat16
    assert op_inputs("compute_out", PROBLEMS["plain"].inputs(torch.float64))["dt_out"].dtype == torch.float64


def test_problems_have_their_branch() -> None:
    """A problem named for something has it."""
    for name, scenario in PROBLEMS.items():
        inputs = scenario.inputs()
        assert scenario.suits("mamba_chunk_scan")
        assert not scenario.suits("selective_state_update")
        assert scenario.suits("compute_out") == (inputs["cu_seqlens"] is None), name
    assert all(scenario.suits("selective_state_update") for scenario in DECODE_PROBLEMS.values())
    ids = PROBLEMS["boundary_in_chunk"].inputs()["seq_idx"]
    changes = (1 + (ids[0].diff() != 0).nonzero().flatten()).tolist()
    assert changes == [13, 14, 24, 54]
    assert (torch.tensor(changes) < 32).sum() > 1, "several in one chunk"
    reused = PROBLEMS["reused_ids"].inputs()["seq_idx"][0].tolist()
    assert reused[0] == reused[30]
    assert reused[22] != 0
    names = [check.id for check in checks()]
    assert len(names) == len(set(names))


def test_poisoned_memory() -> None:
    deterministic = torch.utils.deterministic
    settings = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    with poisoned_memory():
        base = torch.zeros(4)
        for fresh in (torch.empty(8), torch.empty_like(base), base.new_empty(8), torch.empty_strided((4,), (2,))):
            assert fresh.isnan().all()
        assert (torch.empty(8, dtype=torch.int32) == 2**31 - 1).all()
        assert torch.empty(4, dtype=torch.bfloat16).isnan().all()
        assert (torch.zeros(4) == 0).all()
    assert settings == (torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory)


# check_backend, and the errors of its use


def test_check_backend_of_nothing(fresh_registry: None) -> None:
    with pytest.raises(ValueError, match="'torch-referense', did you mean 'torch-reference'"):
        check_backend("torch-referense")
    register_backend(Backend("empty", lambda device: None))
    with pytest.raises(ValueError, match="'empty' has no op"):
        check_backend("empty")
    register_backend(Backend("absent", lambda device: "no package: pip install it"))
    with pytest.raises(BackendUnavailableError, match="'absent' can't run on cpu: no package: pip install it"):
        check_backend("absent", "cpu")
    assert registry.current_backend() is None


# Models and their layers' inputs


def test_models_are_released_ones() -> None:
    assert len(MODELS) == 19
    assert MODELS["mamba2-2.7b"] == Model("mamba2-2.7b", 80, 64, 128, 1, 256)
    assert MODELS["nemotron-nano-9b-v2"] == Model("nemotron-nano-9b-v2", 128, 80, 128, 8, 128)
    assert MODELS["falcon-h1-7b"] == Model("falcon-h1-7b", 24, 128, 256, 1, 128)
    for name, model in MODELS.items():
        assert name == model.name
        assert model.nheads % model.ngroups == 0
    assert find_model("zamba2-7b").ngroups == 2
    with pytest.raises(ValueError, match="'mamba-130m', did you mean 'mamba2-130m'"):
        find_model("mamba-130m")


TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"
SMALL = Model("small", nheads=6, headdim=8, dstate=16, ngroups=2, chunk_size=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_layer_inputs_are_views_as_in_a_layer(dtype: torch.dtype) -> None:
    inputs = layer_inputs(SMALL, 200, TEXT, dtype=dtype)
    x, dt, B, C = (inputs[name] for name in ("x", "dt", "B", "C"))
    assert x.shape == (1, 200, 6, 8)
    assert B.shape == C.shape == (1, 200, 2, 16)
    assert dt.shape == (1, 200, 6)
    conv_channels, inner = 48 + 64, 48
    assert x.stride(1) == B.stride(1) == C.stride(1) == conv_channels
    assert x.untyped_storage().data_ptr() == B.untyped_storage().data_ptr() == C.untyped_storage().data_ptr()
    assert dt.stride(1) == inner + conv_channels + 6
    assert dt.storage_offset() == inner + conv_channels
    assert {x.dtype, dt.dtype, B.dtype, C.dtype} == {dtype}
    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    assert {inputs[name].dtype for name in ("A", "D", "dt_bias")} == {parameters}
    assert inputs["z"] is inputs["initial_states"] is inputs["seq_idx"] is None
    assert inputs["dt_softplus"] is True
    assert inputs["chunk_size"] == 32
    out = mamba_chunk_scan_combined(**inputs)
    assert isinstance(out, torch.Tensor)
    assert relative_error(out, oracle_scan(**inputs)[0]) <= budget(dtype)


def test_layer_inputs_are_initialised_as_in_mamba2() -> None:
    inputs = layer_inputs("nemotron-h-8b", 8, TEXT)
    assert inputs["x"].shape == (1, 8, 128, 64)
    A, steps = inputs["A"], F.softplus(inputs["dt_bias"].double())
    assert -16 <= A.min() < -14
    assert -3 < A.max() <= -1
    assert 1e-3 * 0.99 <= steps.min() < 2e-3
    assert 0.05 < steps.max() <= 0.1 * 1.01
    assert 5e-3 < steps.median() < 2e-2, "log-uniform: the middle is at 1e-2"
    assert (inputs["D"] == 1).all()
    # in_proj of a normed vector, uniform within 1 / sqrt(width): a variance of 1/3.
    assert 0.5 < inputs["dt"].std() < 0.65
    assert inputs["x"].min() >= -0.2785, "the least value of SiLU"
    assert inputs["x"].std() > 0.1


def test_layer_inputs_follow_the_text() -> None:
    inputs = layer_inputs(SMALL, 200, TEXT)
    length = len(TEXT)
    for name in ("x", "dt", "B", "C"):
        value = inputs[name]
        assert torch.equal(value[:, 3:length], value[:, length + 3 : 2 * length]), "repeated, but for the padded start"
    assert not torch.equal(inputs["x"][:, :3], inputs["x"][:, length : length + 3]), "the convolution is causal"
    assert not torch.equal(inputs["dt"][:, 0], inputs["dt"][:, 1])
    changed = layer_inputs(SMALL, 200, TEXT[:50] + "!" + TEXT[51:])
    differs = (inputs["x"] != changed["x"]).flatten(2).any(2)[0, :length].nonzero().flatten().tolist()
    assert differs == [50, 51, 52, 53], "a token reaches the width of the convolution"
    differs = (inputs["dt"] != changed["dt"]).any(2)[0, :length].nonzero().flatten().tolist()
    assert differs == [50]
    assert torch.equal(layer_inputs(SMALL, 200, TEXT.encode())["x"], inputs["x"])
    assert not torch.equal(layer_inputs(SMALL, 200, TEXT, seed=1)["x"], inputs["x"])
    assert layer_inputs(SMALL, 0, TEXT)["x"].shape == (1, 0, 6, 8)
    assert layer_inputs(SMALL, 3, "ä" * 50)["x"].shape == (1, 3, 6, 8)


def test_layer_inputs_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text(TEXT)
    assert torch.equal(layer_inputs(SMALL, 60, file)["x"], layer_inputs(SMALL, 60, TEXT)["x"])


def test_layer_inputs_need_text_and_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for nothing in ("", b"", tmp_path / "empty"):
        with pytest.raises(ValueError, match="text is empty"):
            layer_inputs(SMALL, 10, nothing)
    with pytest.raises(ValueError, match="did you mean 'mamba2-130m'"):
        layer_inputs("mamba2-13m", 10, TEXT)
