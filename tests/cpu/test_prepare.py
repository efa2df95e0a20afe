"""Every switch of `CPUKernels`, alone and together, gives the textbook model's logits."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from helpers.checkpoints import build, our_logits, token_ids
from test_logits_match_transformers import CONFIGS

from minivllm import LLM, SamplingParams
from minivllm.cpu import CPUKernels, prepare
from minivllm.cpu.threads import SPIN_COUNT
from minivllm.loading.weights import load_model

NONE = CPUKernels.all(False)
EACH = {field.name: replace(NONE, **{field.name: True}) for field in fields(CPUKernels)} | {"all": CPUKernels()}


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-biases-head-dim-tied", "qwen2", "qwen3", "yarn"])
@pytest.mark.parametrize("kernels", list(EACH))
def test_same_logits(name, kernels, tmp_path):
    build(CONFIGS[name]).save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    expected = our_logits(model, token_ids())
    prepared = prepare(model, EACH[kernels], min_packed_bytes=0)
    with torch.inference_mode():
        assert (our_logits(prepared, token_ids()) - expected).abs().max() <= 2e-5 * expected.abs().max()
    prepare(model, EACH[kernels], min_packed_bytes=0)  # a second time changes nothing and fails at nothing


@pytest.mark.parametrize("kernels", [False, CPUKernels(traced=False), CPUKernels(paged_decode=False)])
def test_an_engine_with_switches_off_gives_the_same_tokens(kernels):
    prompts, params = ["Once upon a time", "The dog"], SamplingParams(max_tokens=20, temperature=0)
    texts = [
        [out.outputs[0].text for out in LLM("tiny", cpu_kernels=k).generate(prompts, params, use_tqdm=False)]
        for k in (True, kernels)
    ]
    assert texts[0] == texts[1]


def test_off_means_the_textbook_model():
    llm = LLM("tiny", cpu_kernels=False)
    assert type(llm.model).__module__ == "minivllm.models.gpt2" and not llm.executor.attention.in_place


def test_what_is_no_switch():
    with pytest.raises(ValueError, match="cpu_kernels must be True, False or a CPUKernels, got 'fast'"):
        LLM("tiny", cpu_kernels="fast")


@pytest.mark.parametrize(
    ("code", "environment", "expected"),
    [
        ("import minivllm", {}, str(SPIN_COUNT)),
        ("import torch, minivllm", {}, None),  # too late: torch reads it as it starts
        ("import minivllm", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("import minivllm", {"OMP_WAIT_POLICY": "passive"}, None),
    ],
)
def test_spinning_is_limited_unless_somebody_else_decides(code, environment, expected):
    code += "; import os; print(os.environ.get('GOMP_SPINCOUNT'))"
    without = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env=without | environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(expected), done.stderr
