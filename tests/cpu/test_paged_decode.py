"""Decode attention in place: tiles, merging, ends of tiles, and what runs where it cannot."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_backends import dense_attention, make_case

from minivllm.attention import LayerKVCache, get_backend
from minivllm.cpu import paged_decode


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seq_lens=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    tile=st.sampled_from([1, 3, 4, 16]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([4, 8, 20]),
    scale=st.sampled_from([1.0, 100.0]),
)
def test_any_tile_gives_dense_attention(seq_lens, tile, block_size, num_kv_heads, group, head_dim, scale):
    lengths = [(seq_len, 1) for seq_len in seq_lens]
    query, kv_cache, metadata, dense = make_case(lengths, block_size, num_kv_heads, group, head_dim, poison=math.nan)
    query = query * scale
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_decode, "TILE", tile)
        out = paged_decode.Decode(metadata.block_tables, seq_lens, query.shape[1], kv_cache)(query, kv_cache)
    expected = dense_attention(query, metadata, dense)
    torch.testing.assert_close(out.double(), expected, atol=2e-6 * scale, rtol=1e-5)


def test_real_sizes():
    """SmolLM2's heads, at lengths on both sides of the tile's edges."""
    tile = paged_decode.TILE
    lengths = [(n, 1) for n in (1, tile - 1, tile, tile + 1, 2 * tile, 2 * tile + 1, 5 * tile, 700)]
    query, kv_cache, metadata, dense = make_case(lengths, 16, 3, 3, 64, poison=math.nan)
    assert paged_decode.can_run(kv_cache)
    out = get_backend("fast")(query, kv_cache, metadata)
    torch.testing.assert_close(out.double(), dense_attention(query, metadata, dense), atol=2e-6, rtol=1e-5)


def test_it_can_be_called_again():
    """One plan serves all layers, and what a call leaves in it counts for nothing."""
    query, kv_cache, metadata, dense = make_case([(300, 1), (9, 1)], 16, 1, 2, 8)
    decode = paged_decode.Decode(metadata.block_tables, metadata.seq_lens, query.shape[1], kv_cache)
    decode(query * 50, kv_cache)
    out = decode(query, kv_cache)
    torch.testing.assert_close(out.double(), dense_attention(query, metadata, dense), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("table", "seq_len", "message"),
    [
        ([0, 2], 7, "names block 2, but the cache has 2 blocks"),
        ([0, -1], 7, "but the cache has 2 blocks"),
        ([0, 1, 1], 9, "9 tokens of one request do not lie in 2 blocks of 4"),
    ],
)
def test_a_table_out_of_the_cache_is_refused(table, seq_len, message):
    with pytest.raises(IndexError, match=message):
        paged_decode.Decode(torch.tensor([table]), [seq_len], 1, LayerKVCache(torch.zeros(2, 2, 4, 1, 8)))


@pytest.mark.parametrize("why", ["dtype", "no products"])
def test_the_gathered_way_runs_where_this_one_cannot(why, monkeypatch):
    dtype = torch.float64 if why == "dtype" else torch.float32
    query, kv_cache, metadata, dense = make_case(
        [(40, 1), (17, 17), (33, 1)], 4, 2, 3, 16, dtype=dtype, poison=math.nan
    )
    if why == "no products":

        def missing(*_args, **_kwargs):
            raise RuntimeError("not compiled with sparse products")

        monkeypatch.setattr(paged_decode, "_attend", missing)
        paged_decode._has_sparse_products.cache_clear()
        monkeypatch.setattr(paged_decode, "_has_sparse_products", paged_decode._has_sparse_products.__wrapped__)
    assert not paged_decode.can_run(kv_cache)
    out = get_backend("fast")(query, kv_cache, metadata)
    torch.testing.assert_close(out.double(), dense_attention(query, metadata, dense), atol=2e-6, rtol=1e-5)
