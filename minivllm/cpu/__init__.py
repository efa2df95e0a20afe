"""What makes the engine fast on a CPU, and only that: the models run without any of it, with the same results.

`prepare` applies it to a model; each part has a switch of its own, to see what it buys.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.models.causal_lm import CausalLM


@dataclass(frozen=True)
class CPUKernels:
    """The switches. None of them changes a result beyond rounding."""

    fused: bool = True  # one product for q, k and v, a norm in half the operations (fused.py)
    packed_linear: bool = True  # weights in oneDNN's order (packed_linear.py)
    traced: bool = True  # no Python between two attentions (traced.py)
    paged_decode: bool = True  # decodes read the pages where they lie (paged_decode.py)
    mapped_memory: bool = True  # the KV cache in pages of 2 MiB (host_memory.py)
    adaptive_threads: bool = True  # one thread while other programs keep the cores busy (threads.py)

    @classmethod
    def all(cls, on: bool) -> CPUKernels:
        """Every switch on, or every one off."""
        return cls(**{field.name: on for field in fields(cls)})


def prepare(model: CausalLM, kernels: CPUKernels, min_packed_bytes: int | None = None) -> CausalLM:
    """The model as it runs on a CPU: changed in place, and wrapped where it is traced. On another device, and where
    this PyTorch cannot do it, as it was. `min_packed_bytes`: smaller layers are not packed."""
    from minivllm.cpu.fused import fuse
    from minivllm.cpu.packed_linear import MIN_BYTES, pack_weights
    from minivllm.cpu.traced import trace_pieces

    if next(model.parameters()).device.type != "cpu":
        return model
    if kernels.fused:
        fuse(model)
    if kernels.packed_linear:
        pack_weights(model, MIN_BYTES if min_packed_bytes is None else min_packed_bytes)
    return trace_pieces(model) if kernels.traced else model
