"""Linear layers at the speed of the memory: weights in the order in which the product reads them.

With 2 to 16 rows, which is what a decode batch is, a general matrix product reaches a third of the memory's
bandwidth: it is made for large matrices, and rearranges both of its inputs at each call. oneDNN can be given the
weights rearranged already ("packed"). PyTorch's compiler does the same when it freezes a model, by the two operators
that are used here.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.cpu.torchscript import script
from minivllm.models.layers import Conv1D

# The layout is chosen for a number of rows, and serves any. Measured with SmolLM2 (2 cores, AVX2): packed for 1 row, 8
# rows take 1.5 times as long as packed for 8; packed for 8, 1 row takes no longer than packed for 1.
PACKED_FOR_ROWS = 8
# Below this many bytes the weights stay in the processor's own cache, where a call's fixed cost (30 microseconds for
# the packed product, 10 for the plain one) is what counts.
MIN_BYTES = 2**20
# On some processors the product of four rows takes less time than that of one or two: on an AMD EPYC with AVX-512 it
# reads 20 GB/s, one row 15, two rows 12. There, fewer rows are filled up.
FILLED_UP_ROWS = 4


@script
def _packed_product(x: Tensor, packed: Tensor, bias: Tensor | None, min_rows: int) -> Tensor:
    rows = x.shape[0]
    if x.dim() == 2 and rows < min_rows:
        x = F.pad(x, [0, 0, 0, min_rows - rows])
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")[:rows]


class PackedLinear(nn.Module):
    """y = x W^T + b, float32 on the CPU, with W in oneDNN's own order (it cannot be read back)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight is [out_features, in_features]."""
        super().__init__()
        self.min_rows = 1
        self.out_features, self.in_features = weight.shape
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
        self.register_buffer("packed", packed, persistent=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return _packed_product(x, self.packed, self.bias, self.min_rows)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@torch.inference_mode()
def pack_weights(model: nn.Module, min_bytes: int = MIN_BYTES) -> int:
    """Replace the linear layers of `model` with `min_bytes` or more by packed ones, in place; returns how many.

    One after another, so that never more than one matrix is there several times. An output matrix that is also the
    embedding stays for the look-up, and is packed as a copy. Nothing changes (0 is returned) where packing does not
    work: on a GPU, in another dtype, or with a PyTorch that lacks the operators or gets another result with them.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer).forward in (nn.Linear.forward, Conv1D.forward) and layer.weight.nbytes >= min_bytes  # type: ignore[operator]
    ]
    kinds = {(weight.device, weight.dtype) for weight in (getattr(parent, name).weight for parent, name in places)}
    if not places or not all(can_pack(*kind) for kind in kinds):
        return 0
    for parent, name in places:
        layer = getattr(parent, name)
        weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
        setattr(parent, name, PackedLinear(weight, layer.bias))
    packed = [getattr(parent, name) for parent, name in places]
    min_rows = fastest_min_rows(max(packed, key=lambda layer: layer.packed.nbytes))
    for layer in packed:
        layer.min_rows = min_rows
    return len(packed)


def fastest_min_rows(layer: PackedLinear, tries: int = 8) -> int:
    """FILLED_UP_ROWS if a product of so many rows takes less time, here and now, than one of fewer; otherwise 1."""
    best = {1: float("inf"), 2: float("inf"), FILLED_UP_ROWS: float("inf")}
    for _ in range(tries):
        for rows in best:
            x = torch.zeros(rows, layer.in_features, dtype=torch.float32, device="cpu")
            start = time.perf_counter()
            layer(x)
            best[rows] = min(best[rows], time.perf_counter() - start)
    return FILLED_UP_ROWS if best[FILLED_UP_ROWS] < 0.95 * min(best[1], best[2]) else 1


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed products work for weights of this device and dtype, by a small trial."""
    if device.type != "cpu" or dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    try:
        generator = torch.Generator("cpu").manual_seed(0)
        here: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
        x, weight, bias = (torch.randn(*shape, **here) for shape in ((3, 48), (32, 48), (32,)))
        expected = F.linear(x, weight, bias)
        return bool((PackedLinear(weight, bias)(x) - expected).abs().max() <= 1e-5 * expected.abs().max())
    except (AttributeError, RuntimeError):  # no such operator, or not for this processor
        return False
