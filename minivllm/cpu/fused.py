"""The Llama family's layers in fewer operations: at batch 1 a step is mostly the fixed cost of each.

What reads the same input (q, k and v; gate and up) is one product, as in vLLM (QKVParallelLinear,
MergedColumnParallelLinear). Norm and rotation are written for a processor; `minivllm.models` has them as a textbook
does, and the results are equal but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minivllm.cpu import host_memory
from minivllm.models.layers import RMSNorm, RotaryEmbedding
from minivllm.models.llama import MLP, Attention, Llama


class HypotNorm(nn.Module):
    """RMSNorm: sqrt(mean(x^2) + eps) is the hypotenuse of |x| and sqrt(n eps), over sqrt(n).

    Written so, it is half as many operations as `F.rms_norm` makes of it on a CPU; a step of SmolLM2 has 61 of them.
    """

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        size = len(norm.weight)
        self.weight = norm.weight
        # Tensors, since a recording would convert numbers at each call; without dimensions, they mix with any device.
        self.scale = torch.tensor(size**-0.5, dtype=torch.float32, device="cpu")
        self.root_eps = torch.tensor(math.sqrt(size * norm.eps), dtype=torch.float32, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        rms = torch.hypot(torch.linalg.vector_norm(x32, dim=-1, keepdim=True), self.root_eps).mul_(self.scale)
        return (x32 / rms).to(x.dtype).mul_(self.weight)


class RolledRotary:
    """cos and sin for `rotate`: twice beside each other, sin negative in its first half."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        self.rotary = rotary

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [T] -> each [T, 1, D]."""
        cos, sin = self.rotary(positions, dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rope` of x [T, H, D]: rolling by D / 2 swaps the halves, so that both halves are one sum."""
    return (x * cos).add_(x.roll(cos.shape[-1] // 2, dims=-1).mul_(sin))


class FusedAttention(nn.Module):
    """q, k and v from one product, and rotated together."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.head_dim = attention.head_dim
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.num_heads, self.num_kv_heads, _ = (part.out_features // self.head_dim for part in parts)
        self.qkv_proj = merged(parts)
        self.o_proj = attention.o_proj
        self.has_norms = isinstance(attention.q_norm, RMSNorm)
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden_size] -> q [T, H, D] and k [T, H_kv, D], both rotated, and v [T, H_kv, D]."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, H + 2 H_kv, D]
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.has_norms:
            qk = torch.cat((self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])), dim=1)
        q, k = rotate(qk, cos, sin).split((self.num_heads, self.num_kv_heads), dim=1)
        return q, k, v


class FusedMLP(nn.Module):
    """gate and up from one product."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.gate_up_proj = merged((mlp.gate_proj, mlp.up_proj))
        self.down_proj, self.act = mlp.down_proj, mlp.act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        # In place: fresh memory for a large chunk costs more than the product.
        return self.down_proj(self.act(gate).mul_(up))


def merged(parts: Sequence[nn.Linear]) -> nn.Linear:
    """Linear layers that read the same input, as one; their rows lie in that order."""
    weights = [part.weight for part in parts]
    shape = (sum(len(weight) for weight in weights), weights[0].shape[1])
    weight = host_memory.zeros(shape, weights[0].dtype, weights[0].device)
    torch.cat(weights, out=weight)
    layer = nn.Linear(shape[1], shape[0], bias=parts[0].bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if parts[0].bias is not None:
        layer.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    return layer


@torch.inference_mode()
def fuse(model: nn.Module) -> None:
    """Put the layers of this file in the place of the textbook's, layer by layer, so that never more than one matrix is
    there twice. Other models than `Llama` stay as they are."""
    if not isinstance(model, Llama):
        return
    if isinstance(model.model.rotary_emb, RolledRotary):
        return  # done before
    for layer in model.decoder_layers:
        layer.self_attn, layer.mlp = FusedAttention(layer.self_attn), FusedMLP(layer.mlp)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is RMSNorm:  # a subclass may do more
                setattr(parent, name, HypotNorm(child))
    model.model.rotary_emb = RolledRotary(model.model.rotary_emb)  # type: ignore[assignment]  # in its place
