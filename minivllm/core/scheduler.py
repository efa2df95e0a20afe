"""Which tokens the next forward pass computes: the scheduler of vLLM 0.30.0 (v1/core/sched/scheduler.py).

There is no prefill phase and no decode phase. Each request has `num_computed_tokens` chasing its `num_tokens`, and
a step hands out a budget of tokens: first to the running requests, then to the waiting ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.block_pool import FreeKVCacheBlockQueue, MakeFreeBlocks
from minivllm.core.block_tier import BlockTier
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.request_queue import create_request_queue
from minivllm.core.scheduler_output import NewRequestData, SchedulerOutput
from minivllm.request import Request, RequestStatus


class Scheduler:
    """Owns every request from `add_request` until it ends; decides, and never computes."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        free_blocks: MakeFreeBlocks = FreeKVCacheBlockQueue,
        tier: BlockTier | None = None,
    ) -> None:
        """`free_blocks` makes the eviction order of the pool; `tier`, if any, keeps what the pool forgets."""
        self.config = config
        self.max_model_len = config.max_model_len
        self.kv_cache_manager = KVCacheManager(cache_config, config.max_model_len, free_blocks, tier)
        self.requests: dict[str, Request] = {}
        self.waiting = create_request_queue(config.policy)
        self.running: list[Request] = []
        self.num_steps = 0
        # What the next step reports.
        self._finished_req_ids: list[str] = []
        self._preempted_req_ids: list[str] = []
        self._starts_over = False

    # ---- requests come and go ----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request; ValueError if its id is in use or it could never run in this pool."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use; give each request an id of its own.")
        self.check_fits(request)
        self._queue(request)

    def _queue(self, request: Request) -> None:
        request.max_num_tokens = self._longest(request)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def _longest(self, request: Request) -> int:
        max_tokens = self.max_model_len if request.max_tokens is None else request.max_tokens
        return min(request.num_prompt_tokens + max_tokens, self.max_model_len)

    def check_fits(self, request: Request) -> None:
        """ValueError if the pool could not hold the request at its longest, were it alone."""
        longest = self._longest(request)
        cache = self.kv_cache_manager.config
        needed = cache.blocks_of_request(longest)
        if needed > cache.num_usable_blocks:
            raise ValueError(
                f"Request {request.request_id!r} can grow to {longest:,} tokens and then needs {needed:,} KV blocks of "
                f"{cache.block_size}, but the pool has {cache.num_usable_blocks:,} usable blocks "
                f"({cache.longest_request:,} tokens fit). "
                f"Shorten the prompt or max_tokens, or give the cache more memory."
            )

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside (an abort, a stop string); unknown ids are ignored, since a request may have
        ended by itself in the meantime. Returns those that this call ended."""
        ids = [request_ids] if isinstance(request_ids, str) else dict.fromkeys(request_ids)
        requests = [self.requests[request_id] for request_id in ids if request_id in self.requests]
        self._leave_queues(requests)
        for request in requests:
            self._finish(request, status)
        return requests

    def _leave_queues(self, requests: Sequence[Request]) -> None:
        running = {request for request in requests if request.status == RequestStatus.RUNNING}
        if running:
            self.running = [request for request in self.running if request not in running]
        if len(running) < len(requests):
            self.waiting.remove(request for request in requests if request not in running)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        self._finished_req_ids.append(request.request_id)

    # ---- one step ----------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step, give them slots, and advance `num_computed_tokens` past them."""
        output = SchedulerOutput(self.num_steps, start_over=self._starts_over)
        self.num_steps += 1
        output.finished_req_ids, self._finished_req_ids = self._finished_req_ids, []
        budget = self._schedule_running(output)
        # A step that had to preempt is short of blocks; admitting now would only cause the next preemption.
        if not output.preempted_req_ids:
            self._schedule_waiting(output, budget)
        output.preempted_req_ids += self._preempted_req_ids
        self._preempted_req_ids = []
        if self.kv_cache_manager.tier is not None:
            output.stores, output.loads = self.kv_cache_manager.take_transfers()
        output.num_free_blocks = self.kv_cache_manager.block_pool.num_free_blocks
        output.num_running = len(self.running)
        output.num_waiting = len(self.waiting)
        return output

    def _schedule_running(self, output: SchedulerOutput) -> int:
        """Give every running request its next tokens, preempting from the end if blocks run out; the budget left."""
        budget = self.config.max_num_batched_tokens
        threshold = self.config.long_prefill_token_threshold
        last_position = self.max_model_len - 1
        kv, running = self.kv_cache_manager, self.running
        num_scheduled_tokens, num_computed_tokens = output.num_scheduled_tokens, output.num_computed_tokens
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            num_computed = request.num_computed_tokens
            num_new = request.num_tokens - num_computed
            if 0 < threshold < num_new:
                num_new = threshold
            # Conditional expressions, not min(): this loop is the scheduler's cost.
            if num_new > budget:
                num_new = budget
            if num_new > last_position - num_computed:
                num_new = last_position - num_computed
            if num_new == 0:
                index += 1
                continue

            if num_computed + num_new > request.num_ready_tokens:
                new_blocks = kv.allocate_slots(request, num_new)
                while new_blocks is None:
                    victim, victim_index = self._choose_victim()
                    del running[victim_index]
                    if victim_index < index:
                        index -= 1
                    budget += self._preempt(victim, output)
                    if victim is request:
                        return budget  # nobody is left to take blocks from
                    new_blocks = kv.allocate_slots(request, num_new)
                if new_blocks:
                    output.new_block_ids[request.request_id] = [block.block_id for block in new_blocks]

            request_id = request.request_id
            num_scheduled_tokens[request_id] = num_new
            num_computed_tokens[request_id] = num_computed
            request.num_computed_tokens = num_computed + num_new
            budget -= num_new
            index += 1
        return budget

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Admit waiting requests in order until the budget, the seats or the blocks run out."""
        config, kv = self.config, self.kv_cache_manager
        while self.waiting and budget > 0 and len(self.running) < config.max_num_seqs:
            request = self.waiting.peek()
            hits = kv.get_computed_blocks(request)
            num_loads = 0 if kv.tier is None else kv.num_loadable_blocks(request, len(hits))
            num_hit_tokens = (len(hits) + num_loads) * kv.block_size
            num_new = request.num_tokens - num_hit_tokens
            if 0 < config.long_prefill_token_threshold < num_new:
                num_new = config.long_prefill_token_threshold
            if num_new > budget:
                if not config.enable_chunked_prefill:
                    break
                num_new = budget

            new_blocks = kv.allocate_slots(
                request,
                num_new,
                hits,
                num_loads=num_loads,
                admission=True,
                reserve_full_sequence=config.scheduler_reserve_full_isl,
                watermark=bool(self.running),
            )
            if new_blocks is None:
                break  # head-of-line blocking: nobody overtakes

            self.waiting.pop()
            if kv.lookup_enabled(request):
                kv.prefix_cache_stats.record(request, num_hit_tokens, num_loads * kv.block_size)
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = num_hit_tokens
            if request.status == RequestStatus.WAITING:  # otherwise it was preempted, and the executor knows it
                output.new_requests.append(_new_request_data(request))
            request.status = RequestStatus.RUNNING
            request_id = request.request_id
            self.running.append(request)
            output.num_scheduled_tokens[request_id] = num_new
            output.num_computed_tokens[request_id] = num_hit_tokens
            output.new_block_ids[request_id] = kv.get_block_ids(request_id)
            output.num_hit_tokens[request_id] = num_hit_tokens
            request.num_computed_tokens = num_hit_tokens + num_new
            budget -= num_new

    def _choose_victim(self) -> tuple[Request, int]:
        """FCFS: the last to start. PRIORITY: the largest (priority, arrival time)."""
        if self.config.policy == "priority":
            victim = max(self.running, key=lambda request: (request.priority, request.arrival_time))
            return victim, self.running.index(victim)
        return self.running[-1], len(self.running) - 1

    def _preempt(self, victim: Request, output: SchedulerOutput) -> int:
        """Take all blocks of `victim` and queue it again, to be recomputed; returns the budget that this gives back."""
        restored = output.num_scheduled_tokens.pop(victim.request_id, 0)
        num_filled = output.num_computed_tokens.pop(victim.request_id, victim.num_computed_tokens)
        output.new_block_ids.pop(victim.request_id, None)
        # What this step has published for the victim will not be computed: see free_unfilled.
        self.kv_cache_manager.free_unfilled(victim, num_filled)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.waiting.put_back(victim)
        output.preempted_req_ids.append(victim.request_id)
        return restored

    def update_from_output(self, output: SchedulerOutput, sampled: Sequence[Sequence[int]]) -> list[Request]:
        """Append the sampled tokens: a list for each scheduled request, empty while its prompt is unfinished. Tokens
        behind one that ends the request are dropped.

        Returns the requests that ended; their blocks are free again, one request after another. ValueError, with
        nothing changed, if the number of lists is not that of the requests.
        """
        if len(sampled) != len(output.num_scheduled_tokens):
            raise ValueError(
                f"the executor returned {len(sampled)} tokens for {len(output.num_scheduled_tokens)} requests."
            )
        self.kv_cache_manager.confirm_filled()
        self._starts_over = False
        finished: list[Request] = []
        requests = self.requests
        for request_id, token_ids in zip(output.num_scheduled_tokens, sampled, strict=True):
            for token_id in token_ids:
                request = requests[request_id]
                request.all_token_ids.append(token_id)  # written out: a call here is a tenth of the scheduler's cost
                request.num_tokens += 1
                status = check_stop(request, token_id)
                if status is not None:
                    self._finish(request, status)
                    finished.append(request)
                    break
        if finished:
            self.running = [request for request in self.running if not request.is_finished]
        return finished

    def start_over(self, requests: Iterable[Request]) -> None:
        """Queue `requests`, and nobody else, with an empty pool, whatever state everything is in.

        For a step that failed, and a step or a change that was interrupted half way. What the prefix cache holds stays,
        but for blocks that this step was to fill. Can itself be interrupted and called again.
        """
        self._starts_over = True
        self.running = []
        self.waiting = create_request_queue(self.config.policy)
        self.requests = {}
        self._finished_req_ids, self._preempted_req_ids = [], []
        self.kv_cache_manager.start_over()
        for request in requests:
            if request.num_computed_tokens > 0:
                request.num_preemptions += 1
            request.num_computed_tokens = 0
            request.status = RequestStatus.WAITING
            self._queue(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks. While requests run this refuses (False), unless they may be preempted first."""
        if reset_running_requests:
            output = SchedulerOutput(self.num_steps)
            while self.running:  # the last first, so that the queue gets them back in their old order
                self._preempt(self.running.pop(), output)
            self._preempted_req_ids += output.preempted_req_ids  # the next step reports them
        return self.kv_cache_manager.reset_prefix_cache()


def _new_request_data(request: Request) -> NewRequestData:
    return NewRequestData(
        request.request_id,
        list(request.all_token_ids),
        request.num_prompt_tokens,
        request.sampling_params,
        request.end_token_ids,
    )


def check_stop(request: Request, token_id: int) -> RequestStatus | None:
    """Why `request` ends with `token_id`, or None: first EOS, then a stop token, then length."""
    if token_id == request.eos_token_id:
        return RequestStatus.FINISHED_STOPPED
    if token_id in request.stop_token_ids:
        request.stop_reason = token_id
        return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.max_num_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    return None
