"""What vLLM 0.30.0 sets where its user sets nothing."""

from __future__ import annotations

from minivllm.units import GIB


def default_batch_limits(memory_bytes: float, device_name: str, *, server: bool) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) that vLLM 0.30.0 starts with on an accelerator: `vllm serve` if `server`,
    otherwise its offline LLM class (engine/arg_utils.py, get_batch_defaults)."""
    name = device_name.lower()
    if memory_bytes >= 160 * GIB:
        tokens, seqs = (16384, 16384), 1024
    elif memory_bytes >= 70 * GIB and "a100" not in name:
        tokens, seqs = (16384, 8192), 1024
    else:
        tokens, seqs = (8192, 2048), 256
    tokens = {"tpu-v5e": (1024, 512), "tpu-v5p": (512, 256), "tpu-v6e": (2048, 1024)}.get(name, tokens)
    return tokens[server], seqs
