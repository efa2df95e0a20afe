"""Gather each request's pages into one row, then attend as any textbook does. Slow, plain, and the oracle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minivllm.attention.metadata import AttentionMetadata


def paged_attention(query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
    """See `AttentionBackend`; computes in float32 whatever the cache holds."""
    block_size, num_kv_heads, head_dim = kv_cache.shape[2:]
    group = query.shape[1] // num_kv_heads
    output = torch.empty_like(query)
    for r, seq_len in enumerate(metadata.seq_lens):
        start, end = metadata.query_start_loc[r : r + 2]
        table = metadata.block_tables[r, : -(-seq_len // block_size)]
        keys, values = (pages[table].flatten(0, 1)[:seq_len].float() for pages in kv_cache)  # [L, H_kv, D]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))  # [L, H, D]

        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) / math.sqrt(head_dim)
        positions = torch.arange(seq_len, device=query.device)
        future = positions[None, :] > positions[seq_len - (end - start) :, None]  # [q, k]
        probs = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", probs, values).to(query.dtype)
    return output
