"""The layers that PyTorch does not bring in the form the checkpoints need."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.model_config import RopeConfig

# attend(layer, q [T, H, D], k [T, H_kv, D], v [T, H_kv, D]) -> [T, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention over one whole sequence: the oracle for every cached way to compute it.

    q is [T, H, D], k and v are [T, H_kv, D] with H a multiple of H_kv; returns [T, H, D]. Scale 1/sqrt(D).
    """
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # SDPA wants [1, heads, T, D]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def causal_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`causal_attention` as an `Attend`: run a model over one sequence without any cache."""
    return causal_attention(q, k, v)


class Conv1D(nn.Module):
    """A linear layer whose weight is stored `[in, out]`, as GPT-2 checkpoints have it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class RMSNorm(nn.Module):
    """Scale the last dimension to unit root mean square, in float32, then back to the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class RotaryEmbedding:
    """cos and sin of the RoPE angles of a step's positions, computed once per forward pass for all layers.

    The frequencies are a plain float32 attribute and not a buffer: `model.to(bfloat16)` would round a buffer, and
    at position 10,000 a rounded frequency is off by whole turns.
    """

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self.inv_freq, self.attention_factor = rope_frequencies(rope, head_dim)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos and sin, each [T, 1, D / 2] in `dtype` (the 1 broadcasts over heads)."""
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions.float()[:, None, None] * self.inv_freq
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, H, D]: dimension i pairs with i + D/2 (the rotate-half convention of Hugging Face checkpoints)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per token for each of the head_dim / 2 pairs, float32, and the factor on cos and sin (1 except yarn).

    The formulas of transformers' modeling_rope_utils.py: linear (kaiokendev), llama3 (Llama 3.1), yarn
    (Peng et al. 2023, arXiv:2309.00071).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.type == "llama3":
        # Keep what turns often within the original context, stretch what turns rarely, blend in between.
        turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
        keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return (1 - keep) * inv_freq / rope.factor + keep * inv_freq, 1.0
    if rope.type == "yarn":
        return _yarn_frequencies(rope, head_dim, inv_freq), _yarn_attention_factor(rope)
    return inv_freq, 1.0


def _yarn_frequencies(rope: RopeConfig, head_dim: int, inv_freq: Tensor) -> Tensor:
    def pair_that_turns(times: float) -> float:
        """The (fractional) index of the pair that turns so many times within the original context."""
        ratio = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    index = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    stretch = ((index - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * stretch + inv_freq * (1 - stretch)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation function of a checkpoint's config; ValueError on a name we do not have."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported; supported: {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]
