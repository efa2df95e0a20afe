"""A step costs what its requests cost: neither the queue behind them nor the size of the pool adds to it.

Counted in executed lines of Python, which repeat exactly. (`tests/bench/scheduler_cost.py` measures microseconds.)
"""

import sys

import pytest
from helpers.executors import TokenExecutor

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams

RUNNING, PROMPT, OUTPUT = 8, 100, 40


def lines_per_request_and_step(waiting: int, pool: int) -> float:
    """From the first admission to the first end, with `waiting` requests that are never admitted."""
    length = PROMPT + OUTPUT
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=RUNNING, max_num_batched_tokens=1024, max_model_len=length),
        CacheConfig(1 + pool * RUNNING * -(-length // 16), block_size=16, enable_prefix_caching=True),
    )
    for number in range(RUNNING + waiting):
        prompt = range(number * PROMPT, (number + 1) * PROMPT)
        scheduler.add_request(Request(str(number), prompt, SamplingParams(max_tokens=OUTPUT, ignore_eos=True)))
    executor = TokenExecutor()
    lines = request_steps = 0

    def count(frame, event, _):
        nonlocal lines
        lines += event == "line" and "minivllm" in frame.f_code.co_filename  # not what a garbage collection calls
        return count

    outer, total = sys.gettrace(), len(scheduler.requests)
    while len(scheduler.requests) == total:
        try:
            sys.settrace(count)
            output = scheduler.schedule()
            sys.settrace(outer)
            sampled = executor.sample(output)
            sys.settrace(count)
            scheduler.update_from_output(output, sampled)
        finally:
            sys.settrace(outer)
        request_steps += len(output.num_scheduled_tokens)
    return lines / request_steps


@pytest.mark.parametrize(("waiting", "pool"), [(2000, 1), (10, 8), (2000, 8)])
def test_neither_the_queue_nor_the_pool_adds_to_a_step(waiting, pool):
    alone = lines_per_request_and_step(waiting=10, pool=1)
    assert 10 < alone < 100
    assert lines_per_request_and_step(waiting, pool) == alone
