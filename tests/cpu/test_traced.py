"""A traced model gives the model's results, for any number of tokens and any way to attend."""

from __future__ import annotations

import pytest
import torch
from helpers.checkpoints import build, our_logits, token_ids
from test_logits_match_transformers import CONFIGS

from minivllm.cpu import packed_linear, paged_decode, torchscript, traced
from minivllm.cpu.packed_linear import pack_weights
from minivllm.cpu.traced import TracedModel, trace_pieces
from minivllm.loading.weights import load_model


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-biases-head-dim-tied", "qwen2", "qwen3", "yarn"])
@pytest.mark.parametrize("packed", [False, True])
def test_same_logits(name, packed, tmp_path):
    build(CONFIGS[name]).save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    expected = {n: our_logits(model, token_ids(n)) for n in (1, 2, 7, 60)}
    if packed:
        pack_weights(model, min_bytes=0)
    recorded = trace_pieces(model)
    assert isinstance(recorded, TracedModel)
    with torch.inference_mode():
        for n, logits in expected.items():
            assert (our_logits(recorded, token_ids(n)) - logits).abs().max() <= 1e-5 * logits.abs().max()


def test_a_recording_with_other_results_is_not_used(tmp_path, monkeypatch):
    build(CONFIGS["gpt2"]).save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    right = traced.TracedModel.forward
    monkeypatch.setattr(traced.TracedModel, "forward", lambda self, *inputs: right(self, *inputs) * 1.001)
    assert trace_pieces(model) is model


def test_with_the_pinned_torch_everything_is_compiled():
    assert isinstance(paged_decode._attend, torch.jit.ScriptFunction)
    assert isinstance(packed_linear._packed_product, torch.jit.ScriptFunction)


def test_one_layer(tmp_path):
    config = type(CONFIGS["gpt2"])(**CONFIGS["gpt2"].to_dict() | {"n_layer": 1})
    build(config).save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    expected = our_logits(model, token_ids())
    with torch.inference_mode():
        torch.testing.assert_close(our_logits(trace_pieces(model), token_ids()), expected, atol=1e-5, rtol=1e-5)


def test_the_parameters_are_the_models(tmp_path):
    build(CONFIGS["llama"]).save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    recorded = trace_pieces(model)
    assert {id(p) for p in recorded.parameters()} == {id(p) for p in model.parameters()}


def test_without_torchscript_the_model_stays_as_it_is(tmp_path, monkeypatch):
    build(CONFIGS["gpt2"]).save_pretrained(tmp_path)
    model = load_model(tmp_path).model

    class FrontendError(Exception):
        """TorchScript's own errors are of many kinds, and no kind of RuntimeError."""

    def gone(*_args, **_kwargs):
        raise FrontendError

    monkeypatch.setattr(traced, "_RECORDINGS", {})
    monkeypatch.setattr(torch.jit, "trace", gone)
    monkeypatch.setattr(traced, "_RECORDINGS", {})
    monkeypatch.setattr(torch.jit, "script", gone)
    assert traced.trace_pieces(model) is model
    assert torchscript.script(gone) is gone
