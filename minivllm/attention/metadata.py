"""What attention must know about a step: whose tokens are where, in the batch and in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass
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
    # What a backend works out at the first layer for all others; the fields above must not change after that.
    plan: Any = field(default=None, init=False, repr=False, compare=False)


class AttentionBackend(Protocol):
    """`backend(query [T, H, D], kv_cache [2, num_blocks, block_size, H_kv, D], metadata) -> [T, H, D]`.

    Scores are scaled by 1 / sqrt(D). Each query sees its own token and all before it. H is a multiple of H_kv, and
    query head h reads KV head h // (H / H_kv) (grouped-query attention).
    """

    def __call__(self, query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor: ...


def write_kv(kv_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Put the step's keys and values [T, H_kv, D] into one layer's cache [2, num_blocks, block_size, H_kv, D].

    This comes before any read of the step: a request may hit a block that another request fills in this very step.
    """
    keys, values = kv_cache.flatten(1, 2).unbind(0)  # views, [num_blocks * block_size, H_kv, D]
    keys.index_copy_(0, slot_mapping, key)
    values.index_copy_(0, slot_mapping, value)
