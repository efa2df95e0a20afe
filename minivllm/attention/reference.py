"""Gather each request's pages into one row, then attend as any textbook does. Slow, plain, and the oracle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minivllm.attention.kv_cache import LayerKVCache
from minivllm.attention.metadata import AttentionBackend, AttentionMetadata
from minivllm.units import cdiv


class ReferenceBackend(AttentionBackend):
    """Computes in float32 whatever the cache holds."""

    def forward(self, query: Tensor, cache: LayerKVCache, plan: AttentionMetadata) -> Tensor:
        head_dim = query.shape[-1]
        group = query.shape[1] // cache.num_kv_heads
        output = torch.empty_like(query)
        for r, seq_len in enumerate(plan.seq_lens):
            start, end = plan.query_start_loc[r : r + 2]
            table = plan.block_tables[r, : cdiv(seq_len, cache.block_size)]
            keys, values = (x.float() for x in cache.read(table, seq_len))  # [L, H_kv, D]
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))  # [L, H, D]

            scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) / math.sqrt(head_dim)
            positions = torch.arange(seq_len, device=query.device)
            future = positions[None, :] > positions[seq_len - (end - start) :, None]  # [q, k]
            probs = scores.masked_fill(future, -math.inf).softmax(dim=-1)
            output[start:end] = torch.einsum("hqk,khd->qhd", probs, values).to(query.dtype)
        return output
