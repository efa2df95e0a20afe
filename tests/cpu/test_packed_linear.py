"""Packed linear layers: the same results, the same memory, and nothing where they cannot work."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers.checkpoints import our_logits, token_ids
from torch import nn

from minivllm.cpu import packed_linear
from minivllm.cpu.fused import fuse
from minivllm.cpu.packed_linear import FILLED_UP_ROWS, PackedLinear, can_pack, pack_weights
from minivllm.loading.weights import load_model
from minivllm.model_config import ModelConfig
from minivllm.models.layers import Conv1D

pytestmark = pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.float32), reason="this PyTorch cannot pack")


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33, 257, 1025])
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (576, 1536), (1000, 37), (1, 1), (3, 700)])
@pytest.mark.parametrize("bias", [False, True])
def test_within_1e5_of_plain(rows, out_features, in_features, bias):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator)
    b = torch.randn(out_features, generator=generator) if bias else None
    expected = F.linear(x, weight, b)
    out = PackedLinear(weight, b)(x)
    assert out.shape == expected.shape and out.dtype == torch.float32
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("rows", [1, 3, 4, 5])
def test_few_rows_filled_up(rows):
    """On some processors four rows are faster than one; what the rows hold must not reach the result."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((rows, 576), (960, 576), (960,)))
    layer = PackedLinear(weight, bias)
    layer.min_rows = FILLED_UP_ROWS
    expected = F.linear(x, weight, bias)
    out = layer(x)
    assert out.shape == expected.shape
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("seconds", "min_rows"), [({1: 3, 2: 3, 4: 2}, 4), ({1: 2, 2: 3, 4: 2}, 1), ({1: 1, 2: 1, 4: 1}, 1)]
)
def test_filled_up_only_where_it_is_faster(seconds, min_rows, monkeypatch):
    """A clock that goes forward by what a product of so many rows is said to take."""
    clock = [0.0]
    monkeypatch.setattr(packed_linear.time, "perf_counter", lambda: clock[0])

    class Layer:
        in_features = 8

        def __call__(self, x):
            clock[0] += seconds[len(x)]

    assert packed_linear.fastest_min_rows(Layer()) == min_rows


def test_leading_dimensions_are_not_filled_up():
    layer = PackedLinear(torch.randn(32, 64), None)
    x = torch.randn(2, 5, 64)
    expected = layer(x)
    layer.min_rows = FILLED_UP_ROWS
    assert torch.equal(layer(x), expected) and layer(x[:1, :1]).shape == (1, 1, 32)


def test_other_layers_stay():
    """A subclass may do more than multiply; and one dtype that cannot be packed leaves all as they are."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(64, 64), nn.Linear(64, 64))
    assert pack_weights(model, min_bytes=0) == 1 and type(model[0]) is Scaled
    mixed = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.bfloat16))
    assert pack_weights(mixed, min_bytes=0) == 0 and type(mixed[0]) is nn.Linear


def gpt2_config(**changes) -> ModelConfig:
    sizes = {"vocab_size": 99, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 4}
    return ModelConfig.from_hf({"model_type": "gpt2"} | sizes | changes)


def test_a_whole_model():
    model = load_model(gpt2_config()).model
    expected = our_logits(model, token_ids())
    embedding = model.wte.weight
    assert pack_weights(model, min_bytes=0) == 2 * 4 + 1
    assert not any(isinstance(layer, (nn.Linear, Conv1D)) for layer in model.modules())
    assert model.wte.weight is embedding  # tied to the output matrix, which is a packed copy now
    assert (our_logits(model, token_ids()) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert pack_weights(model, min_bytes=0) == 0  # nothing is left to do


def test_never_more_than_one_matrix_is_there_twice(monkeypatch):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    originals = [weakref.ref(layer.weight) for layer in model]
    alive = []

    class Watched(PackedLinear):
        def __init__(self, weight, bias):
            alive.append(sum(ref() is not None for ref in originals))
            super().__init__(weight, bias)

    monkeypatch.setattr(packed_linear, "PackedLinear", Watched)
    alive.clear()
    pack_weights(model, min_bytes=1)
    assert alive[-6:] == [6, 5, 4, 3, 2, 1]
    assert not any(ref() for ref in originals)


def test_merged_layers_are_packed_too():
    """A Llama's products: q, k and v; output; gate and up; down; and the head."""
    sizes = {"vocab_size": 99, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    model = load_model(ModelConfig.from_hf({"model_type": "llama"} | sizes | heads)).model
    fuse(model)
    assert pack_weights(model, min_bytes=0) == 2 * 4 + 1


def test_small_layers_stay():
    model = load_model(gpt2_config(vocab_size=8192)).model  # 1.5 MiB of embedding, and layers of a few KiB
    assert pack_weights(model) == 1 and isinstance(model.lm_head, PackedLinear)


@pytest.mark.parametrize("why", ["bfloat16", "no oneDNN", "no operator", "wrong results"])
def test_nothing_changes_where_it_cannot_work(why, monkeypatch):
    model = load_model(gpt2_config(), dtype="bfloat16" if why == "bfloat16" else "float32").model
    if why == "no oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    elif why == "no operator":
        monkeypatch.setattr(packed_linear, "PackedLinear", lambda *_: torch.ops.mkldnn.no_such_operator)
    elif why == "wrong results":
        monkeypatch.setattr(packed_linear, "PackedLinear", lambda weight, bias: lambda x: F.linear(x, weight))
    before = list(model.modules())
    assert pack_weights(model, min_bytes=0) == 0 and list(model.modules()) == before
