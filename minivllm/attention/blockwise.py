"""Attention one block at a time, with a running maximum and a running sum: how a paged kernel works.

Softmax needs the largest score and the sum of all exponentials, which a pass over blocks does not know yet. So it
keeps three things per query and corrects them whenever a block brings a larger maximum ("online softmax",
Milakov & Gimelshein 2018; FlashAttention and the PagedAttention kernel do the same):

    m   the largest score so far
    l   the sum of exp(score - m) so far
    acc the sum of exp(score - m) * value so far

A block with maximum m_b changes m to m' = max(m, m_b); what was summed under the old maximum is multiplied by
exp(m - m'). At the end acc / l is the softmax-weighted sum, with no gathered copy of the cache anywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minivllm.attention.kv_cache import LayerKVCache
from minivllm.attention.metadata import AttentionBackend, AttentionMetadata
from minivllm.units import cdiv


class BlockwiseBackend(AttentionBackend):
    """Computes in float32 whatever the cache holds."""

    def forward(self, query: Tensor, cache: LayerKVCache, plan: AttentionMetadata) -> Tensor:
        output = torch.empty_like(query)
        for r, seq_len in enumerate(plan.seq_lens):
            start, end = plan.query_start_loc[r : r + 2]
            output[start:end] = attend_one(query[start:end], cache, plan.block_tables[r], seq_len)
        return output


def attend_one(query: Tensor, cache: LayerKVCache, block_table: Tensor, seq_len: int) -> Tensor:
    """The last `len(query)` of one request's `seq_len` tokens attend to its pages: [q, H, D] -> [q, H, D]."""
    num_queries, num_heads, head_dim = query.shape
    block_size, num_kv_heads = cache.block_size, cache.num_kv_heads
    # Query heads that share a KV head sit side by side: [H_kv, group * q, D].
    q = (
        query.float()
        .view(num_queries, num_kv_heads, -1, head_dim)
        .permute(1, 2, 0, 3)
        .reshape(num_kv_heads, -1, head_dim)
    )
    q = q / math.sqrt(head_dim)
    query_positions = torch.arange(seq_len - num_queries, seq_len, device=query.device)
    query_positions = query_positions.repeat(num_heads // num_kv_heads)

    m = q.new_full((*q.shape[:2], 1), -math.inf)
    l = torch.zeros_like(m)  # noqa: E741 - the literature's name
    acc = torch.zeros_like(q)
    for i, block_id in enumerate(block_table[: cdiv(seq_len, block_size)].tolist()):
        first = i * block_size
        filled = min(block_size, seq_len - first)  # the last block is usually not full
        k, v = (x.float().transpose(0, 1) for x in cache.read_block(block_id, filled))  # each [H_kv, filled, D]
        scores = q @ k.transpose(1, 2)  # [H_kv, group * q, filled]
        future = torch.arange(first, first + filled, device=q.device) > query_positions[:, None]
        scores = scores.masked_fill(future, -math.inf)

        m_new = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
        # The first block always holds position 0, which every query sees, so m_new is finite from the start.
        correction = torch.exp(m - m_new)
        p = torch.exp(scores - m_new)
        l = l * correction + p.sum(dim=-1, keepdim=True)  # noqa: E741
        acc = acc * correction + p @ v
        m = m_new
    out = (acc / l).view(num_kv_heads, -1, num_queries, head_dim).permute(2, 0, 1, 3)
    return out.reshape(num_queries, num_heads, head_dim).to(query.dtype)
