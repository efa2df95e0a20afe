"""vLLM on a CPU, in one process, eager (compiling takes minutes), float32, through its engine's step loop."""

from __future__ import annotations

import os
from collections.abc import Iterator

from timing import measure, parse_args


def main() -> None:
    args = parse_args(__doc__)
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        OMP_NUM_THREADS=str(args.threads),
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        args.model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=args.prompt + args.output,
        max_num_batched_tokens=max(4096, args.prompt + args.output),
        enable_prefix_caching=False,
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    for cache in runner.kv_caches:
        cache.zero_()  # the system hands memory out at its first use; a server has that behind it
    engine = llm.llm_engine
    numbers = iter(range(10**9))

    def generate(prompts: list[list[int]], num_tokens: int) -> Iterator[int]:
        params = SamplingParams(
            max_tokens=num_tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for prompt in prompts:
            engine.add_request(str(next(numbers)), TokensPrompt(prompt_token_ids=prompt), params)
        started: set[str] = set()
        num_first = 0
        while len(started) < len(prompts):
            for output in engine.step():
                num_first += len(output.outputs[0].token_ids)
                started.add(output.request_id)
        yield num_first
        while engine.has_unfinished_requests():
            engine.step()

    measure(args, llm.model_config.get_vocab_size(), generate)


if __name__ == "__main__":
    main()
