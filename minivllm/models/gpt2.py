"""GPT-2. Parameter names are those of Hugging Face's `GPT2LMHeadModel`, less the `transformer.` prefix, which only
some checkpoints carry."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from minivllm.model_config import ModelConfig
from minivllm.models.causal_lm import CausalLM
from minivllm.models.layers import Conv1D, activation


class Attention(nn.Module):
    """The projections around attention; what happens between them is the caller's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.c_attn = Conv1D(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = Conv1D(config.hidden_size, config.hidden_size)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden_size] -> q, k, v, each [T, H, D]."""
        return self.c_attn(x).view(-1, 3, self.num_heads, self.head_dim).unbind(1)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.hidden_size, config.intermediate_size)
        self.c_proj = Conv1D(config.intermediate_size, config.hidden_size)
        self.act = activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def before_attention(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.attn.project(self.ln_1(x))

    def after_attention(self, x: Tensor, heads: Tensor) -> Tensor:
        x = x + self.attn.c_proj(heads.flatten(1))
        return x + self.mlp(self.ln_2(x))


class GPT2(CausalLM):
    """GPT-2 with learnt positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.wte.weight

    @property
    def decoder_layers(self) -> Any:  # Sequence[Block]; a ModuleList forgets what it holds
        return self.h

    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor]:
        return (self.wte(token_ids) + self.wpe(positions),)

    def final_norm(self, x: Tensor) -> Tensor:
        return self.ln_f(x)
