"""A step as data: ids and numbers, so that what computes it can be in another process, or a model of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.sampling_params import SamplingParams


@dataclass(slots=True)
class NewRequestData:
    """What an executor needs of a request and is told once; it keeps the tokens, and adds those that it samples."""

    request_id: str
    token_ids: list[int]  # the prompt; for a request that starts over, its output so far too
    num_prompt_tokens: int
    sampling_params: SamplingParams
    end_token_ids: frozenset[int]  # EOS and stop tokens, which may not come before min_tokens


@dataclass(slots=True)
class SchedulerOutput:
    """What one step computes, and what an executor must know to keep its own state in step.

    `num_scheduled_tokens` (request id -> tokens to compute, in scheduling order) is the step itself. Tokens
    `num_computed_tokens[id]` and on of a request are computed; those before are in the cache already.
    `new_block_ids` holds the whole table of a request that is admitted in this step (its first `num_hit_tokens[id]`
    tokens are hits of the prefix cache, or loaded), and only the additions of one that was running.
    With a second tier: `stores` are copied first, then `loads`, then the pass runs.
    """

    step: int
    new_requests: list[NewRequestData] = field(default_factory=list)  # admitted for the first time
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    num_computed_tokens: dict[str, int] = field(default_factory=dict)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    num_hit_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: list[str] = field(default_factory=list)  # in this step, or by a reset before it
    # Ended since the step before: an executor can forget them. Comes before new_requests: an id may be used again.
    finished_req_ids: list[str] = field(default_factory=list)
    stores: list[tuple[int, int]] = field(default_factory=list)  # (block, slot of the second tier)
    loads: list[tuple[int, int]] = field(default_factory=list)  # (slot, block)
    # An earlier step was cut short. An executor forgets everybody; whoever goes on is in new_requests again.
    start_over: bool = False
    # Counts right after scheduling, for the event log.
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
