"""What a user sets: the cache and the scheduler, checked when they are made.

Names and defaults are those of vLLM 0.30.0. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.checks import is_finite, require_bool, require_int
from minivllm.theory import sizing
from minivllm.units import cdiv

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache pool: `num_blocks` blocks of `block_size` tokens, the null block included."""

    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    watermark: float = 0.0

    def __post_init__(self) -> None:
        require_int("block_size", self.block_size, 1)
        require_int("num_blocks", self.num_blocks, 2)
        require_bool("enable_prefix_caching", self.enable_prefix_caching)
        if not is_finite(self.watermark) or not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark is a fraction of all blocks and must be in [0, 1), got {self.watermark!r}.")

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can have: all but the null block."""
        return self.num_blocks - 1

    def max_concurrency(self, max_model_len: int) -> float:
        """Requests of `max_model_len` tokens that the pool holds, the null block counted in as vLLM does."""
        return sizing.concurrency(self.num_blocks, cdiv(max_model_len, self.block_size))

    def capacity_report(self, max_model_len: int, device_type: str = "cpu") -> str:
        """The line that vLLM 0.30.0 logs at start (kv_cache_utils.py, update_kv_cache_capacity)."""
        concurrency = self.max_concurrency(max_model_len)
        device = "GPU" if device_type == "cuda" else device_type.upper()
        return (
            f"{device} KV cache size: {int(concurrency * max_model_len):,} tokens, "
            f"Maximum concurrency for {max_model_len:,} tokens per request: {concurrency:.2f}x"
        )

    def blocks_of_request(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` holds at its end. The last token is sampled and never written."""
        return cdiv(num_tokens - 1, self.block_size)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request that the pool holds."""
        return self.num_usable_blocks * self.block_size + 1

    def check_one_request_fits(self, max_model_len: int) -> None:
        """Refuse a pool in which a request of `max_model_len` could never finish."""
        needed = self.blocks_of_request(max_model_len)
        if needed > self.num_usable_blocks:
            raise ValueError(
                f"One request of max_model_len={max_model_len:,} tokens needs {needed:,} KV blocks of "
                f"{self.block_size}, but the pool has {self.num_usable_blocks:,} usable blocks "
                f"({self.num_blocks:,} less the null block). The largest max_model_len that fits is "
                f"{self.longest_request:,}. Lower max_model_len or give the cache more memory."
            )


@dataclass(frozen=True)
class SchedulerConfig:
    """What one step may hold, and who goes first."""

    max_model_len: int
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True

    def __post_init__(self) -> None:
        require_int("max_model_len", self.max_model_len, 1)
        require_int("max_num_seqs", self.max_num_seqs, 1)
        require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        require_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        require_bool("enable_chunked_prefill", self.enable_chunked_prefill)
        if self.policy not in POLICIES:
            raise ValueError(
                f"policy (LLM's scheduling_policy) must be one of {', '.join(POLICIES)}, got {self.policy!r}."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running request needs one token of every step's budget. "
                f"Raise the first or lower the second."
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"With chunked prefill off a prompt must fit into one step, but max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) is smaller than max_model_len ({self.max_model_len}). "
                f"Raise the first, lower the second, or turn chunked prefill on."
            )
        if self.long_prefill_token_threshold > self.max_model_len:
            raise ValueError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) must not exceed "
                f"max_model_len ({self.max_model_len})."
            )
