"""Prefill and decode speed of minivllm, one line per batch size.

    python tests/bench/decode_speed.py --model smollm2-135m --batch 1 4 8 16 32 --prompt 64 --output 64

Medians of three runs, greedy, each with prompts of its own, in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from timing import measure, parse_args

from minivllm import LLM, SamplingParams


def main() -> None:
    args = parse_args(__doc__)
    import torch  # after minivllm, which sets how its threads wait

    torch.set_num_threads(args.threads)
    length, num_requests = args.prompt + args.output, max(args.batch)
    llm = LLM(args.model, max_model_len=length, max_num_seqs=num_requests, max_log_steps=1)
    llm.executor.kv_cache.pages.fill_(0)  # the system hands memory out at its first use; a server has that behind it
    engine = llm.llm_engine
    numbers = iter(range(10**9))

    def generate(prompts: list[list[int]], num_tokens: int) -> Iterator[int]:
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        first = engine.num_generation_tokens
        waiting = {}  # request id -> tokens of its prompt, until they are computed
        for prompt in prompts:
            request_id = str(next(numbers))
            engine.add_request(request_id, prompt, params, output_kind="final_only")
            waiting[request_id] = len(prompt)
        while waiting:
            engine.step()
            for request_id, computed in engine.event_log[-1].computed.items():
                if computed >= waiting.get(request_id, 0):
                    waiting.pop(request_id, None)
        yield engine.num_generation_tokens - first
        while engine.has_unfinished_requests():
            engine.step()

    measure(args, llm.model_config.vocab_size, generate)


if __name__ == "__main__":
    main()
