"""Three requests through `EngineCore`, where the standard library is all that can be imported; prints JSON.

A program, run by test_runs_anywhere.py under CPython and, in WebAssembly, under Pyodide.
"""

import json
import sys
from importlib.abc import MetaPathFinder

BLOCKED = {"jinja2", "numpy", "safetensors", "tokenizers", "torch", "tqdm"}


class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked here", name=name)


sys.meta_path.insert(0, Block())

from minivllm.config import CacheConfig, SchedulerConfig  # noqa: E402
from minivllm.core.scheduler import Scheduler  # noqa: E402
from minivllm.core.scheduler_output import SchedulerOutput  # noqa: E402
from minivllm.engine.core import EngineCore  # noqa: E402
from minivllm.executor.base import ModelOutput  # noqa: E402
from minivllm.request import Request  # noqa: E402
from minivllm.sampling_params import SamplingParams  # noqa: E402


class CountingExecutor:
    """Counts on from a request's last token: all that an engine needs of whatever runs its steps."""

    def __init__(self) -> None:
        self.token_ids: dict[str, list[int]] = {}

    def execute(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        for request in scheduler_output.new_requests:
            self.token_ids[request.request_id] = list(request.token_ids)
        sampled = []
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            token_ids = self.token_ids[request_id]
            is_last = scheduler_output.num_computed_tokens[request_id] + num_scheduled == len(token_ids)
            sampled.append([token_ids[-1] + 1] if is_last else [])
            token_ids += sampled[-1]
        return ModelOutput(sampled)


def run() -> dict:
    """What three requests become that share a prefix, in a pool that is too small for all of them at once."""
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=8),
        CacheConfig(num_blocks=12, block_size=2),
    )
    engine = EngineCore(scheduler, CountingExecutor(), clock=lambda: 0.0)
    requests = [Request(name, [1, 2, 3, 4, 10 * (i + 1)], SamplingParams(max_tokens=7)) for i, name in enumerate("abc")]
    for request in requests:
        engine.add_request(request)
    while scheduler.has_unfinished_requests():
        engine.step()
        scheduler.kv_cache_manager.check_invariants()
    return {
        "outputs": {request.request_id: request.output_token_ids for request in requests},
        "reasons": [request.finish_reason for request in requests],
        "hits": [request.num_cached_tokens for request in requests],
        "preempted": sum(len(event.preempted) for event in engine.event_log),
        "steps": len(engine.event_log),
    }


if __name__ == "__main__":
    print(json.dumps(run()))
