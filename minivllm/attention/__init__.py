"""Three ways to read a paged KV cache, with one interface and equal results.

reference: gather the pages, then plain softmax attention. The oracle.
blockwise: block by block with a running maximum and sum, as a paged kernel works. What the book explains.
fast: batched and vectorised. The default.
"""

from __future__ import annotations

from minivllm.attention.metadata import AttentionBackend, AttentionMetadata, write_kv

BACKENDS = ("fast", "reference", "blockwise")


def get_backend(name: str) -> AttentionBackend:
    """The attention function of that name; ValueError on an unknown one."""
    if name == "reference":
        from minivllm.attention.reference import paged_attention
    elif name == "blockwise":
        from minivllm.attention.blockwise import paged_attention
    elif name == "fast":
        from minivllm.attention.fast import paged_attention
    else:
        raise ValueError(f"unknown attention backend {name!r}; there are {', '.join(BACKENDS)}.")
    return paged_attention


__all__ = ["BACKENDS", "AttentionBackend", "AttentionMetadata", "get_backend", "write_kv"]
