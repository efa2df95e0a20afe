"""The scheduler's rules, one scenario each: what the recorded traces do not contain, and what a reader should see."""

from __future__ import annotations

import pytest

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core import KVCacheManager, Scheduler
from minivllm.request import Request, RequestStatus
from minivllm.sampling_params import SamplingParams


def make_scheduler(num_blocks=17, block_size=4, max_model_len=32, max_num_seqs=4, max_num_batched_tokens=64, **kwargs):
    cache = {k: kwargs.pop(k) for k in ("enable_prefix_caching", "watermark") if k in kwargs}
    return Scheduler(
        SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            **kwargs,
        ),
        CacheConfig(num_blocks=num_blocks, block_size=block_size, **cache),
    )


def make_request(name, prompt, max_tokens=8, **kwargs):
    prompt = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), **kwargs)


def step(scheduler, tokens=None):
    """One step; every request that is due gets its token from `tokens` (default: 1000)."""
    output = scheduler.schedule()
    requests = [scheduler.requests[request_id] for request_id in output.num_scheduled_tokens]
    sampled = [
        [(tokens or {}).get(r.request_id, 1000)] if r.num_computed_tokens >= r.num_tokens else [] for r in requests
    ]
    finished = scheduler.update_from_output(output, sampled)
    scheduler.kv_cache_manager.check_invariants()
    return output, finished


def free_ids(scheduler):
    return [block.block_id for block in scheduler.kv_cache_manager.block_pool.free_queue]


class TestEnds:
    def test_max_model_len_ends_a_request_although_max_tokens_is_not_reached(self):
        scheduler = make_scheduler(max_model_len=8)
        request = make_request("a", 6, max_tokens=100)
        scheduler.add_request(request)
        assert step(scheduler)[1] == []
        assert step(scheduler)[1] == [request]
        assert request.num_tokens == 8 and request.finish_reason == "length" and request.stop_reason is None
        # The last token is sampled and never written: 7 slots, so two blocks of four were enough.
        assert scheduler.kv_cache_manager.block_pool.num_free_blocks == 16

    def test_a_request_at_max_model_len_minus_one_is_not_scheduled_past_the_end(self):
        scheduler = make_scheduler(max_model_len=8, long_prefill_token_threshold=4)
        scheduler.add_request(make_request("a", 7, max_tokens=100))
        assert step(scheduler)[0].num_scheduled_tokens == {"a": 4}
        assert step(scheduler)[0].num_scheduled_tokens == {"a": 3}
        assert not scheduler.has_unfinished_requests()

    def test_eos_ends_with_stop_and_no_stop_reason(self):
        scheduler = make_scheduler()
        request = make_request("a", 5, eos_token_id=7)
        scheduler.add_request(request)
        assert step(scheduler, {"a": 6})[1] == []
        assert step(scheduler, {"a": 7})[1] == [request]
        assert (request.finish_reason, request.stop_reason) == ("stop", None)
        assert request.output_token_ids == [6, 7]

    def test_stop_token_is_named_as_the_reason(self):
        scheduler = make_scheduler()
        request = make_request("a", 5, eos_token_id=7, stop_token_ids=[9])
        scheduler.add_request(request)
        step(scheduler, {"a": 9})
        assert (request.finish_reason, request.stop_reason) == ("stop", 9)

    def test_eos_comes_before_stop_token_and_stop_token_before_length(self):
        scheduler = make_scheduler()
        both = make_request("a", 5, max_tokens=1, eos_token_id=9, stop_token_ids=[9])
        stop_at_length = make_request("b", 5, max_tokens=1, stop_token_ids=[9])
        scheduler.add_request(both)
        scheduler.add_request(stop_at_length)
        step(scheduler, {"a": 9, "b": 9})
        assert (both.finish_reason, both.stop_reason) == ("stop", None)
        assert (stop_at_length.finish_reason, stop_at_length.stop_reason) == ("stop", 9)

    def test_ignored_eos_does_not_end(self):
        scheduler = make_scheduler()
        request = make_request("a", 5, max_tokens=3, eos_token_id=None)
        scheduler.add_request(request)
        for _ in range(3):
            step(scheduler, {"a": 7})
        assert request.output_token_ids == [7, 7, 7] and request.finish_reason == "length"

    def test_finished_requests_free_their_blocks_one_after_another_tail_first(self):
        scheduler = make_scheduler(num_blocks=10)
        # Different prompts: nothing is shared. Each fills two blocks and has two tokens in a third.
        scheduler.add_request(make_request("a", list(range(100, 110)), max_tokens=1))
        scheduler.add_request(make_request("b", list(range(200, 210)), max_tokens=1))
        output, finished = step(scheduler)
        assert output.new_block_ids == {"a": [1, 2, 3], "b": [4, 5, 6]}
        assert [r.request_id for r in finished] == ["a", "b"]
        # Blocks 3 and 6 are not full, so they carry no hash: to the front, the latest first.
        # The hashed ones go to the back, each request's tail before its head.
        assert free_ids(scheduler) == [6, 3, 7, 8, 9, 2, 1, 5, 4]


