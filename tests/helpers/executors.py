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


class FillingExecutor(TokenExecutor):
    """Keeps what a model would have in its cache: the token of each slot. A hit on a block that was never filled, or
    with other tokens, is an error, and so is a load of what was never stored."""

    def __init__(self, next_token: Callable[[str, int], int] = lambda request_id, j: 7, block_size: int = 4) -> None:
        super().__init__(next_token)
        self.block_size = block_size
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.blocks: dict[int, list[int | None]] = {}  # what the pages hold
        self.tier: dict[int, list[int | None]] = {}  # and a second tier, by slot
        self.wrong: list[str] = []

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        size = self.block_size
        for request in output.new_requests:
            self.tokens[request.request_id] = list(request.token_ids)
        for request_id, block_ids in output.new_block_ids.items():
            if request_id in output.num_hit_tokens:
                self.tables[request_id] = []
            self.tables[request_id] += block_ids
        for block_id, slot in output.stores:
            self.tier[slot] = list(self.blocks[block_id])
        for slot, block_id in output.loads:
            self.blocks[block_id] = list(self.tier[slot])
        sampled = self.sample(output)
        chunks = []
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            start, table = output.num_computed_tokens[request_id], self.tables[request_id]
            tokens = self.tokens[request_id]
            chunks.append((request_id, start + num_scheduled))
            for i in range(start, start + num_scheduled):  # all are written before any is read
                self.blocks.setdefault(table[i // size], [None] * size)[i % size] = tokens[i]
        for request_id, end in chunks:
            held = [token for block_id in self.tables[request_id] for token in self.blocks.get(block_id, [None] * size)]
            if held[:end] != self.tokens[request_id][:end]:
                self.wrong.append(request_id)
        for request_id, new in zip(output.num_scheduled_tokens, sampled, strict=True):
            self.tokens[request_id] += new
        return ModelOutput(sampled)
