"""What this machine reaches, measured with torch: memory bandwidth and matrix products.

Plain numbers, in GB/s and GFLOP/s (10^9 bytes and 10^9 operations per second), for the doctor and for chapters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def best_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of `repeats` runs, after one to warm up: the least disturbed by other programs."""
    import torch

    def once() -> float:
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(repeats))


def measure_cores(seconds: float = 0.2) -> float:
    """How many cores torch's threads get in a matrix product, about: less than there are threads if others use them."""
    import torch

    a = torch.ones(1024, 1024)
    a @ a
    start, processor_start = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        a @ a
    return (time.process_time() - processor_start) / (time.perf_counter() - start)


def measure_bandwidth(device: str | torch.device = "cpu", size_mib: int = 256) -> float:
    """Memory read bandwidth in GB/s: summing `size_mib` MiB of float32, more than the caches hold."""
    import torch

    values = torch.ones(size_mib * 2**20 // 4, device=device)
    return values.numel() * 4 / best_seconds(values.sum) / 1e9


def measure_matmul(device: str | torch.device = "cpu", size: int = 1024) -> float:
    """Matrix-product speed in GFLOP/s: float32, [size, size] times [size, size], 2 size^3 operations."""
    import torch

    a, b = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
    return 2 * size**3 / best_seconds(lambda: a @ b) / 1e9