class TestAborts:
    def test_abort_running_and_waiting(self):
        scheduler = make_scheduler(max_num_seqs=1)
        a, b = make_request("a", 6), make_request("b", 6)
        scheduler.add_request(a)
        scheduler.add_request(b)
        step(scheduler)
        ended = scheduler.finish_requests(["b", "a", "unknown"], RequestStatus.FINISHED_ABORTED)
        assert ended == [b, a] and a.finish_reason == b.finish_reason == "abort"
        assert scheduler.running == [] and len(scheduler.waiting) == 0 and not scheduler.has_unfinished_requests()
        assert len(free_ids(scheduler)) == 16
        assert scheduler.schedule().finished_req_ids == ["b", "a"]

    def test_abort_of_a_preempted_request(self):
        scheduler = make_scheduler(num_blocks=6, max_model_len=20, enable_prefix_caching=False)
        scheduler.add_request(make_request("a", list(range(8)), max_tokens=12))
        scheduler.add_request(make_request("b", list(range(50, 58)), max_tokens=12))
        while not (output := step(scheduler)[0]).preempted_req_ids:
            pass
        assert output.preempted_req_ids == ["b"]
        scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
        assert len(scheduler.waiting) == 0
        scheduler.kv_cache_manager.check_invariants()

    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_abort_in_the_middle_of_the_queue_keeps_the_order(self, policy):
        scheduler = make_scheduler(max_num_seqs=1, policy=policy)
        for i, name in enumerate("abcde"):
            scheduler.add_request(make_request(name, [i], arrival_time=float(i)))
        scheduler.finish_requests(["c"], RequestStatus.FINISHED_ABORTED)
        assert [r.request_id for r in scheduler.waiting] == ["a", "b", "d", "e"]

    def test_blocks_of_an_aborted_request_can_be_hit_once_computed(self):
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", 9))
        step(scheduler)
        scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        scheduler.add_request(make_request("b", 9))
        assert step(scheduler)[0].num_hit_tokens == {"b": 8}


