"""Three ways to read a paged KV cache, with one interface and equal results.

reference: gather the pages, then plain softmax attention. The oracle.
blockwise: block by block with a running maximum and sum, as a paged kernel works. What the book explains.
fast: batched and vectorised. The default.
"""

from __future__ import annotations

from minivllm.attention.kv_cache import KVCache, LayerKVCache
from minivllm.attention.metadata import AttentionBackend, AttentionMetadata

BACKENDS = ("fast", "reference", "blockwise")


def get_backend(name: str, *, in_place: bool = True) -> AttentionBackend:
    """The attention backend of that name; ValueError on an unknown one. `in_place`: "fast" may read a CPU's pages where
    they lie (`minivllm.cpu.paged_decode`)."""
    if name == "reference":
        from minivllm.attention.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "blockwise":
        from minivllm.attention.blockwise import BlockwiseBackend

        return BlockwiseBackend()
    if name == "fast":
        from minivllm.attention.fast import FastBackend

        return FastBackend(in_place)
    raise ValueError(f"unknown attention backend {name!r}; there are {', '.join(BACKENDS)}.")


__all__ = ["BACKENDS", "AttentionBackend", "AttentionMetadata", "KVCache", "LayerKVCache", "get_backend"]
