"""How fast a model's matrix products alone can be on this machine, and what the machine gives at most.

    python tests/bench/limits.py --model smollm2-135m --batch 1 4 8

one_row: one pass of `x @ W`, one row, over all matrices of the model, each stored input-major: the bandwidth limit of
batch 1. products: the products that minivllm runs, merged and packed, B rows, and nothing else of a step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import minivllm  # noqa: F401 - before torch: it sets how torch's threads wait

# isort: split
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from timing import parse_args

from minivllm.cpu import CPUKernels, prepare
from minivllm.cpu.packed_linear import PackedLinear
from minivllm.loading.weights import load_model
from minivllm.measure import measure_bandwidth, measure_matmul
from minivllm.models.layers import Conv1D


def median_s(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def input_size(layer: nn.Module) -> int:
    return layer.weight.shape[0] if isinstance(layer, Conv1D) else layer.in_features


def measure_one_row(model: nn.Module, repeats: int) -> str:
    weights = [
        (layer.weight if isinstance(layer, Conv1D) else layer.weight.t()).contiguous()
        for layer in model.modules()
        if isinstance(layer, (nn.Linear, Conv1D))
    ]
    rows = [torch.randn(1, weight.shape[0]) for weight in weights]
    seconds = median_s(lambda: [x @ weight for x, weight in zip(rows, weights, strict=True)], repeats)
    return f"one_row_tok_s={1 / seconds:.1f}"


def measure_products(layers: list[nn.Module], batch: int, repeats: int) -> str:
    rows = [torch.randn(batch, input_size(layer)) for layer in layers]
    seconds = median_s(lambda: [layer(x) for layer, x in zip(layers, rows, strict=True)], repeats)
    return f"batch={batch} products_tok_s={batch / seconds:.1f}"


@torch.inference_mode()
def main() -> None:
    args = parse_args(__doc__)
    torch.set_num_threads(args.threads)
    repeats = 5 * args.repeats
    print(f"memory_gb_s={measure_bandwidth():.1f} matmul_gflop_s={measure_matmul(size=2048):.0f}", flush=True)
    model = load_model(args.model).model
    print(measure_one_row(model, repeats), flush=True)

    model = prepare(model, CPUKernels(traced=False))
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Conv1D, PackedLinear))]
    for batch in args.batch:
        print(measure_products(layers, batch, repeats), flush=True)


if __name__ == "__main__":
    main()
