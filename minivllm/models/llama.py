"""The Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3) over flat tokens.

One decoder: RMSNorm before each half, rotary positions, grouped-query attention, SwiGLU. What the family members
add is optional and comes from the config: biases (Qwen2), a norm on each head's q and k (Qwen3). Module names
are those of Hugging Face's `LlamaForCausalLM`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from minivllm.model_config import ModelConfig
from minivllm.models.causal_lm import CausalLM
from minivllm.models.layers import RMSNorm, RotaryEmbedding, activation, apply_rope


class Attention(nn.Module):
    """The projections around attention; what happens between them is the caller's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.o_proj_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden_size] -> q [T, H, D] and k [T, H_kv, D], both rotated, and v [T, H_kv, D]."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return apply_rope(self.q_norm(q), cos, sin), apply_rope(self.k_norm(k), cos, sin), v


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act = activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


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
        assert config.rope is not None  # the family has it, whatever a config leaves out
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
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def decoder_layers(self) -> Any:  # Sequence[DecoderLayer]; a ModuleList forgets what it holds
        return self.model.layers

    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.model.embed_tokens(token_ids)
        return x, *self.model.rotary_emb(positions, x.dtype)

    def final_norm(self, x: Tensor) -> Tensor:
        return self.model.norm(x)
