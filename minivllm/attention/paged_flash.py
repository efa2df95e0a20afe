"""Attention on a GPU that reads the pages where they lie: FlashAttention with a block table, as PyTorch brings it.

One call for the whole flat batch, prefill chunks and decodes alike. It takes 16-bit numbers, on GPUs from Ampere on.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from minivllm.attention.kv_cache import LayerKVCache
from minivllm.attention.metadata import AttentionMetadata


class PagedFlash:
    """The plan of one step."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        tables, starts = metadata.block_tables, metadata.query_start_loc
        self.block_table = tables.to(torch.int32)
        self.cu_seq_q = torch.tensor(starts, dtype=torch.int32, device=tables.device)
        self.seqused_k = torch.tensor(metadata.seq_lens, dtype=torch.int32, device=tables.device)
        self.cu_seq_k = torch.nn.functional.pad(self.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
        self.max_q = max(end - start for start, end in itertools.pairwise(starts))
        self.max_k = max(metadata.seq_lens)

    def __call__(self, query: Tensor, cache: LayerKVCache) -> Tensor:
        """[T, H, D] -> [T, H, D]."""
        from torch.nn.attention.varlen import varlen_attn

        keys, values = cache.pages  # [num_blocks, block_size, H_kv, D]
        return varlen_attn(  # type: ignore[return-value]  # a pair only where a second result is asked for
            query,
            keys,
            values,
            self.cu_seq_q,
            self.cu_seq_k,
            self.max_q,
            self.max_k,
            window_size=(-1, 0),  # all before, none behind
            enable_gqa=query.shape[1] != cache.num_kv_heads,
            seqused_k=self.seqused_k,
            block_table=self.block_table,
        )

    @staticmethod
    def can_run(cache: LayerKVCache) -> bool:
        """Whether this GPU and PyTorch take pages of this size and dtype, by a small trial."""
        is_16_bit = cache.dtype in (torch.float16, torch.bfloat16)
        return cache.device.type == "cuda" and is_16_bit and _trial(cache.block_size, cache.head_dim, cache.dtype)


@functools.cache
def _trial(block_size: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Two requests, a decode and a chunk, of equal keys: attention must give the mean of the values that they see."""
    try:
        pages = torch.zeros(2, 4, block_size, 1, head_dim, dtype=dtype, device="cuda")
        pages[1, 1], pages[1, 3] = 1.0, 2.0
        tables = torch.tensor([[3, 1], [1, 0]], device="cuda")
        lens = [block_size + 1, min(2, block_size)]
        metadata = AttentionMetadata(torch.empty(0, device="cuda"), tables, [0, 1, 1 + lens[1]], lens)
        query = torch.zeros(1 + lens[1], 1, head_dim, dtype=dtype, device="cuda")
        got = PagedFlash(metadata)(query, LayerKVCache(pages))[:, 0, 0].float().cpu()
        expected = torch.tensor([(2 * block_size + 1) / (block_size + 1)] + [1.0] * lens[1])
        return bool((got - expected).abs().max() < 2e-2)
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError):
        return False  # no such function in this PyTorch, or not for this GPU or page size
