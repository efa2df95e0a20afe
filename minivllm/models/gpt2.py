"""GPT-2, as a function of flat tokens and of *how* to attend.

The model never sees a batch, a cache or a mask. It gets the step's tokens in one flat row, projects them
to q, k, v, and hands those to `attend`, which the caller supplies: plain causal attention in training,
attention over pages when serving. Parameter names are those of Hugging Face's
`GPT2LMHeadModel`, less the `transformer.` prefix, which only some checkpoints carry.
"""

from __future__ import annotations

from torch import Tensor, nn

from minivllm.model_config import ModelConfig
from minivllm.models.layers import Attend, Conv1D, activation


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.c_attn = Conv1D(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = Conv1D(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.c_attn(x).view(-1, 3, self.num_heads, self.head_dim).unbind(1)
        return self.c_proj(attend(self.layer, q, k, v).flatten(1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.hidden_size, config.intermediate_size)
        self.c_proj = Conv1D(config.intermediate_size, config.hidden_size)
        self.act = activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + self.attn(self.ln_1(x), attend)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """GPT-2 over flat tokens.

    `forward(token_ids [T], positions [T], attend) -> [T, hidden_size]`, then
    `compute_logits([N, hidden_size]) -> [N, vocab_size]` for the rows that are sampled from.
    `attend(layer, q, k, v)` takes and returns `[T, num_heads, head_dim]`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the output head the token embedding itself, where the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.wte.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.wte(token_ids) + self.wpe(positions)
        for block in self.h:
            x = block(x, attend)
        return self.ln_f(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)
