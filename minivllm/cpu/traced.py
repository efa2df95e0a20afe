"""A model without Python between its attentions.

At batch 1 a step of SmolLM2 is about 1,500 operations, and half of the time that they add to the matrix products is
Python. Between two attentions nothing depends on the request, so each such piece is recorded once, and then runs
without. vLLM cuts a model at the same places when it compiles it ("piecewise"), with attention left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minivllm.cpu.torchscript import trace
from minivllm.models.causal_lm import CausalLM, DecoderLayer
from minivllm.models.layers import Attend


class _Before(nn.Module):
    """The first layer up to its attention."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer.before_attention(x, *rotary)


class _Between(nn.Module):
    """From one attention to the next."""

    def __init__(self, layer: DecoderLayer, following: DecoderLayer) -> None:
        super().__init__()
        self.layer, self.following = layer, following

    def forward(self, x: Tensor, heads: Tensor, *rotary: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.layer.after_attention(x, heads)
        return x, *self.following.before_attention(x, *rotary)


class _After(nn.Module):
    """The last layer from its attention on."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, heads: Tensor) -> Tensor:
        return self.layer.after_attention(x, heads)


class TracedModel(CausalLM):
    """`model`, recorded piece by piece. Its parameters are those of `model`, under `model.`; so are its results."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.config, self.model, self.lm_head = model.config, model, model.lm_head
        self.embed, self.final_norm = model.embed, model.final_norm  # type: ignore[method-assign]  # no call between
        layers = model.decoder_layers
        ids = torch.zeros(2, dtype=torch.int64, device="cpu")
        x, *rotary = model.embed(ids, ids)
        before = trace(_Before(layers[0]), x, *rotary)
        heads, _, _ = before(x, *rotary)
        between = [trace(_Between(*pair), x, heads, *rotary) for pair in itertools.pairwise(layers)]
        # A tuple: as submodules, the pieces would list every parameter once more.
        self.pieces = (before, between, trace(_After(layers[-1]), x, heads))

    @property
    def decoder_layers(self) -> Sequence[DecoderLayer]:
        return self.model.decoder_layers

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        before, between, after = self.pieces
        x, *rotary = self.embed(token_ids, positions)
        q, k, v = before(x, *rotary)
        for i, piece in enumerate(between):
            x, q, k, v = piece(x, attend(i, q, k, v), *rotary)
        return self.final_norm(after(x, attend(len(between), q, k, v)))


@torch.inference_mode()
def trace_pieces(model: CausalLM) -> CausalLM:
    """A `TracedModel` of `model` on a CPU; `model` itself elsewhere, and where this PyTorch cannot record it or gets
    other results with the recording."""
    if next(model.parameters()).device.type != "cpu":
        return model
    try:
        traced = TracedModel(model)
        ids = torch.arange(3, device="cpu")  # another number of tokens than it was recorded with
        expected, got = (m(ids, ids, _values_of_first_head) for m in (model, traced))
        tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
        return traced if (got - expected).abs().max() <= tolerance * expected.abs().max() else model
    except Exception:  # whatever a PyTorch or Python that it does not fit raises: the model works without it
        return model


def _values_of_first_head(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """For the trial: no attention, but something of each input, in the right shape."""
    return q + k[:, :1] + v[:, :1]
