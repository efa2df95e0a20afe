"""Small random models behind a real engine, and the plain forward pass that everything is compared with."""

from __future__ import annotations

from collections import defaultdict

import torch

from minivllm.core.block_tier import LRUTier
from minivllm.cpu import CPUKernels
from minivllm.engine.args import EngineArgs, build_engine
from minivllm.engine.llm_engine import LLMEngine
from minivllm.loading.weights import LoadedModel
from minivllm.model_config import GenerationConfig, ModelConfig, RopeConfig
from minivllm.models.gpt2 import GPT2
from minivllm.models.layers import causal_attend
from minivllm.models.llama import Llama
from minivllm.request import RequestStatus
from minivllm.units import cdiv

VOCAB = 61


def random_model(family: str = "llama", seed: int = 0, max_len: int = 256) -> tuple[torch.nn.Module, ModelConfig]:
    """A model small enough for hundreds of runs, with weights large enough that an error shows in the logits."""
    is_gpt2 = family == "gpt2"
    config = ModelConfig(
        model_type=family,
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4 if is_gpt2 else 2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=max_len,
        hidden_act="gelu_new" if is_gpt2 else "silu",
        norm_eps=1e-5,
        tie_word_embeddings=True,
        rope=None if is_gpt2 else RopeConfig(theta=1000.0),
        qkv_bias=is_gpt2,
        o_proj_bias=is_gpt2,
        mlp_bias=is_gpt2,
    )
    model = (GPT2 if is_gpt2 else Llama)(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            parameter.data.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            parameter.data.normal_(std=0.3, generator=generator)
    return model.eval().requires_grad_(False), config


def make_engine(model, config, *, num_blocks, block_size, tier_slots=0, **settings) -> LLMEngine:
    """An engine over `model`, as it is: no layer is replaced. `settings` are those of EngineArgs."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 2048, **settings}
    if settings.get("enable_chunked_prefill", True) is False:
        settings["max_num_batched_tokens"] = max(settings["max_num_batched_tokens"], config.max_model_len)
    as_it_is = CPUKernels(fused=False, packed_linear=False, traced=False)
    args = EngineArgs(num_gpu_blocks_override=num_blocks, block_size=block_size, cpu_kernels=as_it_is, **settings)
    loaded = LoadedModel(config.model_type, model, config, None, GenerationConfig(config.eos_token_ids))
    return build_engine(args, loaded=loaded, tier=LRUTier(tier_slots) if tier_slots else None)


def plain_logits(model, token_ids: list[int]) -> torch.Tensor:
    """[len, V]: one forward pass over the whole sequence, no cache, no batch."""
    with torch.inference_mode():
        hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), causal_attend)
        return model.compute_logits(hidden).float()


class LogitsRecorder:
    """Keeps the logits of every token that the engine computes, through the executor's test hook."""

    def __init__(self, engine: LLMEngine) -> None:
        self.logits: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        self.requests = {}
        engine.executor.on_logits = self

    def __call__(self, request, first: int, logits: torch.Tensor) -> None:
        self.requests[request.request_id] = request
        for i, row in enumerate(logits.clone()):
            self.logits[request.request_id][first + i] = row

    def largest_error(self, model) -> float:
        """The largest difference from the plain forward pass, over all requests, positions and tokens."""
        worst = 0.0
        for request_id, rows in self.logits.items():
            token_ids = self.requests[request_id].token_ids
            expected = plain_logits(model, token_ids)
            for position, row in rows.items():
                worst = max(worst, (row - expected[position]).abs().max().item())
        return worst


def run_to_the_end(engine: LLMEngine, max_steps: int = 2000) -> dict:
    """Step until nothing is left, with the invariants checked after each step; the final outputs by id."""
    outputs = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return outputs
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
        engine.scheduler.kv_cache_manager.check_invariants()
    raise AssertionError(f"not finished after {max_steps} steps")


__all__ = [
    "VOCAB",
    "GenerationConfig",
    "LogitsRecorder",
    "RequestStatus",
    "cdiv",
    "make_engine",
    "plain_logits",
    "random_model",
    "run_to_the_end",
]
