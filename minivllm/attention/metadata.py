"""What attention must know about a step: whose tokens are where, in the batch and in the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minivllm.attention.kv_cache import LayerKVCache


@dataclass(frozen=True)
class AttentionMetadata:
    """One flat batch of R requests and T tokens; prefill chunks and decodes look the same.

    Request r's queries are rows `query_start_loc[r]:query_start_loc[r + 1]` of the batch. They are the last of its
    `seq_lens[r]` tokens, all of which are in the cache by the time attention reads: token i of the request lies in
    block `block_tables[r, i // block_size]` at offset `i % block_size`. Unused table entries are 0, the null block.

    The plain lists are on the host, so that no backend asks the device for them.
    """

    slot_mapping: Tensor  # [T] int64: block_id * block_size + offset of each new token
    block_tables: Tensor  # [R, max_blocks] int64
    query_start_loc: list[int]  # R + 1
    seq_lens: list[int]  # R


class AttentionBackend(ABC):
    """Attention over pages: `plan` once a step, then `forward` in each layer.

    Scores are scaled by 1 / sqrt(D). Each query sees its own token and all before it. H is a multiple of H_kv, and
    query head h reads KV head h // (H / H_kv) (grouped-query attention).
    """

    def plan(self, metadata: AttentionMetadata, num_heads: int, cache: LayerKVCache) -> Any:
        """What all layers of the step share; `cache` is any layer's, for its sizes."""
        return metadata

    @abstractmethod
    def forward(self, query: Tensor, cache: LayerKVCache, plan: Any) -> Tensor:
        """query [T, H, D] -> [T, H, D]."""

    def __call__(self, query: Tensor, cache: LayerKVCache, metadata: AttentionMetadata) -> Tensor:
        """A single layer by itself: plan and forward."""
        return self.forward(query, cache, self.plan(metadata, query.shape[1], cache))
