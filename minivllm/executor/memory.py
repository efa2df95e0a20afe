"""How many KV blocks the machine can hold, and what to run on."""

from __future__ import annotations

import torch

from minivllm.config import CacheConfig
from minivllm.cpu.host_memory import total_memory
from minivllm.model_config import ModelConfig
from minivllm.models.causal_lm import CausalLM
from minivllm.models.layers import causal_attend
from minivllm.theory import sizing
from minivllm.theory.defaults import default_batch_limits
from minivllm.units import GIB, cdiv

DEFAULT_CPU_KV_BYTES = 1 * GIB


def resolve_device(device: str | torch.device) -> tuple[torch.device, str | None]:
    """The device to run on, and a word to the user where it is not what one would expect.

    "auto": CUDA if there is one; Apple's MPS if a small attention runs on it; otherwise the CPU.
    """
    if str(device) != "auto":
        chosen: torch.device | None
        try:
            chosen = torch.device(device)
        except (RuntimeError, TypeError):
            chosen = None
        if chosen is None or chosen.type not in ("cpu", "cuda", "mps"):
            raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'mps', got {device!r}.")
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device='{device}', but torch {torch.__version__} sees no CUDA GPU. Use device='cpu'.")
        return chosen, None
    if torch.cuda.is_available():
        return torch.device("cuda"), None
    if torch.backends.mps.is_available():
        problem = _try_mps()
        if problem is None:
            return torch.device("mps"), None
        return torch.device("cpu"), f"MPS is present but failed a trial ({problem}); using the CPU."
    return torch.device("cpu"), None


def _try_mps() -> str | None:
    try:
        x = torch.ones(1, 2, 4, 8, device="mps")
        mask = torch.ones(4, 4, dtype=torch.bool, device="mps").tril()
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        y.view(-1).index_copy_(0, torch.arange(8, device="mps"), x.view(-1)[:8])
        return None if torch.isfinite(y).all().item() else "attention gave NaN"
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of all layers, by the book's formula."""
    return int(sizing.kv_bytes_per_block(config.spec, block_size, str(dtype)))


def batch_limits(device: torch.device) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of vLLM 0.30.0's offline LLM class for this device."""
    if device.type != "cuda":
        return 4096, 256
    memory = torch.cuda.get_device_properties(device).total_memory
    return default_batch_limits(memory, torch.cuda.get_device_name(device), server=False)


def choose_num_blocks(
    config: ModelConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
    available_bytes: int,
) -> int:
    """Blocks that fit into `available_bytes`, the null block included, but no more than `max_num_seqs` requests of
    full length could use. ValueError if there is not room for a single request of `max_model_len`."""
    per_block = kv_bytes_per_block(config, block_size, dtype)
    num_blocks = available_bytes // per_block
    useful = max_num_seqs * cdiv(max_model_len, block_size) + 1
    num_blocks = min(num_blocks, useful)
    if num_blocks < 2:
        raise ValueError(
            f"No room for the KV cache: {max(available_bytes, 0) / GIB:.3f} GiB are left for it, and one block of "
            f"{block_size} tokens takes {per_block / GIB:.4f} GiB; two are the least (one is the null block). "
            f"Give it more memory (kv_cache_memory_bytes, gpu_memory_utilization) or use a smaller model."
        )
    CacheConfig(num_blocks=num_blocks, block_size=block_size).check_one_request_fits(max_model_len)
    return num_blocks


def cpu_kv_bytes() -> int:
    """The default on a CPU: 1 GiB, or a quarter of the machine's memory where that is less."""
    return min(DEFAULT_CPU_KV_BYTES, (total_memory(torch.device("cpu")) or 4 * DEFAULT_CPU_KV_BYTES) // 4)


def check_pool_fits_memory(num_blocks: int, bytes_per_block: int, device: torch.device) -> None:
    """ValueError for a pool larger than the device's memory. A system that hands out memory only when it is touched
    would grant it, and stop the process much later."""
    total, wanted = total_memory(device), num_blocks * bytes_per_block
    if total is not None and wanted > total:
        raise ValueError(
            f"{num_blocks:,} KV blocks take {wanted / GIB:,.1f} GiB, but this {device.type} has "
            f"{total / GIB:,.1f} GiB of memory in all. At most {total // bytes_per_block:,} blocks would fit, "
            f"without the weights; ask for less."
        )


def cuda_kv_bytes(total: int, used_by_others: int, peak: int, utilization: float) -> int:
    """What `gpu_memory_utilization` leaves for the cache: its share of the GPU, less everything that is already
    there or will be during a step. `peak` is this process's profiled maximum: weights and activations, in bytes."""
    return int(total * utilization) - used_by_others - peak


@torch.inference_mode()
def profile_cuda_peak(model: CausalLM, config: ModelConfig, device: torch.device, num_tokens: int) -> tuple[int, int]:
    """(peak bytes of this process, bytes used by others) in a forward pass over `num_tokens` tokens.

    The pass attends within itself and samples for every row, so it is at least as large as any real step.
    """
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    positions = torch.arange(num_tokens, device=device) % config.max_position_embeddings

    hidden = model(torch.zeros_like(positions), positions, causal_attend)
    model.compute_logits(hidden[:1024]).float().softmax(dim=-1)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return peak, max(used_by_others, 0)
