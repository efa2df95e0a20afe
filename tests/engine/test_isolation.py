"""What a caller has set in its process does not reach in, and what one request asks for does not take all."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from minivllm import LLM, SamplingParams

PARAMS = SamplingParams(
    max_tokens=6, temperature=0.8, seed=3, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.5, logprobs=2
)
PROMPTS = ["Once upon a time", "The dog"]


def tokens(llm):
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "state",
    [
        lambda: default_dtype(torch.float64),
        lambda: default_dtype(torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu"),
        torch.inference_mode,
        torch.enable_grad,
    ],
    ids=["float64", "bfloat16", "meta", "autocast", "inference mode", "grad"],
)
@pytest.mark.parametrize("kernels", [True, False])
def test_torch_s_global_settings(state, kernels):
    llm = LLM("tiny", cpu_kernels=kernels)
    expected = tokens(llm)
    with state():
        assert tokens(llm) == expected
        assert tokens(LLM("tiny", cpu_kernels=kernels)) == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_can_generate():
    """The threads of the parent's OpenMP are not in the child, which would wait for them for ever."""
    code = """
import os, sys
from minivllm import LLM, SamplingParams
llm = LLM("tiny")
params = SamplingParams(max_tokens=4, temperature=0)
prompts = ["Once upon a time, there was a dog"] * 8
expected = llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].text
if os.fork() == 0:
    os._exit(llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].text != expected)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 0


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not say")
def test_memory_comes_back_when_an_llm_is_deleted():
    def use():
        llm = LLM("tiny", num_gpu_blocks_override=500)
        tokens(llm)

    for _ in range(3):
        use()
    gc.collect()
    before = resident_mib()
    for _ in range(8):
        use()
    gc.collect()
    assert resident_mib() - before < 8  # it was 2.3 MiB each


def test_an_llm_without_a_stderr(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert LLM("tiny").generate("Once", SamplingParams(max_tokens=2))[0].finished


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (dict(logprobs=21), "logprobs=21 asks for 21 tokens at each position; this engine reports at most 20"),
        (dict(prompt_logprobs=-1), r"prompt_logprobs=-1 asks for 1,068 .* or max_logprobs=-1 for no limit"),
        (dict(min_tokens=2, stop_token_ids=list(range(1068))), "no token is left to sample"),
    ],
)
def test_what_one_request_may_take(params, message):
    llm = LLM("tiny")
    with pytest.raises(ValueError, match=message):
        llm.generate("Once", SamplingParams(**params), use_tqdm=False)
    assert LLM("tiny", max_logprobs=-1).generate("Once", SamplingParams(logprobs=-1, max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize("seed", [2**64, 10**5000, -(2**70)], ids=["65 bits", "16,610 bits", "negative"])
def test_a_seed_has_64_bits(seed):
    for make in (lambda: SamplingParams(seed=seed), lambda: LLM("tiny", seed=seed)):
        with pytest.raises(ValueError, match="seed must be a whole number of at most 64 bits, got one of"):
            make()


def test_min_tokens_holds_with_ignore_eos():
    """The model's EOS is masked until min_tokens in either case, as in vLLM."""
    llm = LLM("tiny")
    (eos,) = llm.llm_engine.input_processor.generation_config.eos_token_ids[:1]
    params = SamplingParams(
        max_tokens=8, temperature=0, ignore_eos=True, min_tokens=5, logit_bias={eos: 1000.0, 100: 900.0}
    )
    (out,) = llm.generate("Once", params, use_tqdm=False)
    assert out.outputs[0].token_ids == [100] * 5 + [eos] * 3