class TestPrefixCache:
    def test_a_fully_cached_prompt_recomputes_its_whole_last_block(self):
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", 8, max_tokens=1))
        step(scheduler)
        scheduler.add_request(make_request("b", 8, max_tokens=1))
        output, _ = step(scheduler)
        assert output.num_hit_tokens == {"b": 4} and output.num_scheduled_tokens == {"b": 4}

    def test_a_request_admitted_later_in_the_same_step_hits_blocks_that_are_not_filled_yet(self):
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", 9))
        scheduler.add_request(make_request("b", 9))
        output, _ = step(scheduler)
        assert output.new_block_ids == {"a": [1, 2, 3], "b": [1, 2, 4]}
        assert output.num_scheduled_tokens == {"a": 9, "b": 1}

    def test_salts_share_only_with_themselves(self):
        scheduler = make_scheduler()
        for name, salt in (("a", None), ("b", "x"), ("c", "x"), ("d", "y")):
            scheduler.add_request(make_request(name, 9, cache_salt=salt))
        output, _ = step(scheduler)
        assert output.num_hit_tokens == {"a": 0, "b": 0, "c": 8, "d": 0}

    def test_a_lora_name_is_not_a_salt(self):
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", 9, cache_salt="x"))
        scheduler.add_request(make_request("b", 9, lora_name="x"))
        scheduler.add_request(make_request("c", 9, lora_name="x"))
        assert step(scheduler)[0].num_hit_tokens == {"a": 0, "b": 0, "c": 8}

    def test_duplicates_are_kept_and_the_first_is_found(self):
        scheduler = make_scheduler(num_blocks=33, max_num_seqs=8)
        scheduler.add_request(make_request("a", 7, max_tokens=8))
        scheduler.add_request(make_request("b", 7, max_tokens=8))
        # Both fill their second block in the same step with the same token: two blocks, one hash.
        step(scheduler)
        step(scheduler)
        pool = scheduler.kv_cache_manager.block_pool
        request = scheduler.requests["a"]
        assert pool.cached_blocks[(shared := request.block_hashes[1])].block_id == 2
        assert [b.block_id for b in pool.duplicates[shared]] == [3]
        scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        scheduler.add_request(make_request("c", [*range(7), 1000, 5]))
        output = scheduler.schedule()
        assert output.new_block_ids["c"][:2] == [1, 2]

    def test_reset_refuses_while_a_request_holds_blocks(self):
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", 9))
        step(scheduler)
        cached = dict(scheduler.kv_cache_manager.block_pool.cached_blocks)
        assert scheduler.reset_prefix_cache() is False
        assert scheduler.kv_cache_manager.block_pool.cached_blocks == cached and cached
        scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        assert scheduler.reset_prefix_cache() is True
        scheduler.add_request(make_request("b", 9))
        assert step(scheduler)[0].num_hit_tokens == {"b": 0}

    def test_reset_can_preempt_what_runs_and_keeps_the_order(self):
        scheduler = make_scheduler()
        for name in "abc":
            scheduler.add_request(make_request(name, 5))
        step(scheduler)
        assert scheduler.reset_prefix_cache(reset_running_requests=True) is True
        assert [r.request_id for r in scheduler.waiting] == ["a", "b", "c"]
        output, _ = step(scheduler)
        assert output.num_scheduled_tokens == {"a": 6, "b": 2, "c": 2}  # b and c hit a's block, in the same step

    def test_prompt_logprobs_skip_the_look_up_but_publish(self):
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", 9, max_tokens=1))
        step(scheduler)
        asking = Request("b", list(range(9)), SamplingParams(max_tokens=1, prompt_logprobs=0))
        scheduler.add_request(asking)
        output, _ = step(scheduler)
        assert output.num_scheduled_tokens == {"b": 9}
        assert scheduler.kv_cache_manager.prefix_cache_stats.requests == 1  # a's; b did not ask the cache

    def test_statistics_count_admissions_and_set_preempted_ones_apart(self):
        scheduler = make_scheduler(num_blocks=6, max_model_len=20)
        scheduler.add_request(make_request("a", list(range(8)), max_tokens=12))
        scheduler.add_request(make_request("b", list(range(50, 58)), max_tokens=12))
        while scheduler.has_unfinished_requests():
            step(scheduler)
        stats = scheduler.kv_cache_manager.take_prefix_cache_stats()
        assert (stats.requests, stats.queries, stats.hits) == (2, 16, 0)
        assert stats.preempted_requests >= 1 and stats.preempted_queries > 8
        assert scheduler.kv_cache_manager.prefix_cache_stats.requests == 0


