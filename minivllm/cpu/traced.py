"""A model without Python between its attentions.

At batch 1 a step of SmolLM2 is about 1,500 operations, and half of the time that they add to the matrix products is
Python. Between two attentions nothing depends on the request, so each such piece is recorded once, and then runs
without. vLLM cuts a model at the same places when it compiles it ("piecewise"), with attention left out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.cpu.torchscript import trace
from minivllm.model_config import ModelConfig
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


def _weights(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


@contextlib.contextmanager
def _weights_replaced(module: nn.Module, tensors: Sequence[Tensor]) -> Iterator[None]:
    """The module with other weights, in the order of `_weights`. (torch.func.functional_call refuses to be traced.)"""
    places: list[tuple[dict[str, Any], str]]
    places = [(layer._parameters, name) for layer in module.modules() for name in layer._parameters]
    places += [(layer._buffers, name) for layer in module.modules() for name in layer._buffers]
    places = [(owner, name) for owner, name in places if owner[name] is not None]
    before = [owner[name] for owner, name in places]
    try:
        for (owner, name), tensor in zip(places, tensors, strict=True):
            owner[name] = tensor
        yield
    finally:
        for (owner, name), tensor in zip(places, before, strict=True):
            owner[name] = tensor


def _form(module: nn.Module) -> tuple:
    """What two pieces must share to share a recording: their modules, shapes and settings, not their weights."""
    layers = [(name, type(layer), getattr(layer, "min_rows", None)) for name, layer in module.named_modules()]
    return *layers, *((weight.shape, weight.dtype) for weight in _weights(module))


def _record(config: ModelConfig, module: nn.Module, *inputs: Tensor) -> Callable[..., Any]:
    """A recording of what `module` does to `inputs`, with its weights.

    Layers are alike but for their weights, so one recording that takes these as inputs serves them all, and all models
    of that form: PyTorch never gives a recording's memory back.
    """
    weights = _weights(module)
    key = (config, _form(module))
    if key not in _RECORDINGS:

        def run(*tensors: Tensor) -> Any:
            with _weights_replaced(module, tensors[: len(weights)]):
                return module(*tensors[len(weights) :])

        _RECORDINGS[key] = trace(run, *weights, *inputs)
    return functools.partial(_RECORDINGS[key], *weights)


_RECORDINGS: dict[tuple, Callable[..., Any]] = {}  # a cache, the only state here


class TracedModel(CausalLM):
    """`model`, recorded piece by piece. Its parameters are those of `model`, under `model.`; so are its results."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.config, self.model, self.lm_head = model.config, model, model.lm_head
        self.embed, self.final_norm = model.embed, model.final_norm  # type: ignore[method-assign]  # no call between
        layers = model.decoder_layers
        ids = torch.zeros(2, dtype=torch.int64, device="cpu")
        x, *rotary = model.embed(ids, ids)
        before = _record(model.config, _Before(layers[0]), x, *rotary)
        heads, _, _ = before(x, *rotary)
        between = [_record(model.config, _Between(*pair), x, heads, *rotary) for pair in itertools.pairwise(layers)]
        after = _record(model.config, _After(layers[-1]), x, heads)
        self.pieces = (before, between, after)

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
