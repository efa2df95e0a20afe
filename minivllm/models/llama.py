"""The Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3) over flat tokens.

One decoder: RMSNorm before each half, rotary positions, grouped-query attention, SwiGLU. What the family members
add is optional and comes from the config: biases (Qwen2), a norm on each head's q and k (Qwen3). Module names
are those of Hugging Face's `LlamaForCausalLM`; what reads the same input (q, k and v; gate and up) is one layer
here, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minivllm.model_config import ModelConfig
from minivllm.models.causal_lm import CausalLM
from minivllm.models.layers import MergedLinear, RMSNorm, RotaryEmbedding, activation, apply_rope


class Attention(nn.Module):
    """The projections around attention; what happens between them is the caller's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.o_proj_bias)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden_size] -> q [T, H, D] and k [T, H_kv, D], both rotated, and v [T, H_kv, D]."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, H + 2 H_kv, D]
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.qk_norm:
            qk = torch.cat((self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])), dim=1)
        q, k = apply_rope(qk, cos, sin).split((self.num_heads, self.num_kv_heads), dim=1)
        return q, k, v


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = MergedLinear(config.hidden_size, parts, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act = activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        # In place (so not for training with relu): fresh memory for a large chunk costs more than the product.
        return self.down_proj(self.act(gate).mul_(up))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def before_attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def after_attention(self, x: Tensor, heads: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(heads.flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The part that checkpoints keep under `model.`: everything but the output head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim)


class Llama(CausalLM):
    """A Llama-family model. `attend` gets q and k already rotated."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the output head the token embedding itself, where the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def decoder_layers(self) -> Sequence[DecoderLayer]:
        return self.model.layers

    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.model.embed_tokens(token_ids)
        return x, *self.model.rotary_emb(positions, x.dtype)

    def final_norm(self, x: Tensor) -> Tensor:
        return self.model.norm(x)
