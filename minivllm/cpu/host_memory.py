"""Large tensors in main memory, straight from the operating system.

What `malloc` is given back it keeps, in holes between what is still in use: packing SmolLM2's weights left 70 MiB of
them. A mapping of its own goes back whole. Linux also gives it pages of 2 MiB where it can: attention reads blocks from
all over the cache, and with pages of 4 KiB it would wait for the page table.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

# Below this, what a mapping costs (a system call, whole pages) is more than it saves.
MIN_BYTES = 2**20
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # not on Windows


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`, but a large tensor on the CPU gets a mapping, whose pages take memory when they are first written.

    Raises MemoryError if the system has no room, and what PyTorch raises where it allocates.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < MIN_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, num_bytes, **_PRIVATE)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system has no room for {num_bytes / 2**30:,.1f} GiB ({error})") from None
    with contextlib.suppress(AttributeError, OSError):  # another system, or a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory that the device has; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
