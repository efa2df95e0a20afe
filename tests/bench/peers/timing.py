"""What every measured engine shares: the prompts, the clock's two intervals, and the printed line.

Plain Python, since it also runs in the environments of other engines.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator


def parse_args(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="what the engine loads: a name, a folder or a file")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="requests at a time")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens generated for each, at least 2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="counted runs per batch size")
    args = parser.parse_args()
    if args.output < 2 or min(args.prompt, args.threads, args.repeats, *args.batch) < 1:
        parser.error("--output must be at least 2, the other numbers at least 1")
    return args


def make_prompts(batch: int, length: int, vocab_size: int, run: int) -> list[list[int]]:
    """Random token ids, other ones in each run: no prefix cache can help."""
    rng = random.Random(f"{batch}:{length}:{run}")
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(batch)]


def measure(
    args: argparse.Namespace, vocab_size: int, generate: Callable[[list[list[int]], int], Iterator[int]]
) -> None:
    """Run `generate(prompts, num_tokens)` for each batch size and print the medians.

    It yields as soon as every request has its first token, with the number of tokens that there are by then (a prompt
    that was finished early has several), and ends when all have `num_tokens`. The first interval is the prefill, the
    second the decoding of the rest.
    """
    for batch in args.batch:
        # Once with few tokens and not counted: engines prepare for a batch size when they first see it.
        for _ in generate(make_prompts(batch, min(args.prompt, 128), vocab_size, -1), 3):
            pass
        runs = []
        for run in range(args.repeats):
            prompts = make_prompts(batch, args.prompt, vocab_size, run)
            start = time.perf_counter()
            steps = generate(prompts, args.output)
            num_first = next(steps)
            first = time.perf_counter()
            for _ in steps:
                pass
            decode_s = time.perf_counter() - first
            runs.append((batch * args.prompt / (first - start), (batch * args.output - num_first) / decode_s))
        prefill, decode = (sorted(values)[len(values) // 2] for values in zip(*runs, strict=True))
        print(
            f"batch={batch} prefill_tok_s={prefill:.1f} decode_tok_s={decode:.1f} step_ms={batch / decode * 1e3:.2f}",
            flush=True,
        )
