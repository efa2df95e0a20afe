"""The workload on which schedulers are timed: many requests that run side by side, and a queue behind them.

Plain Python, since it also runs in vLLM's environment.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any


def parse_args(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--running", type=int, default=256, help="requests that run at a time")
    parser.add_argument("--waiting", type=int, default=0, help="requests behind them in the queue, never admitted")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens generated for each")
    parser.add_argument("--pool", type=int, default=1, help="how many times the blocks that the running ones need")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="for vLLM: a folder with some small model's config.json")
    args = parser.parse_args()
    if min(args.running, args.prompt, args.output, args.pool, args.repeats) < 1 or args.waiting < 0:
        parser.error("all numbers must be at least 1, --waiting at least 0")
    return args


def config(args: argparse.Namespace) -> dict:
    """Block size 16, a budget of 8,192 tokens a step, caching on; the pool holds everybody that runs."""
    length = args.prompt + args.output
    return {
        "num_blocks": 1 + args.pool * args.running * -(-length // 16),
        "block_size": 16,
        "max_num_seqs": args.running,
        "max_num_batched_tokens": max(8192, args.running),
        "max_model_len": length,
        "enable_prefix_caching": True,
        "policy": "fcfs",
        "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": True,
        "scheduler_reserve_full_isl": True,
        "watermark": 0.0,
    }


def prompts(args: argparse.Namespace) -> Iterator[list[int]]:
    rng = random.Random(0)
    for _ in range(args.running + args.waiting):
        yield [rng.randrange(50_000) for _ in range(args.prompt)]


def timed_steps(scheduler: Any, sample: Callable[[Any], Any]) -> Iterator[tuple[float, int]]:
    """Step a scheduler of either kind until its first request ends: (s in its two calls, requests) of each step.

    `sample(output)` makes what `update_from_output` takes, and is not timed.
    """
    gc.collect()
    num_requests = len(scheduler.requests)
    while len(scheduler.requests) == num_requests:
        start = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        sampled = sample(output)
        before_update = time.perf_counter()
        scheduler.update_from_output(output, sampled)
        yield time.perf_counter() - before_update + scheduled - start, len(output.num_scheduled_tokens)


def report(args: argparse.Namespace, run: Callable[[], Iterator[tuple[float, int]]]) -> None:
    """Median over the repeats of total time / (requests x steps); `run` yields (s, requests) of each step."""
    costs = []
    for _ in range(args.repeats):
        seconds, sequence_steps = (sum(column) for column in zip(*run(), strict=True))
        costs.append(seconds / sequence_steps * 1e6)
    print(f"us_per_sequence_step={sorted(costs)[len(costs) // 2]:.2f}", flush=True)
