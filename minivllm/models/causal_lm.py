"""What the models have in common: layers with an attention in the middle, which the caller supplies.

The model never sees a batch, a cache or a mask. It gets the step's tokens in one flat row, projects them to q, k, v
in each layer, and hands those to `attend`: plain causal attention in training, attention over pages when serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from minivllm.model_config import ModelConfig
from minivllm.models.layers import Attend


class DecoderLayer(Protocol):
    """A layer is what comes before its attention and what comes after it."""

    def before_attention(self, x: Tensor, *rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden_size] -> q [T, H, D], k and v [T, H_kv, D]; `rotary` is what `embed` gave besides x."""
        ...

    def after_attention(self, x: Tensor, heads: Tensor) -> Tensor:
        """x as it came in, and what attention made of it [T, H, D] -> the layer's output [T, hidden_size]."""
        ...


class CausalLM(nn.Module):
    """A decoder-only model over flat tokens.

    `forward(token_ids [T], positions [T], attend) -> [T, hidden_size]`, then
    `compute_logits([N, hidden_size]) -> [N, vocab_size]` for the rows that are sampled from.
    `attend(layer, q [T, H, D], k [T, H_kv, D], v [T, H_kv, D]) -> [T, H, D]`.
    """

    config: ModelConfig
    lm_head: nn.Module

    @property
    def decoder_layers(self) -> Sequence[DecoderLayer]:
        raise NotImplementedError

    def tie_weights(self) -> None:
        """Make the output head the token embedding itself, where the config says so."""
        raise NotImplementedError

    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """x [T, hidden_size], and what the layers need to know of the positions, if anything."""
        raise NotImplementedError

    def final_norm(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x, *rotary = self.embed(token_ids, positions)
        for i, layer in enumerate(self.decoder_layers):
            x = layer.after_attention(x, attend(i, *layer.before_attention(x, *rotary)))
        return self.final_norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)
