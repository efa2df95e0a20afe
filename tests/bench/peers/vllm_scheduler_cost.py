"""The same workload through vLLM's own scheduler; see scheduler_cost.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from scheduler_workload import config, parse_args, prompts, report, timed_steps

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))
from record import make_scheduler  # also sets vLLM's environment
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request


def main() -> None:
    args = parse_args(__doc__)
    settings = config(args)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(settings["block_size"], sha256)
    params = SamplingParams(max_tokens=args.output, ignore_eos=True)

    def run() -> Iterator[tuple[float, int]]:
        scheduler = make_scheduler(args.model, settings)
        requests = {
            str(number): Request(str(number), prompt, params, None, arrival_time=float(number), block_hasher=hasher)
            for number, prompt in enumerate(prompts(args))
        }
        for request in requests.values():
            scheduler.add_request(request)

        def sample(output: SchedulerOutput) -> ModelRunnerOutput:
            ids = list(output.num_scheduled_tokens)
            return ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=[
                    [7] if requests[i].num_computed_tokens >= requests[i].num_tokens else [] for i in ids
                ],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )

        return timed_steps(scheduler, sample)

    report(args, run)


if __name__ == "__main__":
    main()
