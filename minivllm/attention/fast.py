"""The default: all decodes of a step in one batched call, each prefill chunk in one of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.metadata import AttentionMetadata


def paged_attention(query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
    """See `AttentionBackend`."""
    output = torch.empty_like(query)
    decodes = [r for r in range(metadata.num_reqs) if metadata.query_len(r) == 1]
    if decodes:
        rows = [metadata.query_start_loc[r] for r in decodes]
        if len(decodes) == metadata.num_reqs:
            output = _decode(query, kv_cache, metadata.block_tables, metadata.seq_lens)
        else:
            output[rows] = _decode(
                query[rows], kv_cache, metadata.block_tables[decodes], [metadata.seq_lens[r] for r in decodes]
            )
    for r, seq_len in enumerate(metadata.seq_lens):
        if metadata.query_len(r) > 1:
            start, end = metadata.query_start_loc[r : r + 2]
            output[start:end] = _prefill_chunk(query[start:end], kv_cache, metadata.block_tables[r], seq_len)
    return output


def _decode(query: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: list[int]) -> Tensor:
    """One query per request, [R, H, D]: the tables are gathered side by side, the tails masked."""
    num_reqs, num_heads, head_dim = query.shape
    block_size, num_kv_heads = kv_cache.shape[2:4]
    longest = max(seq_lens)
    tables = block_tables[:, : -(-longest // block_size)]
    keys, values = (pages[tables].flatten(1, 2).transpose(1, 2) for pages in kv_cache)  # [R, H_kv, L, D]
    # The query heads of one KV head take the place of query positions, so K/V are not repeated for them.
    q = query.view(num_reqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = None
    if min(seq_lens) < keys.shape[2]:
        lens = torch.tensor(seq_lens, device=query.device)
        mask = (torch.arange(keys.shape[2], device=query.device) < lens[:, None])[:, None, None, :]
        # Slots behind the end hold what another request left there. A weight of 0 hides any number but NaN and
        # infinity, so an overflow over there would show up here.
        keys.masked_fill_(~mask.transpose(2, 3), 0)
        values.masked_fill_(~mask.transpose(2, 3), 0)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).reshape(num_reqs, num_heads, head_dim)


def _prefill_chunk(query: Tensor, kv_cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """The last `len(query)` tokens of one request, [q, H, D]."""
    num_queries = query.shape[0]
    block_size, num_kv_heads = kv_cache.shape[2:4]
    table = block_table[: -(-seq_len // block_size)]
    keys, values = (pages[table].flatten(0, 1)[:seq_len].transpose(0, 1)[None] for pages in kv_cache)
    q = query.transpose(0, 1)[None]  # [1, H, q, D]
    gqa = query.shape[1] != num_kv_heads
    if num_queries == seq_len:
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=gqa)
    else:
        # Query i is token seq_len - q + i: the causal triangle is aligned at the bottom right.
        mask = torch.ones(num_queries, seq_len, dtype=torch.bool, device=query.device)
        mask = mask.tril(diagonal=seq_len - num_queries)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=gqa)
    return out[0].transpose(0, 1)
