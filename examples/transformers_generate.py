"""A Mamba-2 model of Hugging Face transformers on this package, without mamba_ssm and causal_conv1d.

A small one with random weights, to run anywhere; a real one is AutoModelForCausalLM.from_pretrained(...).
"""

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from tilegym_mamba2.integrations import transformers as integration

device = "cuda" if torch.cuda.is_available() else "cpu"
config = Mamba2Config(
    hidden_size=64, num_heads=8, head_dim=16, state_size=32, n_groups=1, num_hidden_layers=2, vocab_size=256
)
model = Mamba2ForCausalLM(config).to(device).eval()
prompt = torch.randint(3, 256, (2, 50), device=device)
options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

before = model.generate(prompt, **options)
with integration.enable() as replaced:
    after = model.generate(prompt, **options)
print(f"replaced {len(replaced.names)} functions, such as {replaced.names[0]}")
print("the generated tokens are the same:", torch.equal(before, after))
