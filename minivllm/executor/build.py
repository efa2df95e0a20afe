"""A torch executor that fits the machine: the model prepared for it, and as many KV blocks as it has room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minivllm.attention import KVCache, get_backend
from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.cpu import CPUKernels, host_memory, prepare
from minivllm.cpu.threads import StepThreads
from minivllm.executor import memory
from minivllm.executor.torch_executor import TorchExecutor

if TYPE_CHECKING:
    from minivllm.engine.args import EngineArgs
    from minivllm.loading.weights import LoadedModel


def build_torch_executor(
    args: EngineArgs, loaded: LoadedModel, num_tier_slots: int = 0
) -> tuple[TorchExecutor, SchedulerConfig, CacheConfig]:
    """The executor for `loaded`, whose model it takes over, with the configs of a scheduler that feeds it.

    `num_tier_slots`: blocks of a second tier, in host memory.
    ValueError if the settings do not fit the model, or the machine.
    """
    kernels = args.cpu_kernels if isinstance(args.cpu_kernels, CPUKernels) else CPUKernels.all(args.cpu_kernels)
    attention = get_backend(args.attention_backend, in_place=kernels.paged_decode)
    weight = next(loaded.model.parameters())
    device, dtype = weight.device, weight.dtype
    max_model_len = _check_model_len(loaded, args.max_model_len)
    scheduler_config = args.scheduler_config(max_model_len, memory.batch_limits(device))
    model = prepare(loaded.model, kernels)
    cache_config = args.cache_config(_choose_num_blocks(args, loaded, scheduler_config, device, dtype))
    cache_config.check_one_request_fits(max_model_len)
    num_blocks, block_size = cache_config.num_blocks, args.block_size
    bytes_per_block = memory.kv_bytes_per_block(loaded.config, block_size, dtype)
    memory.check_pool_fits_memory(num_blocks, bytes_per_block, device)
    zeros = {"zeros": host_memory.zeros} if kernels.mapped_memory else {}
    kv_cache = KVCache(loaded.config, num_blocks, block_size, dtype, device, **zeros)
    tier = None
    if num_tier_slots:
        host = torch.device("cpu")
        memory.check_pool_fits_memory(num_tier_slots, bytes_per_block, host)
        tier = KVCache(loaded.config, num_tier_slots, block_size, dtype, host, **zeros)
    threads = StepThreads() if kernels.adaptive_threads and device.type == "cpu" else None
    executor = TorchExecutor(model, kv_cache, attention, max_model_len, tier=tier, threads=threads)
    return executor, scheduler_config, cache_config


def _check_model_len(loaded: LoadedModel, max_model_len: int | None) -> int:
    longest = loaded.config.max_model_len
    if max_model_len is None:
        return longest
    if max_model_len > longest:
        raise ValueError(f"max_model_len={max_model_len:,} is more than {loaded.name} can do: {longest:,} tokens.")
    return max_model_len


def _choose_num_blocks(
    args: EngineArgs, loaded: LoadedModel, config: SchedulerConfig, device: torch.device, dtype: torch.dtype
) -> int:
    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override
    if args.kv_cache_memory_bytes is not None:
        available = args.kv_cache_memory_bytes
    elif device.type == "cuda":
        peak, others = memory.profile_cuda_peak(loaded.model, loaded.config, device, config.max_num_batched_tokens)
        total = torch.cuda.get_device_properties(device).total_memory
        available = memory.cuda_kv_bytes(total, others, peak, args.gpu_memory_utilization)
    else:
        available = memory.cpu_kv_bytes()
    return memory.choose_num_blocks(
        loaded.config,
        block_size=args.block_size,
        dtype=dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        available_bytes=available,
    )