class TestBudgetAndOrder:
    def test_running_requests_come_first_and_the_rest_of_the_budget_goes_to_a_chunk(self):
        scheduler = make_scheduler(max_num_batched_tokens=8)
        scheduler.add_request(make_request("a", 4))
        step(scheduler)
        scheduler.add_request(make_request("b", list(range(100, 120))))
        assert [step(scheduler)[0].num_scheduled_tokens for _ in range(3)] == [
            {"a": 1, "b": 7},
            {"a": 1, "b": 7},
            {"a": 1, "b": 6},
        ]

    def test_without_chunked_prefill_a_prompt_that_does_not_fit_the_budget_waits(self):
        scheduler = make_scheduler(max_num_batched_tokens=32, enable_chunked_prefill=False, num_blocks=33)
        scheduler.add_request(make_request("a", 20))
        scheduler.add_request(make_request("b", list(range(100, 120))))
        assert step(scheduler)[0].num_scheduled_tokens == {"a": 20}
        assert step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 20}

    def test_head_of_line_blocking(self):
        scheduler = make_scheduler(num_blocks=8, max_model_len=28)
        scheduler.add_request(make_request("a", list(range(8)), max_tokens=4))
        scheduler.add_request(make_request("big", list(range(100, 122)), max_tokens=4))
        scheduler.add_request(make_request("small", [1, 2], max_tokens=4))
        assert step(scheduler)[0].num_scheduled_tokens == {"a": 8}  # big needs 6 of 5 blocks; small may not overtake
        assert [r.request_id for r in scheduler.waiting] == ["big", "small"]

    def test_watermark_holds_back_admission_only_while_something_runs(self):
        scheduler = make_scheduler(num_blocks=10, watermark=0.45, max_model_len=28)  # 4 blocks stay free
        scheduler.add_request(make_request("a", list(range(20)), max_tokens=4))
        scheduler.add_request(make_request("b", [900], max_tokens=4))
        assert step(scheduler)[0].num_scheduled_tokens == {"a": 20}  # alone: no watermark; b would leave 3
        assert step(scheduler)[0].num_scheduled_tokens == {"a": 1}

    def test_a_preempting_step_admits_nobody(self):
        scheduler = make_scheduler(num_blocks=6, max_model_len=20, enable_prefix_caching=False)
        scheduler.add_request(make_request("a", list(range(8)), max_tokens=12))
        scheduler.add_request(make_request("b", list(range(50, 58)), max_tokens=12))
        step(scheduler)
        scheduler.add_request(make_request("c", [7], max_tokens=1))
        output, _ = step(scheduler)  # a takes the last block, b has to go, and its blocks stay free for now
        assert output.preempted_req_ids == ["b"]
        assert output.num_scheduled_tokens == {"a": 1} and output.num_free_blocks == 2
        assert [r.request_id for r in scheduler.waiting] == ["b", "c"]

    def test_a_step_may_schedule_nothing(self):
        # Under PRIORITY the first in the list can be the one that has to go. That ends the running pass, and a step
        # that preempted admits nobody: this step is empty although a request could run.
        scheduler = make_scheduler(num_blocks=6, max_model_len=20, policy="priority", enable_prefix_caching=False)
        scheduler.add_request(make_request("low", 8, max_tokens=9, priority=5))
        step(scheduler)
        scheduler.add_request(make_request("high", 5, max_tokens=9, priority=0, arrival_time=1.0))
        scheduled = []
        while scheduler.has_unfinished_requests():
            output, _ = step(scheduler)
            scheduled.append((output.num_scheduled_tokens, output.preempted_req_ids))
        assert scheduled[4] == ({}, ["low"])
        assert scheduled[5] == ({"high": 1}, [])


def scheduled_victim_scenario(scheduler, add):
    """PRIORITY, blocks of 4, 8 usable blocks, chunks of 8. `low` fills and publishes its blocks 5 and 6 in a step in
    which `high`, behind it in the list, runs short by one block and takes all of low's. It needs only the last of
    them, so block 5 stays behind: full by its hash, never computed. Then low comes back and looks its prompt up."""
    add(make_request("low", list(range(24)), max_tokens=4, priority=9, arrival_time=0.0))
    yield "low: 8 tokens"
    add(make_request("high", list(range(50, 62)), max_tokens=1, priority=0, arrival_time=1.0))
    yield "low: 16, high: 8"
    yield "low: 24 and preempted in the same step; high: 12, ends"
    yield "low again"


