"""Blocks of a model with several kinds of layers, as vLLM cuts them; figures of real logs are in test_public_cases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.theory import GIB, find_model, list_models, sizing
from minivllm.theory.kv_layout import kv_layout, layer_groups

models = st.sampled_from(list_models())
tokens = st.integers(1, 200_000)
block_sizes = st.sampled_from([1, 16, 32, 256])


@given(models, tokens, block_sizes, st.integers(1, 20_000))
def test_a_request_gets_what_it_needs(model, n, block_size, in_flight):
    layout = kv_layout(model, block_size=block_size)
    assert layout.bytes_per_request(n, in_flight) >= sizing.kv_bytes_per_request(model, n)
    assert layout.bytes_per_request(n + 1, in_flight) >= layout.bytes_per_request(n, in_flight)


@given(models, tokens, st.sampled_from([1, 16, 32]))
def test_exact_where_every_layer_keeps_every_token(model, n, block_size):
    if set(model.layer_types) == {"full_attention"}:
        layout = kv_layout(model, block_size=block_size)
        stored = -(-n // block_size) * block_size
        assert layout.bytes_per_request(n) == stored * sizing.kv_bytes_per_token(model)
        assert layout.num_blocks(5 * GIB) == sizing.num_kv_blocks(5 * GIB, sizing.kv_bytes_per_token(model), block_size)


@given(models, st.floats(1e6, 1e12), block_sizes)
def test_the_pool_never_exceeds_the_budget(model, budget, block_size):
    layout = kv_layout(model, block_size=block_size)
    blocks = layout.num_blocks(budget)
    assert blocks * layout.block_bytes <= budget < (blocks + 1) * layout.block_bytes


@given(models, st.integers(0, 500_000), st.integers(1, 20_000))
def test_the_longest_request_is_the_longest(model, num_blocks, in_flight):
    layout = kv_layout(model)
    n = layout.longest_request(num_blocks, 1_000_000, in_flight)
    assert n == 0 or layout.blocks_per_request(n, in_flight) <= num_blocks
    assert n == 1_000_000 or layout.blocks_per_request(n + 1, in_flight) > num_blocks


@given(models, st.data())
def test_tp_loses_no_token(model, data):
    """Twice the GPUs hold at least as many blocks in the same budget each."""
    tp = data.draw(st.sampled_from(list(sizing.possible_tp(model))))
    assert kv_layout(model, tp=tp).block_bytes <= kv_layout(model).block_bytes


def test_groups():
    assert layer_groups(find_model("qwen2.5-7b")) == {"full_attention": 1}
    assert layer_groups(find_model("mistral-7b")) == {"sliding_attention": 1}
    assert layer_groups(find_model("gpt-oss-20b")) == {"full_attention": 1, "sliding_attention": 1}
    assert layer_groups(find_model("gemma-3-27b")) == {"full_attention": 1, "sliding_attention": 6}  # 52 / 10
    assert layer_groups(find_model("qwen3.5-27b")) == {"full_attention": 1, "linear_attention": 3}


def test_windows_hold_what_is_in_flight():
    """gpt-oss-120b, vllm#27508: 4.54 GiB for 131,072 tokens; 8,192 + 73 blocks of 18 layers. And two steps of 2,048."""
    layout = kv_layout(find_model("gpt-oss-120b"))
    assert layout.blocks_per_request(131_072, 1024) == 8192 + 73
    assert layout.bytes_per_request(131_072, 1024) / GIB == pytest.approx(4.54, abs=0.005)
    gemma = kv_layout(find_model("gemma-3-27b"))
    assert gemma.blocks_per_request(32_768, 4096) == 2048 + 6 * (320 + 1)
    assert gemma.blocks_per_request(10, 4096) == 1 + 6 * 2


def test_a_state_makes_the_block_longer():
    """The sizes that vLLM logs as "Setting attention block size to N tokens"."""
    small, large = find_model("qwen3.5-35b-a3b"), find_model("qwen3.5-27b")
    assert kv_layout(small).block_size == 1056
    assert kv_layout(small, "fp8").block_size == 2096
    assert kv_layout(large, "fp8", tp=2).block_size == 1568
    assert kv_layout(large, block_size=4096).block_size == 4096
    state = sizing.state_bytes_per_layer(small)
    page = 1056 * sizing.kv_bytes_per_token_and_layer(small)
    assert page / state - 1 == pytest.approx(0.0076, abs=5e-5)  # "Padding mamba page size by 0.76%"


def test_layers_of_two_shapes():
    """Gemma-4-31B on an L40S, a log of vLLM 0.23 (giantswarm/model-manager#149): what one request needs, and with
    7.25 GiB of cache "the estimated maximum model length is 8624"."""
    gemma = find_model("gemma-4-31b")
    layout = kv_layout(gemma)
    assert layout.block_sizes == {"full_attention": 32, "sliding_attention": 16}
    needs = {65_536: 12.04, 32_768: 9.54, 8_192: 6.89}
    for context, gib in needs.items():
        assert layout.bytes_per_request(context, 8192) / GIB == pytest.approx(gib, abs=0.005)
    least, most = (layout.longest_request(layout.num_blocks(gib * GIB) - 1, 262_144, 8192) for gib in (7.245, 7.255))
    assert least <= 8624 <= most
    assert kv_layout(gemma, tp=8).block_sizes == {"full_attention": 16, "sliding_attention": 16}  # 1 x 512, 2 x 256
    assert kv_layout(gemma, tp=16).block_sizes == {"full_attention": 16, "sliding_attention": 32}


def test_stages_take_the_widest_group():
    """Gemma-3-27B on three stages: 21, 21 and 20 layers, 18 of the first with windows in 6 groups."""
    layout = kv_layout(find_model("gemma-3-27b"), pp=3)
    assert layout.num_groups == {"full_attention": 1, "sliding_attention": 6}
    assert layout.block_bytes == 4 * 16 * 8192
