"""Executors without a model: they learn of requests through data alone, as any executor must."""

from __future__ import annotations

from collections.abc import Callable

from minivllm.core import SchedulerOutput
from minivllm.executor.base import ModelOutput


class TokenExecutor:
    """Output token j of a request is `next_token(request_id, j)`."""

    def __init__(self, next_token: Callable[[str, int], int] = lambda request_id, j: 7) -> None:
        self.next_token = next_token
        self.known: dict[str, list[int]] = {}  # request id -> [prompt tokens, all tokens]

    def execute(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        return ModelOutput(self.sample(scheduler_output))

    def sample(self, output: SchedulerOutput) -> list[list[int]]:
        """A token for each request whose known tokens are all computed after this step."""
        for request in output.new_requests:
            self.known[request.request_id] = [request.num_prompt_tokens, len(request.token_ids)]
        sampled: list[list[int]] = []
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            known = self.known[request_id]
            if output.num_computed_tokens[request_id] + num_scheduled < known[1]:
                sampled.append([])
                continue
            sampled.append([self.next_token(request_id, known[1] - known[0])])
            known[1] += 1
        return sampled