HOLE = {"num_blocks": 9, "max_model_len": 28, "policy": "priority", "long_prefill_token_threshold": 8}


class TestKnownHole:
    """vLLM 0.30.0: a victim that was already scheduled in the same step leaves behind hashes of unfilled blocks."""

    def run(self, scheduler):
        outputs = []
        for _ in scheduled_victim_scenario(scheduler, scheduler.add_request):
            outputs.append(step(scheduler)[0])
        assert [output.num_scheduled_tokens for output in outputs[:3]] == [
            {"low": 8},
            {"low": 8, "high": 8},
            {"high": 4},
        ]
        assert outputs[2].preempted_req_ids == ["low"]
        return outputs[3]

    def test_the_hole(self, monkeypatch):
        monkeypatch.setattr(KVCacheManager, "free_unfilled", lambda self, request, num_computed: self.free(request))
        # Five blocks hit, of which the fifth (tokens 16 to 19) was published and never filled.
        assert self.run(make_scheduler(**HOLE)).num_hit_tokens == {"low": 20}

    def test_it_is_closed(self):
        assert self.run(make_scheduler(**HOLE)).num_hit_tokens == {"low": 16}

    def test_the_queue_order_is_vllm_s_all_the_same(self, monkeypatch):
        queues = []
        for free in (KVCacheManager.free_unfilled, lambda self, request, num_computed: self.free(request)):
            monkeypatch.setattr(KVCacheManager, "free_unfilled", free)
            scheduler = make_scheduler(**HOLE)
            rounds = scheduled_victim_scenario(scheduler, scheduler.add_request)
            for _ in range(3):
                next(rounds)
                step(scheduler)
            queues.append(free_ids(scheduler))
        assert queues[0] == queues[1]


class TestStartOver:
    """After a step that failed, or was cut short anywhere."""

    def test_nothing_that_the_step_should_have_filled_can_be_hit(self):
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", 9))
        step(scheduler)
        scheduler.add_request(make_request("b", [*range(8), *range(50, 59)]))
        scheduler.schedule()
        scheduler.start_over([])
        scheduler.kv_cache_manager.check_invariants()
        assert len(free_ids(scheduler)) == 16 and not scheduler.requests
        scheduler.add_request(make_request("c", [*range(8), *range(50, 59)]))
        output = step(scheduler)[0]
        assert output.start_over and output.num_hit_tokens == {"c": 8}  # a's blocks, computed before; nothing of b's
        assert not step(scheduler)[0].start_over

    def test_requests_go_on_as_if_they_had_just_come(self):
        scheduler = make_scheduler(max_num_seqs=1)
        a, b = make_request("a", 9), make_request("b", 9)
        scheduler.add_request(a)
        scheduler.add_request(b)
        step(scheduler)
        scheduler.schedule()
        scheduler.start_over([a, b])
        assert (a.num_preemptions, b.num_preemptions) == (1, 0)
        output = step(scheduler)[0]
        assert [(new.request_id, new.token_ids) for new in output.new_requests] == [("a", [*range(9), 1000])]
        assert output.num_scheduled_tokens == {"a": 2}  # what was filled is hit

    @pytest.mark.parametrize("damage", ["table", "queue", "counts", "running"])
    def test_whatever_state_everything_is_in(self, damage):
        scheduler = make_scheduler()
        a = make_request("a", 9)
        scheduler.add_request(a)
        step(scheduler)
        pool = scheduler.kv_cache_manager.block_pool
        if damage == "table":
            scheduler.kv_cache_manager.block_tables["a"].pop()
        elif damage == "queue":
            pool.free_queue.sentinel.next_free.next_free = None
        elif damage == "counts":
            pool.blocks[3].ref_cnt, pool.free_queue.num_free_blocks = 7, 1
        else:
            scheduler.running *= 2
        scheduler.start_over([a])
        scheduler.kv_cache_manager.check_invariants()
        while not a.is_finished:
            step(scheduler)
        assert a.num_output_tokens == 8 and len(free_ids(scheduler)) == 16


