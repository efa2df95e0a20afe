"""The real thing: a torch model over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from minivllm.attention import AttentionMetadata, get_backend, write_kv
from minivllm.core.scheduler import SchedulerOutput
from minivllm.cpu import host_memory
from minivllm.executor.base import ModelOutput, PositionLogprobs
from minivllm.executor.sampler import sample, top_logprobs
from minivllm.model_config import ModelConfig
from minivllm.request import Request
from minivllm.units import cdiv

# Rows of logits that are in memory at once when a whole prompt's are wanted: 256 x 50,000 x 4 bytes = 51 MB.
LOGITS_CHUNK = 256


class TorchExecutor:
    """Owns the weights, the KV cache and one block table per running request.

    kv_cache: [layers, 2, num_blocks, block_size, num_kv_heads, head_dim].
    on_logits: a hook for tests, `on_logits(request, first_position, logits [n, V])`; while it is set, logits are
    computed for every token of every step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        attention_backend: str = "fast",
    ) -> None:
        self.model = model
        self.attention = get_backend(attention_backend)
        self.block_size = block_size
        self.max_blocks_per_request = cdiv(max_model_len, block_size)
        weight = next(model.parameters())
        self.device = weight.device
        shape = (config.num_hidden_layers, 2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.kv_cache = host_memory.zeros(shape, weight.dtype, weight.device)
        self.layer_caches = self.kv_cache.unbind(0)
        self.block_tables: dict[str, np.ndarray] = {}
        self.num_blocks_of: dict[str, int] = {}
        self.on_logits: Callable[[Request, int, Tensor], None] | None = None

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelOutput:
        """One forward pass over everything that was scheduled, then one sampled token per finished prompt."""
        self._update_block_tables(output)
        if not output.scheduled:
            return ModelOutput([])
        token_ids, positions, metadata = self._prepare(output)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            layer_cache = self.layer_caches[layer]
            write_kv(layer_cache, key, value, metadata.slot_mapping)
            return self.attention(query, layer_cache, metadata)

        hidden = self.model(token_ids, positions, attend)
        return self._sample(output, hidden, metadata.query_start_loc)

    def _update_block_tables(self, output: SchedulerOutput) -> None:
        for request_id in [*output.finished_req_ids, *(request.request_id for request in output.preempted)]:
            self.block_tables.pop(request_id, None)
            self.num_blocks_of.pop(request_id, None)
        for request_id, block_ids in output.new_block_ids.items():
            if request_id in output.num_hit_tokens:  # admitted in this step: the whole table comes
                self.block_tables[request_id] = np.zeros(self.max_blocks_per_request, dtype=np.int64)
                self.num_blocks_of[request_id] = 0
            first = self.num_blocks_of[request_id]
            self.block_tables[request_id][first : first + len(block_ids)] = block_ids
            self.num_blocks_of[request_id] = first + len(block_ids)

    def _prepare(self, output: SchedulerOutput) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """token_ids [T], positions [T] and the attention metadata of a step."""
        token_ids: list[int] = []
        query_lens, seq_lens = [], []
        for request in output.scheduled:
            num_scheduled = output.num_scheduled_tokens[request.request_id]
            end = request.num_computed_tokens  # the scheduler has advanced it past this step
            token_ids += request.all_token_ids[end - num_scheduled : end]
            query_lens.append(num_scheduled)
            seq_lens.append(end)
        width = cdiv(max(seq_lens), self.block_size)
        tables = np.stack([self.block_tables[request.request_id][:width] for request in output.scheduled])

        query_start_loc = np.concatenate([[0], np.cumsum(query_lens)])
        row = np.repeat(np.arange(len(seq_lens)), query_lens)  # [T]: the request of each token
        offset_in_chunk = np.arange(len(token_ids)) - query_start_loc[row]
        positions = (np.array(seq_lens) - query_lens)[row] + offset_in_chunk
        block, offset = np.divmod(positions, self.block_size)
        slot_mapping = tables[row, block] * self.block_size + offset

        def to_device(array: np.ndarray | list[int]) -> Tensor:
            return torch.as_tensor(array, dtype=torch.int64).to(self.device, non_blocking=True)

        metadata = AttentionMetadata(
            slot_mapping=to_device(slot_mapping),
            block_tables=to_device(tables),
            query_start_loc=query_start_loc.tolist(),
            seq_lens=seq_lens,
        )
        return to_device(token_ids), to_device(positions), metadata

    def _sample(self, output: SchedulerOutput, hidden: Tensor, query_start_loc: Sequence[int]) -> ModelOutput:
        # Only the last token of a request whose known tokens are all computed has something to say.
        rows, requests = [], []
        sampled: list[int | None] = [None] * len(output.scheduled)
        places = []
        for i, request in enumerate(output.scheduled):
            if request.num_computed_tokens >= request.num_tokens:
                rows.append(query_start_loc[i + 1] - 1)
                requests.append(request)
                places.append(i)
        if self.on_logits is not None:
            self._show_logits(output, hidden, query_start_loc)
        result = ModelOutput(sampled, prompt_logprobs=self._prompt_logprobs(output, hidden, query_start_loc))
        if rows:
            last = hidden if len(rows) == len(hidden) else hidden[rows]
            logits = self.model.compute_logits(last).float()
            token_ids, result.logprobs = sample(logits, requests)
            for place, token_id in zip(places, token_ids, strict=True):
                sampled[place] = token_id
        return result

    def _prompt_logprobs(
        self, output: SchedulerOutput, hidden: Tensor, query_start_loc: Sequence[int]
    ) -> dict[str, dict[int, PositionLogprobs]]:
        """Logprobs of prompt tokens: the row at position p judges the token at p + 1."""
        result: dict[str, dict[int, PositionLogprobs]] = {}
        for i, request in enumerate(output.scheduled):
            count = request.sampling_params.prompt_logprobs
            if count is None:
                continue
            first = request.num_computed_tokens - output.num_scheduled_tokens[request.request_id]
            end = min(request.num_computed_tokens, request.num_prompt_tokens - 1)
            judged = result.setdefault(request.request_id, {})
            for start in range(first, end, LOGITS_CHUNK):
                stop = min(start + LOGITS_CHUNK, end)
                row = query_start_loc[i] + start - first
                logits = self.model.compute_logits(hidden[row : row + stop - start]).float()
                targets = request.all_token_ids[start + 1 : stop + 1]
                reports = top_logprobs(logits.log_softmax(dim=-1), targets, [count] * len(targets))
                judged.update(zip(range(start + 1, stop + 1), reports, strict=True))
        return result

    def _show_logits(self, output: SchedulerOutput, hidden: Tensor, query_start_loc: Sequence[int]) -> None:
        logits = self.model.compute_logits(hidden).float()
        for i, request in enumerate(output.scheduled):
            first = request.num_computed_tokens - output.num_scheduled_tokens[request.request_id]
            self.on_logits(request, first, logits[query_start_loc[i] : query_start_loc[i + 1]])
