"""What the engine needs from whatever computes a step: a real model, or a model of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minivllm.core.scheduler_output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token (natural logarithm, before penalties and temperature); rank 1 is the likeliest."""

    logprob: float
    rank: int


# The reported tokens of one position: token id -> Logprob, the token itself first, then the likeliest.
PositionLogprobs = Mapping[int, Logprob]


@dataclass(slots=True)
class ModelOutput:
    """What a step computed.

    sampled_token_ids: a list for each scheduled request, in scheduling order: empty while its prompt is unfinished,
    one token as a rule, several if drafts were accepted.
    logprobs: request id -> logprobs of each sampled token, for requests that asked.
    prompt_logprobs: request id -> {position of a prompt token: its logprobs}, for requests that asked.
    """

    sampled_token_ids: Sequence[Sequence[int]]
    logprobs: Mapping[str, Sequence[PositionLogprobs]] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Mapping[int, PositionLogprobs]] = field(default_factory=dict)


class Executor(Protocol):
    """Runs one step. The scheduler decides and the executor computes; neither looks into the other: what passes
    between them is data, and can go through a pipe."""

    def execute(self, scheduler_output: SchedulerOutput) -> ModelOutput: ...
