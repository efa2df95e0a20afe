"""Small random checkpoints in Hugging Face's layout, made and judged by transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
import transformers

from minivllm.models.layers import causal_attend

VOCAB = 99

GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2)
LLAMA = dict(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
    vocab_size=VOCAB,
    bos_token_id=1,
    eos_token_id=2,
)


def rope(**values) -> dict:
    """Rope parameters with a theta that is nobody's default."""
    return {"rope_type": "default", "rope_theta": 777.0, **values}


STRETCHED = dict(
    linear=rope(rope_type="linear", factor=2.5),
    llama3=rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24
    ),
    yarn=rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
)


def build(config: transformers.PreTrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """A model whose every parameter matters: biases are not 0, norms are not 1, attention is not uniform."""
    torch.manual_seed(seed)
    config = copy.deepcopy(config)  # the model would write its dtype into it
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def token_ids(length: int = 60) -> torch.Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(3))


def expected_logits(model: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[None]).logits[0]


def our_logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of every position of one sequence."""
    return model.compute_logits(model(ids, torch.arange(len(ids)), causal_attend))


def edit_config(folder: Path, drop: tuple[str, ...] = (), **changes) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in drop} | changes))


def spell_like_transformers_4(folder: Path) -> None:
    """Rewrite `rope_parameters` and `dtype` as `rope_theta`, `rope_scaling` and `torch_dtype`."""
    config = json.loads((folder / "config.json").read_text())
    scaling = dict(config["rope_parameters"])
    theta, kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
    edit_config(
        folder,
        drop=("rope_parameters", "dtype"),
        rope_theta=theta,
        rope_scaling=None if kind == "default" else {"type": kind, **scaling},
        torch_dtype=config["dtype"],
    )
