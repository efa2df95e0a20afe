"""The three ways to read pages agree, on any batch, and read nothing that is not theirs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.attention import BACKENDS, AttentionMetadata, LayerKVCache, get_backend

requests = st.lists(
    st.integers(1, 40).flatmap(lambda seq_len: st.tuples(st.just(seq_len), st.integers(1, seq_len))),
    min_size=1,
    max_size=6,
)


def make_case(
    lengths, block_size, num_kv_heads, group, head_dim, seed=0, dtype=torch.float32, poison=0.0, device="cpu"
):
    """Random K/V laid out in shuffled blocks. Returns (query, kv_cache, metadata, dense): dense is [(k, v)] per
    request. Every slot that no request owns holds `poison`."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 2 + sum(-(-seq_len // block_size) for seq_len, _ in lengths)
    free = iter((torch.randperm(num_blocks - 1, generator=generator) + 1).tolist())
    kv_cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), poison, dtype=dtype)
    max_blocks = max(-(-seq_len // block_size) for seq_len, _ in lengths)
    tables = torch.zeros(len(lengths), max_blocks, dtype=torch.int64)
    query_start_loc, slots, dense = [0], [], []
    for r, (seq_len, query_len) in enumerate(lengths):
        k, v = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=generator).to(dtype)
        dense.append((k, v))
        for i in range(-(-seq_len // block_size)):
            tables[r, i] = next(free)
        for position in range(seq_len):
            block, offset = tables[r, position // block_size].item(), position % block_size
            kv_cache[0, block, offset], kv_cache[1, block, offset] = k[position], v[position]
            if position >= seq_len - query_len:
                slots.append(block * block_size + offset)
        query_start_loc.append(query_start_loc[-1] + query_len)
    query = torch.randn(query_start_loc[-1], num_kv_heads * group, head_dim, generator=generator).to(dtype)
    metadata = AttentionMetadata(
        torch.tensor(slots, device=device), tables.to(device), query_start_loc, [seq_len for seq_len, _ in lengths]
    )
    return query.to(device), LayerKVCache(kv_cache.to(device)), metadata, dense


def dense_attention(query, metadata, dense):
    """Softmax attention written once more, token by token, in float64."""
    group = query.shape[1] // dense[0][0].shape[1]
    rows = []
    for r, (k, v) in enumerate(dense):
        start, end = metadata.query_start_loc[r : r + 2]
        for i in range(end - start):
            visible = len(k) - (end - start) + i + 1
            heads = []
            for h in range(query.shape[1]):
                scores = k[:visible, h // group].double() @ query[start + i, h].double() / math.sqrt(query.shape[2])
                heads.append(scores.softmax(0) @ v[:visible, h // group].double())
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=requests,
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_equal_to_dense_attention_with_poisoned_neighbours(backend, lengths, block_size, num_kv_heads, group, seed):
    query, kv_cache, metadata, dense = make_case(
        lengths, block_size, num_kv_heads, group, head_dim=8, seed=seed, poison=math.nan
    )
    out = get_backend(backend)(query, kv_cache, metadata)
    assert out.shape == query.shape and out.dtype == query.dtype
    torch.testing.assert_close(out.double(), dense_attention(query, metadata, dense), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", ["fast", "blockwise"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision_stays_near_the_reference(backend, dtype, tolerance):
    query, kv_cache, metadata, _ = make_case([(40, 1), (17, 17), (33, 5)], 4, 2, 3, 16, dtype=dtype)
    expected = get_backend("reference")(query, kv_cache, metadata)
    torch.testing.assert_close(get_backend(backend)(query, kv_cache, metadata), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend):
    query, kv_cache, metadata, dense = make_case([(40, 1), (17, 17)], 4, 1, 2, 8)
    query, kv_cache = query * 100, LayerKVCache(kv_cache.pages * 100)
    dense = [(k * 100, v * 100) for k, v in dense]
    out = get_backend(backend)(query, kv_cache, metadata)
    torch.testing.assert_close(out.double(), dense_attention(query, metadata, dense), atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_table_changes_the_result(backend):
    query, kv_cache, metadata, _ = make_case([(12, 1), (12, 1)], 4, 1, 1, 8)
    swapped = AttentionMetadata(
        metadata.slot_mapping, metadata.block_tables.flip(0), metadata.query_start_loc, metadata.seq_lens
    )
    attend = get_backend(backend)
    assert (attend(query, kv_cache, metadata) - attend(query, kv_cache, swapped)).abs().max() > 0.1


def test_write_touches_its_slots_only():
    kv_cache = torch.zeros(2, 4, 3, 2, 5)
    key, value = torch.randn(2, 2, 2, 5)
    LayerKVCache(kv_cache).write(key, value, torch.tensor([3 * 3 + 1, 1 * 3 + 2]))
    assert torch.equal(kv_cache[0, 3, 1], key[0]) and torch.equal(kv_cache[1, 1, 2], value[1])
    assert kv_cache.count_nonzero() == key.numel() + value.numel()


def test_unknown_backend_names_the_known_ones():
    with pytest.raises(ValueError, match="unknown attention backend 'flash'; there are fast, reference, blockwise"):
        get_backend("flash")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("backend", BACKENDS)
def test_cuda_equals_cpu(backend):
    lengths = [(40, 1), (17, 17), (33, 5), (9, 1)]
    expected = get_backend("reference")(*make_case(lengths, 4, 2, 3, 16)[:3])
    out = get_backend(backend)(*make_case(lengths, 4, 2, 3, 16, device="cuda")[:3])
    torch.testing.assert_close(out.cpu(), expected, atol=1e-4, rtol=1e-4)
