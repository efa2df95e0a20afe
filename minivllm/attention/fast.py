"""The default: all decodes of a step together, each prefill chunk by itself.

A prefill chunk has much to compute per key, so its pages are gathered and a dense attention runs over them. A decode
has one query per request, reads every key and value for it, and computes next to nothing: there a copy of the pages
would cost more than the attention. See `paged_decode` for how it goes without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.kv_cache import LayerKVCache
from minivllm.attention.metadata import AttentionBackend, AttentionMetadata
from minivllm.attention.paged_flash import PagedFlash
from minivllm.cpu import paged_decode
from minivllm.units import cdiv


class FastBackend(AttentionBackend):
    """`in_place`: decodes on a CPU read the pages where they lie."""

    def __init__(self, in_place: bool = True) -> None:
        self.in_place = in_place

    def plan(
        self, metadata: AttentionMetadata, num_heads: int, cache: LayerKVCache
    ) -> Callable[[Tensor, LayerKVCache], Tensor]:
        """The attention of the step itself, for any layer: (query [T, H, D], cache) -> [T, H, D]."""
        if PagedFlash.can_run(cache):
            return PagedFlash(metadata)
        starts, seq_lens = metadata.query_start_loc, metadata.seq_lens
        chunks, decodes = [], []
        for r, seq_len in enumerate(seq_lens):
            start, end = starts[r], starts[r + 1]
            if end - start == 1:
                decodes.append(r)
            else:
                chunks.append(_PrefillChunk(start, end, seq_len, metadata.block_tables[r], cache.block_size))
        if not decodes:
            return chunks[0] if len(chunks) == 1 else _Mixed(chunks, None, None)
        tables, lens, rows = metadata.block_tables, seq_lens, None
        if chunks:
            tables, lens = tables[decodes], [seq_lens[r] for r in decodes]
            rows = torch.tensor([starts[r] for r in decodes], device=tables.device)
        decode: paged_decode.Decode | _GatheredDecode
        if self.in_place and paged_decode.can_run(cache):
            decode = paged_decode.Decode(tables, lens, num_heads, cache)
        else:
            decode = _GatheredDecode(tables, lens, cache.block_size)
        return _Mixed(chunks, rows, decode) if chunks else decode

    def forward(self, query: Tensor, cache: LayerKVCache, plan: Callable[[Tensor, LayerKVCache], Tensor]) -> Tensor:
        return plan(query, cache)


@dataclass
class _Mixed:
    """Prefill chunks, each by itself, beside the decodes."""

    chunks: list[_PrefillChunk]
    decode_rows: Tensor | None  # rows of the batch
    decode: paged_decode.Decode | _GatheredDecode | None

    def __call__(self, query: Tensor, cache: LayerKVCache) -> Tensor:
        output = torch.empty_like(query)
        if self.decode is not None:
            output[self.decode_rows] = self.decode(query[self.decode_rows], cache)
        for chunk in self.chunks:
            output[chunk.start : chunk.end] = chunk(query[chunk.start : chunk.end], cache)
        return output


class _PrefillChunk:
    """The last `end - start` of one request's `seq_len` tokens; rows `start:end` of the batch."""

    def __init__(self, start: int, end: int, seq_len: int, block_table: Tensor, block_size: int) -> None:
        self.start, self.end, self.seq_len = start, end, seq_len
        self.table = block_table[: cdiv(seq_len, block_size)]
        self.mask = None
        if end - start < seq_len:
            # Query i is token seq_len - q + i: the causal triangle is aligned at the bottom right.
            mask = torch.ones(end - start, seq_len, dtype=torch.bool, device=block_table.device)
            self.mask = mask.tril(diagonal=seq_len - (end - start))

    def __call__(self, query: Tensor, cache: LayerKVCache) -> Tensor:
        """[q, H, D] -> [q, H, D]."""
        keys, values = cache.read(self.table, self.seq_len)  # [L, H_kv, D]
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.to(query.dtype).transpose(0, 1)[None],
            values.to(query.dtype).transpose(0, 1)[None],
            attn_mask=self.mask,
            is_causal=self.mask is None,
            enable_gqa=query.shape[1] != cache.num_kv_heads,
        )
        return out[0].transpose(0, 1)


class _GatheredDecode:
    """Decodes where neither `paged_decode` nor `PagedFlash` can run (float32 on a GPU, 16 bits on a CPU): the tables
    are gathered side by side, the tails masked."""

    def __init__(self, block_tables: Tensor, seq_lens: list[int], block_size: int) -> None:
        self.tables = block_tables[:, : cdiv(max(seq_lens), block_size)]
        self.mask = None
        longest = self.tables.shape[1] * block_size
        if min(seq_lens) < longest:
            lens = torch.tensor(seq_lens, device=block_tables.device)
            self.mask = (torch.arange(longest, device=block_tables.device) < lens[:, None])[:, None, None, :]
            self.behind_the_end = ~self.mask.transpose(2, 3)

    def __call__(self, query: Tensor, cache: LayerKVCache) -> Tensor:
        """One query per request: [R, H, D] -> [R, H, D]."""
        keys, values = (x.to(query.dtype).transpose(1, 2) for x in cache.read_tables(self.tables))  # [R, H_kv, L, D]
        if self.mask is not None:
            # Slots behind the end hold what another request left there. A weight of 0 hides any number but NaN and
            # infinity, so an overflow over there would show up here.
            keys.masked_fill_(self.behind_the_end, 0)
            values.masked_fill_(self.behind_the_end, 0)
        # The query heads of one KV head take the place of query positions, so K/V are not repeated for them.
        q = query.unflatten(1, (keys.shape[1], -1))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask).reshape(query.shape)