class TestRefusals:
    def test_duplicate_id(self):
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", 3))
        with pytest.raises(ValueError, match=r"request id 'a' is in use"):
            scheduler.add_request(make_request("a", 3))

    def test_a_request_larger_than_the_pool_names_the_numbers(self):
        scheduler = make_scheduler(num_blocks=5, block_size=4, max_model_len=32)
        message = r"can grow to 20 tokens and then needs 5 KV blocks of 4, but the pool has 4"
        with pytest.raises(ValueError, match=message):
            scheduler.add_request(make_request("a", 12, max_tokens=8))
        scheduler.add_request(make_request("b", 12, max_tokens=5))  # 17 tokens: 16 slots

    def test_batch_smaller_than_seats(self):
        with pytest.raises(ValueError, match=r"max_num_batched_tokens \(4\) must be at least max_num_seqs \(8\)"):
            SchedulerConfig(max_model_len=16, max_num_seqs=8, max_num_batched_tokens=4)

    def test_unchunked_prefill_needs_a_budget_of_max_model_len(self):
        with pytest.raises(ValueError, match=r"With chunked prefill off .*\(8\) is smaller than max_model_len \(16\)"):
            SchedulerConfig(max_model_len=16, max_num_seqs=8, max_num_batched_tokens=8, enable_chunked_prefill=False)

    def test_threshold_above_max_model_len(self):
        with pytest.raises(
            ValueError, match=r"long_prefill_token_threshold \(17\) must not exceed max_model_len \(16\)"
        ):
            SchedulerConfig(max_model_len=16, long_prefill_token_threshold=17)

    def test_unknown_policy(self):
        with pytest.raises(ValueError, match=r"must be one of fcfs, priority, got 'lifo'"):
            SchedulerConfig(max_model_len=16, policy="lifo")

    def test_pool_too_small_for_one_request_names_the_largest_length(self):
        config = CacheConfig(num_blocks=5, block_size=4)
        config.check_one_request_fits(17)
        with pytest.raises(ValueError, match=r"needs 5 KV blocks of 4, but the pool has 4 .* that fits is 17\."):
            config.check_one_request_fits(18)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("num_blocks", 1, "num_blocks must be a whole number of at least 2, got 1"),
            ("num_blocks", 4.5, "num_blocks must be a whole number"),
            ("block_size", 0, "block_size must be a whole number of at least 1, got 0"),
            ("watermark", 1.0, r"watermark is a fraction of all blocks and must be in \[0, 1\), got 1.0"),
            ("watermark", -0.1, r"must be in \[0, 1\), got -0.1"),
        ],
    )
    def test_cache_config(self, field, value, message):
        with pytest.raises(ValueError, match=message):
            CacheConfig(**{"num_blocks": 8, field: value})

    @pytest.mark.parametrize("field", ["max_model_len", "max_num_seqs", "max_num_batched_tokens"])
    @pytest.mark.parametrize("value", [0, -3, True, 2.0, "8"])
    def test_scheduler_config_whole_numbers(self, field, value):
        with pytest.raises(ValueError, match=f"{field} must be a whole number of at least 1"):
            SchedulerConfig(**{"max_model_len": 16, field: value})


def test_capacity_report_has_vllm_s_form():
    assert CacheConfig(num_blocks=1345).capacity_report(8192, "cuda") == (
        "GPU KV cache size: 21,520 tokens, Maximum concurrency for 8,192 tokens per request: 2.63x"
    )
    # A length that is no multiple of the block size: N = int(X * M), not blocks * block_size.
    assert CacheConfig(num_blocks=100).capacity_report(1000, "cpu") == (
        "CPU KV cache size: 1,587 tokens, Maximum concurrency for 1,000 tokens per request: 1.59x"
    )
