"""A request: its tokens, how far they are computed, and why it ended."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from minivllm.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    # From here on the request has ended; the order matters to `is_finished`.
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
}


class Request:
    """One sequence on its way through the engine.

    `num_computed_tokens` chases `num_tokens`: a long gap is a prefill, a gap of one is a decode.
    `stop_token_ids` includes the model's further EOS ids; `eos_token_id` is None where EOS is ignored. What may not
    come before min_tokens is `end_token_ids`: EOS, ignored or not, and the stop tokens. Only the scheduler writes
    `status`.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "end_token_ids",
        "eos_token_id",
        "lora_name",
        "max_num_tokens",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_ready_tokens",
        "num_tokens",
        "priority",
        "request_id",
        "sampling_params",
        "status",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        eos_token_id: int | None = None,
        stop_token_ids: Sequence[int] = (),
        end_token_ids: Sequence[int] = (),
        max_tokens: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.lora_name = lora_name
        self.eos_token_id = eos_token_id
        self.stop_token_ids = frozenset(stop_token_ids)
        self.end_token_ids = frozenset(end_token_ids)
        self.max_tokens = sampling_params.max_tokens if max_tokens is None else max_tokens

        self.all_token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_tokens = self.num_prompt_tokens  # a plain field: the scheduler reads it at every step
        self.num_computed_tokens = 0
        # Set by the scheduler: prompt and output together can become as long as this.
        self.max_num_tokens = 0
        # Set by the KV manager: up to so many computed tokens, the request needs nothing from it.
        self.num_ready_tokens = 0
        self.block_hashes: list[bytes] = []
        self.num_cached_tokens = -1  # prefix-cache hits at the first admission; -1 until then

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.num_preemptions = 0

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Prompt logprobs need a forward pass over the whole prompt, so a hit would lose some of them."""
        return self.sampling_params.prompt_logprobs is not None

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> str | None:
        return FINISH_REASONS.get(self.status)

    def truncate_output(self, num_output_tokens: int) -> None:
        """Forget output tokens beyond so many: a step that was cut short samples them again."""
        del self.all_token_ids[self.num_prompt_tokens + num_output_tokens :]
        self.num_tokens = len(self.all_token_ids)
        del self.block_hashes[:]
        self.stop_reason = None

    def __lt__(self, other: Request) -> bool:
        """Priority order: the smaller (priority, arrival time) goes first; ids break ties."""
        return (self.priority, self.arrival_time, self.request_id) < (
            other.priority,
            other.arrival_time,
            other.request_id,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} computed)"
        )
