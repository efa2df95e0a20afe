"""Names of number formats, and what an element takes in memory.

`DTYPES` are those of activations and of weights that are not quantised; caches and weights come in more of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.units import cdiv

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of an element
_SHORT = {
    "float": "float32", "fp32": "float32", "f32": "float32", "half": "float16", "fp16": "float16", "f16": "float16",
    "bf16": "bfloat16", "fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8", "fp8_e5m2": "fp8", "int8_per_token_head": "int8",
}  # fmt: skip


def full_dtype(name: str) -> str:
    """bf16, BF16 and torch.bfloat16 are bfloat16; a name that is not known here stays as it is."""
    if not isinstance(name, str):
        raise ValueError(f"a dtype is given by name, such as 'bfloat16'; this is {name!r}")
    name = name.lower().removeprefix("torch.")
    return _SHORT.get(name, name)


@dataclass(frozen=True)
class KVDtype:
    """How a cached element is stored: `bits` each, and `scale_bytes` for every `group` of them.

    `group` None is one scale for a whole head's vector (int8 per token and head); 0 bytes of scale is none, or one for
    the whole tensor (fp8), which is too little to count.
    """

    bits: int
    scale_bytes: int = 0
    group: int | None = None

    def bytes_per_vector(self, size: int) -> float:
        """Bytes of `size` neighbouring elements, a head's key for example, with their scales."""
        num_scales = cdiv(size, self.group or size) if self.scale_bytes else 0
        return size * self.bits / 8 + num_scales * self.scale_bytes


KV_DTYPES = {
    **{name: KVDtype(8 * size) for name, size in DTYPES.items()},
    "fp8": KVDtype(8),  # one scale per tensor
    "int8": KVDtype(8, scale_bytes=4),  # a float32 scale per token and head
    "int4": KVDtype(4, scale_bytes=4, group=32),  # a float16 scale and zero point for 32 elements, as in KIVI
    "q8_0": KVDtype(8, scale_bytes=2, group=32),  # llama.cpp's blocks of 32 with a float16 scale
    "q4_0": KVDtype(4, scale_bytes=2, group=32),
}

# Bits of a stored weight, with its share of scales and zero points.
WEIGHT_BITS = {
    **{name: 8.0 * size for name, size in DTYPES.items()},
    "fp8": 8.0,
    "int8": 8.0,
    "int4": 4 + (16 + 4) / 128,  # GPTQ and AWQ: a float16 scale and a 4-bit zero point for 128 weights
    "mxfp4": 4 + 8 / 32,  # a shared exponent for 32
    "nvfp4": 4 + 8 / 16,  # an fp8 scale for 16
}
# Formats in which only the experts are stored.
EXPERTS_ONLY = ("mxfp4",)
