"""What the scheduler costs: microseconds per request and step, in `schedule` and `update_from_output` together.

    python tests/bench/scheduler_cost.py

256 requests of 512 + 128 tokens from the first admission to the first end, prefix caching on. No model runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.executors import TokenExecutor
from scheduler_workload import config, parse_args, prompts, report, timed_steps

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams


def main() -> None:
    args = parse_args(__doc__)
    settings = config(args)
    cache = {name: settings.pop(name) for name in ("num_blocks", "block_size", "enable_prefix_caching", "watermark")}
    params = SamplingParams(max_tokens=args.output, ignore_eos=True)

    def run() -> Iterator[tuple[float, int]]:
        scheduler = Scheduler(SchedulerConfig(**settings), CacheConfig(**cache))
        for number, prompt in enumerate(prompts(args)):
            scheduler.add_request(Request(str(number), prompt, params))
        return timed_steps(scheduler, TokenExecutor().sample)

    report(args, run)


if __name__ == "__main__":
    main()
