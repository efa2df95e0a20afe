"""The real thing: a torch model over a paged KV cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minivllm.attention import AttentionBackend, AttentionMetadata, KVCache
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.cpu.threads import StepThreads, one_thread_after_fork
from minivllm.executor.base import ModelOutput, PositionLogprobs
from minivllm.executor.sampler import sample, top_logprobs
from minivllm.models.causal_lm import CausalLM
from minivllm.sampling_params import SamplingParams
from minivllm.units import cdiv

one_thread_after_fork()

# Rows of logits that are in memory at once when a whole prompt's are wanted: 256 x 50,000 x 4 bytes = 51 MB.
LOGITS_CHUNK = 256


@dataclass(slots=True)
class CachedRequestState:
    """What the executor keeps of a request: the scheduler tells it once, and then only what is new."""

    request_id: str
    token_ids: list[int]  # prompt and output
    num_prompt_tokens: int
    sampling_params: SamplingParams
    end_token_ids: frozenset[int]
    block_table: np.ndarray  # [max_blocks], 0 behind the end
    num_blocks: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class TorchExecutor:
    """Owns the weights, the KV cache, and the tokens and block table of each request.

    `tier` holds the pages of a second tier, one block a slot; `threads` chooses torch's threads for each step.
    on_step: a hook, `on_step(scheduler_output, metadata)` before each forward pass.
    on_logits: a hook, `on_logits(request, first_position, logits [n, V])`; while it is set, logits are computed for
    every token of every step.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        attention: AttentionBackend,
        max_model_len: int,
        tier: KVCache | None = None,
        threads: StepThreads | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.tier = tier
        self.threads = threads or contextlib.nullcontext()
        self.attention = attention
        self.block_size = kv_cache[0].block_size
        self.device = kv_cache[0].device
        self.num_heads = model.config.num_attention_heads
        self.max_blocks_per_request = cdiv(max_model_len, self.block_size)
        self.requests: dict[str, CachedRequestState] = {}
        self.on_step: Callable[[SchedulerOutput, AttentionMetadata], None] | None = None
        self.on_logits: Callable[[CachedRequestState, int, Tensor], None] | None = None

    @torch.inference_mode()
    def execute(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """One forward pass over everything that was scheduled, then one sampled token per finished prompt."""
        self._update_states(scheduler_output)
        if scheduler_output.stores or scheduler_output.loads:
            self._transfer(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return ModelOutput([])
        token_ids, positions, metadata = self._prepare(scheduler_output)
        if self.on_step is not None:
            self.on_step(scheduler_output, metadata)
        layers = self.kv_cache.layers
        plan = self.attention.plan(metadata, self.num_heads, layers[0])

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = layers[layer]
            cache.write(key, value, metadata.slot_mapping)
            return self.attention.forward(query, cache, plan)

        with self.threads, _no_autocast(self.device.type):
            hidden = self.model(token_ids, positions, attend)
            return self._sample(scheduler_output, hidden, metadata.query_start_loc)

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Bring requests and block tables up to date with what the scheduler has decided."""
        if scheduler_output.start_over:
            self.requests.clear()
        for request_id in scheduler_output.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in scheduler_output.new_requests:
            self.requests[new.request_id] = CachedRequestState(
                new.request_id,
                list(new.token_ids),
                new.num_prompt_tokens,
                new.sampling_params,
                new.end_token_ids,
                np.zeros(self.max_blocks_per_request, dtype=np.int64),
            )
        for request_id, block_ids in scheduler_output.new_block_ids.items():
            request = self.requests[request_id]
            if request_id in scheduler_output.num_hit_tokens:  # admitted in this step: the whole table comes
                request.num_blocks = 0
                request.block_table[:] = 0
            end = request.num_blocks + len(block_ids)
            request.block_table[request.num_blocks : end] = block_ids
            request.num_blocks = end

    def _transfer(self, scheduler_output: SchedulerOutput) -> None:
        assert self.tier is not None, "the scheduler has a second tier, and this executor has none"
        if scheduler_output.stores:
            self.tier.copy_blocks(self.kv_cache, scheduler_output.stores)
        if scheduler_output.loads:
            self.kv_cache.copy_blocks(self.tier, scheduler_output.loads)

    def _prepare(self, scheduler_output: SchedulerOutput) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """token_ids [T], positions [T] and the attention metadata of a step."""
        token_ids: list[int] = []
        query_lens, seq_lens, tables = [], [], []
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            request, start = self.requests[request_id], scheduler_output.num_computed_tokens[request_id]
            token_ids += request.token_ids[start : start + num_scheduled]
            query_lens.append(num_scheduled)
            seq_lens.append(start + num_scheduled)
            tables.append(request.block_table)
        block_tables = np.stack(tables)[:, : cdiv(max(seq_lens), self.block_size)]

        query_start_loc = np.concatenate([[0], np.cumsum(query_lens)])
        row = np.repeat(np.arange(len(seq_lens)), query_lens)  # [T]: the request of each token
        offset_in_chunk = np.arange(len(token_ids)) - query_start_loc[row]
        positions = (np.array(seq_lens) - query_lens)[row] + offset_in_chunk
        block, offset = np.divmod(positions, self.block_size)
        slot_mapping = block_tables[row, block] * self.block_size + offset

        def to_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(self.device, non_blocking=True)

        metadata = AttentionMetadata(
            slot_mapping=to_device(slot_mapping),
            block_tables=to_device(np.ascontiguousarray(block_tables)),
            query_start_loc=query_start_loc.tolist(),
            seq_lens=seq_lens,
        )
        return to_device(np.array(token_ids, dtype=np.int64)), to_device(positions), metadata

    def _sample(self, scheduler_output: SchedulerOutput, hidden: Tensor, query_start_loc: Sequence[int]) -> ModelOutput:
        # Only the last token of a request whose known tokens are all computed has something to say.
        rows, requests = [], []
        sampled: list[list[int]] = []
        samples: list[list[int]] = []  # of `sampled`, those that get a token
        for i, (request_id, num_scheduled) in enumerate(scheduler_output.num_scheduled_tokens.items()):
            request = self.requests[request_id]
            tokens: list[int] = []
            sampled.append(tokens)
            if scheduler_output.num_computed_tokens[request_id] + num_scheduled >= len(request.token_ids):
                rows.append(query_start_loc[i + 1] - 1)
                requests.append(request)
                samples.append(tokens)
        if self.on_logits is not None:
            self._show_logits(scheduler_output, hidden, query_start_loc)
        result = ModelOutput(sampled, prompt_logprobs=self._prompt_logprobs(scheduler_output, hidden, query_start_loc))
        if rows:
            last = hidden if len(rows) == len(hidden) else hidden[rows]
            logits = self.model.compute_logits(last).float()
            token_ids, reported = sample(logits, requests)
            result.logprobs = {request_id: [row] for request_id, row in reported.items()}
            for request, tokens, token_id in zip(requests, samples, token_ids, strict=True):
                tokens.append(token_id)
                request.token_ids.append(token_id)
        return result

    def _prompt_logprobs(
        self, scheduler_output: SchedulerOutput, hidden: Tensor, query_start_loc: Sequence[int]
    ) -> dict[str, dict[int, PositionLogprobs]]:
        """Logprobs of prompt tokens: the row at position p judges the token at p + 1."""
        result: dict[str, dict[int, PositionLogprobs]] = {}
        for i, (request_id, num_scheduled) in enumerate(scheduler_output.num_scheduled_tokens.items()):
            request = self.requests[request_id]
            count = request.sampling_params.prompt_logprobs
            if count is None:
                continue
            first = scheduler_output.num_computed_tokens[request_id]
            end = min(first + num_scheduled, request.num_prompt_tokens - 1)
            judged = result.setdefault(request_id, {})
            for start in range(first, end, LOGITS_CHUNK):
                stop = min(start + LOGITS_CHUNK, end)
                row = query_start_loc[i] + start - first
                logits = self.model.compute_logits(hidden[row : row + stop - start]).float()
                targets = request.token_ids[start + 1 : stop + 1]
                reports = top_logprobs(logits.log_softmax(dim=-1), targets, [count] * len(targets))
                judged.update(zip(range(start + 1, stop + 1), reports, strict=True))
        return result

    def _show_logits(self, scheduler_output: SchedulerOutput, hidden: Tensor, query_start_loc: Sequence[int]) -> None:
        assert self.on_logits is not None
        logits = self.model.compute_logits(hidden).float()
        for i, request_id in enumerate(scheduler_output.num_scheduled_tokens):
            first = scheduler_output.num_computed_tokens[request_id]
            self.on_logits(self.requests[request_id], first, logits[query_start_loc[i] : query_start_loc[i + 1]])


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """What a caller has wrapped around us changes no dtype here."""
    is_on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else contextlib.nullcontext()
