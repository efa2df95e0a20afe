"""What a caller gets back. Names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.executor.base import PositionLogprobs


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request: the engine's clock, in seconds; None until then."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` sequences. `token_ids` holds an EOS or stop token that ended it; `text` does not.

    finish_reason: "stop", "length", "abort" or "error"; None while it runs.
    stop_reason: the stop string or token id that ended it; None for EOS and everything else.
    logprobs: one {token id: Logprob} per token, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request. `num_cached_tokens`: prompt tokens that the prefix cache had at its first admission."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    metrics: RequestMetrics | None = field(default=None, repr=False)
