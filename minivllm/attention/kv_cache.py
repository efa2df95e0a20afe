"""The KV cache: pages of keys and values, and the one place that stores and reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minivllm.model_config import ModelConfig

# zeros(shape, dtype, device): where the memory comes from
Zeros = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


class LayerKVCache:
    """One layer's pages, `[2, num_blocks, block_size, num_kv_heads, head_dim]`: keys, then values.

    Slot s is token s % block_size of block s // block_size. Attention asks for K and V by block ids and never looks at
    the layout; a cache that stores numbers in another form, with their scales, is a class with these methods.
    """

    def __init__(self, pages: Tensor) -> None:
        self.pages = pages
        self.dtype, self.device = pages.dtype, pages.device
        self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim = pages.shape[1:]
        self._keys, self._values = pages.flatten(1, 2).unbind(0)  # views, [num_blocks * block_size, H_kv, D]

    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store a step's keys and values [T, H_kv, D] at their slots [T].

        This comes before any read of the step: a request may hit a block that another request fills in this very step.
        """
        self._keys.index_copy_(0, slot_mapping, key.to(self._keys.dtype))
        self._values.index_copy_(0, slot_mapping, value.to(self._values.dtype))

    def read(self, block_ids: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `num_tokens` tokens that lie in `block_ids` [n], copied: each [num_tokens, H_kv, D]."""
        keys, values = self.pages.index_select(1, block_ids).flatten(1, 2)[:, :num_tokens]
        return keys, values

    def read_block(self, block_id: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `num_tokens` tokens of one block, in place: views, each [num_tokens, H_kv, D]."""
        keys, values = self.pages[:, block_id, :num_tokens]
        return keys, values

    def read_tables(self, block_tables: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of several requests side by side, copied: [R, n] -> each [R, n * block_size, H_kv, D]."""
        keys, values = self.pages[:, block_tables].flatten(2, 3)
        return keys, values


class KVCache:
    """The pages of all layers: one tensor `[layers, 2, num_blocks, block_size, num_kv_heads, head_dim]`."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        zeros: Zeros = _zeros,
    ) -> None:
        """`zeros` allocates. Raises MemoryError where there is no room, or what PyTorch raises."""
        shape = (config.num_hidden_layers, 2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.pages = zeros(shape, dtype, device)
        self.layers = [LayerKVCache(pages) for pages in self.pages.unbind(0)]

    def __getitem__(self, layer: int) -> LayerKVCache:
        return self.layers[layer]

    def copy_blocks(self, source: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of another cache, on whatever device, into this one: (its block, ours) each, all layers."""
        theirs, ours = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        blocks = source.pages.index_select(2, theirs.to(source.pages.device))
        self.pages.index_copy_(2, ours.to(self.pages.device), blocks.to(self.pages.device))
