"""Decode attention on a CPU that reads the pages where they lie.

For a decode, attention is two sparse products, and the block table says where they are not zero. Seen as a matrix
with a row per query head and a column per (slot, KV head) of the whole cache, a request's scores are needed only in
the columns of its own slots:

    scores = query @ keys^T, only at those places      torch.sparse.sampled_addmm
    output = probabilities @ values, only from there   embedding_bag: the weighted sum of the rows of an index list

So nothing is gathered, masked or padded to the longest request, and slots of others are never touched.

A request is cut into tiles of tokens. All heads go over a tile before the next one comes, so that its keys come from
memory once and from the processor's cache after that. Tiles are then merged like the blocks of `blockwise`: each
request's maximum and sum are put together from those of its tiles.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.kv_cache import LayerKVCache
from minivllm.cpu.torchscript import script

# 64 tokens of SmolLM2's keys are 48 KB: more than the first-level cache holds, less than the second.
TILE = 64


class Decode:
    """The decodes of one step, for all layers: one query for each of R requests."""

    def __init__(self, block_tables: Tensor, seq_lens: list[int], num_heads: int, cache: LayerKVCache) -> None:
        """block_tables [R, max_blocks]; `cache` is any layer's, for its sizes.

        Raises IndexError for tables that point out of the cache.
        """
        num_blocks, block_size, num_kv_heads = cache.num_blocks, cache.block_size, cache.num_kv_heads
        lens = np.array(seq_lens)
        # One tile for all if they are short: then there is nothing to merge.
        self.tile = max(seq_lens) if max(seq_lens) <= 2 * TILE else TILE
        num_tiles = -(-lens // self.tile)  # [R]
        request = np.repeat(np.arange(len(lens)), num_tiles)  # [N]: whose tile it is
        first_tile = np.cumsum(num_tiles) - num_tiles  # [R]

        number = np.arange(len(request)) - first_tile[request]  # [N]: which tile of its request
        position = number[:, None] * self.tile + np.arange(self.tile)
        last = lens[request, None] - 1
        behind_the_end = np.flatnonzero(np.repeat(position > last, num_heads, axis=0))
        position = np.minimum(position, last)  # what follows the end reads the last token again, and counts 0
        block, offset = np.divmod(position, block_size)
        block_ids = block_tables.numpy()[request[:, None], block]
        # The products do not look: a wrong table would have them read and write anywhere.
        if block_ids.min() < 0 or block_ids.max() >= num_blocks:
            raise IndexError(f"a block table names block {block_ids.max()}, but the cache has {num_blocks} blocks.")
        if max(seq_lens) > num_blocks * block_size:
            raise IndexError(
                f"{max(seq_lens)} tokens of one request do not lie in {num_blocks} blocks of {block_size}."
            )
        slot = block_ids * block_size + offset

        # Rows of a layer's keys seen as [num_slots * H_kv, D], for each (tile, query head, token).
        kv_head = np.arange(num_heads) // (num_heads // num_kv_heads)
        index = (slot[:, None, :] * num_kv_heads + kv_head[:, None]).ravel()

        self.index = torch.from_numpy(index)
        self.offsets = torch.arange(0, len(index) + 1, self.tile, device="cpu")
        self.places = torch.sparse_csr_tensor(
            self.offsets,
            self.index,
            torch.zeros(len(index), dtype=torch.float32, device="cpu"),
            size=(len(index) // self.tile, num_blocks * block_size * num_kv_heads),
            device="cpu",
            check_invariants=False,
        )
        self.behind_the_end = torch.from_numpy(behind_the_end)
        self.request = torch.from_numpy(request)
        # [R, most tiles]: each request's tiles, the last one repeated
        tiles_of = first_tile[:, None] + np.minimum(np.arange(num_tiles.max()), num_tiles[:, None] - 1)
        self.tiles_of = torch.from_numpy(tiles_of)

    def __call__(self, query: Tensor, cache: LayerKVCache) -> Tensor:
        """One query for each request: [R, H, D] -> [R, H, D]."""
        return _attend(
            query,
            cache.pages,
            self.places,
            self.index,
            self.offsets,
            self.behind_the_end,
            self.request,
            self.tiles_of,
            self.tile,
        )


@script
def _attend(
    query: Tensor,
    kv_cache: Tensor,
    places: Tensor,
    index: Tensor,
    offsets: Tensor,
    behind_the_end: Tensor,
    request: Tensor,
    tiles_of: Tensor,
    tile: int,
) -> Tensor:
    keys, values = kv_cache.flatten(1, 3).unbind(0)  # each [num_slots * H_kv, D]
    num_heads, head_dim = query.size(1), query.size(2)
    is_merged = len(request) > len(query)
    q = query.index_select(0, request) if is_merged else query  # [N, H, D]
    # Into its own input, whose old values are multiplied by 0 (beta): a new result would copy the index. What was -inf
    # behind the ends becomes NaN by that, and -inf again in the next line.
    torch.ops.aten.sparse_sampled_addmm(places, q.flatten(0, 1), keys.t(), beta=0.0, alpha=head_dim**-0.5, out=places)
    scores = places.values().index_fill_(0, behind_the_end, float("-inf")).view(-1, num_heads, tile)  # [N, H, tile]
    probs = scores.softmax(-1)
    # For each (tile, head): the sum of its tokens' values by their probabilities.
    output = torch.embedding_bag(values, index, offsets, False, 0, False, probs.flatten(), True)[0]
    output = output.view(-1, num_heads, head_dim)
    if not is_merged:
        return output
    # A tile's largest score m has probability exp(m - m) / l, so log l is the negative of its logarithm, and m + log l
    # says how much the tile weighs beside the others of its request.
    tile_lse = scores.amax(-1) - probs.amax(-1).log_()  # [N, H]
    largest = tile_lse[tiles_of].amax(1)  # [R, H]
    weight = (tile_lse - largest.index_select(0, request)).exp_()
    total = torch.zeros_like(largest).index_add_(0, request, weight)
    output = torch.zeros_like(query).index_add_(0, request, output.mul_(weight.unsqueeze(-1)))
    return output.div_(total.unsqueeze(-1))


def can_run(cache: LayerKVCache) -> bool:
    """Whether pages can be read this way: float32 on the CPU, with a PyTorch that has the sparse products."""
    return cache.device.type == "cpu" and cache.dtype == torch.float32 and _has_sparse_products()


@functools.cache
def _has_sparse_products() -> bool:
    """Whether this PyTorch has the sparse products and they give the right result, by a small trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says once that its sparse tensors are in beta
        try:
            longest = 2 * TILE + 1
            here: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
            for seq_lens in ([1], [1, longest]):  # without and with merging
                tables = torch.arange(longest, device="cpu").expand(len(seq_lens), -1)
                cache = LayerKVCache(torch.ones(2, longest, 1, 1, 4, **here))
                decode = Decode(tables, seq_lens, 1, cache)
                ones = torch.ones(len(seq_lens), 1, 4, **here)
                if (decode(ones, cache) - ones).abs().max() > 1e-5:
                    return False
            return True
        except (AttributeError, RuntimeError):
            return False
