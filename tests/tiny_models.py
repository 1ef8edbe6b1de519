"""Models of transformers' Mamba-2 families with few, random weights, and what tests ask of them."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="5.16")

TEXT = {"vocab_size": 64, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
ATTENTION = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}


def config(family: str) -> Any:
    match family:
        case "mamba2":
            return transformers.Mamba2Config(
                num_heads=8, head_dim=8, state_size=16, n_groups=2, chunk_size=8, num_hidden_layers=3, **TEXT
            )
        case "bamba":
            return transformers.BambaConfig(num_hidden_layers=3, attn_layer_indices=[1], **MAMBA, **ATTENTION, **TEXT)
        case "nemotron_h":
            return transformers.NemotronHConfig(
                layers_block_type=["mamba", "attention", "mamba"],
                mamba_num_heads=8,
                mamba_head_dim=8,
                ssm_state_size=16,
                n_groups=2,
                chunk_size=8,
                expand=2,
                head_dim=8,
                **ATTENTION,
                **TEXT,
            )
        case "zamba2":
            return transformers.Zamba2Config(
                num_hidden_layers=3,
                layers_block_type=["mamba", "hybrid", "mamba"],
                n_mamba_heads=8,
                mamba_headdim=8,
                mamba_d_state=16,
                mamba_ngroups=2,
                mamba_expand=2,
                chunk_size=8,
                num_mem_blocks=1,
                **ATTENTION,
                **TEXT,
            )
        case "falcon_h1":
            return transformers.FalconH1Config(num_hidden_layers=2, mamba_d_ssm=64, **MAMBA, **ATTENTION, **TEXT)
        case _:
            return transformers.GraniteMoeHybridConfig(
                num_hidden_layers=3,
                layer_types=["mamba", "attention", "mamba"],
                num_local_experts=0,
                shared_intermediate_size=48,
                **MAMBA,
                **ATTENTION,
                **TEXT,
            )


def make_model(config: Any) -> Any:
    """Weights large enough for every layer to matter to the logits."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.3)
    return model


def tokens(batch: int = 2, length: int = 21) -> Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(length))


def left_padded(batch: int = 2, length: int = 21) -> dict[str, Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :5] = 0
    return {"input_ids": tokens(batch, length).masked_fill(mask == 0, 0), "attention_mask": mask}


def mamba_layers(model: Any) -> int:
    return sum(hasattr(module, "A_log") for module in model.modules())


@torch.no_grad()
def logits(model: Any, **inputs: Any) -> Tensor:
    return model(**inputs).logits


def cache_name(model: Any) -> str:
    """What this release of transformers calls a model's cache."""
    names = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "cache_params", "past_key_values") if name in names)


def generate(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return model.generate(**inputs, max_new_tokens=32, do_sample=False)


def needs_packing(family: str) -> None:
    if transformers.__version__.startswith("5.16.") and family in ("mamba2", "nemotron_h", "falcon_h1"):
        pytest.skip(f"transformers 5.16 does not hand packed sequences to {family}'s layers")


def packed(family: str, kind: str, device: str = "cpu") -> tuple[Any, dict[str, Any], tuple[Tensor, ...]]:
    """A model, its inputs for one row of packed sequences told apart by `kind`, and the sequences' tokens."""
    needs_packing(family)
    layout = config(family)
    if family == "granitemoehybrid":  # its attention keeps packed sequences apart with flash-attention only
        layout = transformers.GraniteMoeHybridConfig(**layout.to_dict() | {"layer_types": ["mamba"] * 3})
    model = make_model(layout)
    lengths = (2, 8, 1, 10)
    ids = tokens(1, sum(lengths)).to(device)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if kind == "seq_idx":
        inputs["seq_idx"] = torch.repeat_interleave(torch.tensor([7, 3, 7, 3]), torch.tensor(lengths))[None].int()
    else:
        inputs["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).int()
    if family == "mamba2":  # its language model drops what it doesn't know
        model = HeadOnBackbone(model)
    else:
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return model.to(device), inputs, ids.split(lengths, 1)


class HeadOnBackbone(torch.nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        hidden = self.model.backbone(**inputs).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutput(logits=self.model.lm_head(hidden))
