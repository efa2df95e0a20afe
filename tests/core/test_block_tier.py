"""A second tier keeps what the pool forgets. Read it beside `minivllm/core/block_tier.py`.

Blocks hold four tokens; the executor keeps the token of every slot, and notices a block that holds anything else.
"""

from __future__ import annotations

import random

import pytest
from helpers.executors import FillingExecutor

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.block_pool import BlockPool
from minivllm.core.block_tier import LRUTier
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.request import Request, RequestStatus
from minivllm.sampling_params import SamplingParams


class TestLRUTier:
    def test_holds_what_was_stored_and_forgets_the_oldest(self):
        tier = LRUTier(2)
        slots = [tier.store(name) for name in (b"a", b"b")]
        assert sorted(slots) == [0, 1]
        assert tier.store(b"c") == slots[0]  # in the place of a
        assert tier.lookup([b"a"]) == 0 and tier.lookup([b"b", b"c"]) == 2 and tier.load([b"c"]) == [slots[0]]

    def test_counts_only_from_the_first_on(self):
        tier = LRUTier(4)
        tier.store(b"a"), tier.store(b"c")
        assert tier.lookup([b"a", b"b", b"c"]) == 1 and tier.lookup([b"b", b"c"]) == 0 and tier.lookup([]) == 0

    def test_what_it_holds_is_not_stored_again_but_is_recent(self):
        tier = LRUTier(2)
        tier.store(b"a"), tier.store(b"b")
        assert tier.store(b"a") is None
        tier.store(b"c")
        assert set(tier.slots) == {b"a", b"c"}

    def test_what_is_being_loaded_stays_until_the_step_is_complete(self):
        tier = LRUTier(1)
        slot = tier.store(b"a")
        tier.load([b"a"])
        assert tier.store(b"b") is None and tier.lookup([b"a"]) == 1
        tier.complete_step()
        assert tier.store(b"b") == slot and tier.lookup([b"a"]) == 0

    def test_of_what_was_loaded_together_the_tail_goes_first(self):
        tier = LRUTier(3)
        for name in (b"a", b"b", b"c"):
            tier.store(name)
        tier.load([b"a", b"b", b"c"])
        tier.complete_step()
        tier.store(b"d")
        assert set(tier.slots) == {b"a", b"b", b"d"}

    def test_clear(self):
        tier = LRUTier(2)
        tier.store(b"a"), tier.store(b"b"), tier.load([b"a", b"b"])
        tier.clear()
        assert tier.lookup([b"a"]) == 0 and {tier.store(b"c"), tier.store(b"d")} == {0, 1}

    def test_no_slot(self):
        with pytest.raises(ValueError, match="at least one slot, got 0"):
            LRUTier(0)


class TestPool:
    def publish_and_free(self, pool: BlockPool, *names: bytes) -> list[int]:
        blocks = pool.get_new_blocks(len(names))
        for block, name in zip(blocks, names, strict=True):
            pool.publish(block, name)
        pool.confirm_filled()
        pool.free_blocks(blocks)
        return [block.block_id for block in blocks]

    def test_what_is_evicted_is_stored(self):
        pool = BlockPool(3, tier=LRUTier(4))
        first, second = self.publish_and_free(pool, b"a", b"b")
        pool.get_new_blocks(2)
        assert [block_id for block_id, _ in pool.stores] == [first, second]
        assert pool.tier.lookup([b"a", b"b"]) == 2

    def test_not_while_another_block_caches_the_same(self):
        pool = BlockPool(3, tier=LRUTier(4))
        _, second = self.publish_and_free(pool, b"a", b"a")
        pool.get_new_blocks(1)
        assert pool.stores == []
        pool.get_new_blocks(1)
        assert [block_id for block_id, _ in pool.stores] == [second]

    def test_a_reset_and_a_fresh_start_empty_it(self):
        for forget in (BlockPool.reset_prefix_cache, BlockPool.start_over):
            pool = BlockPool(3, tier=LRUTier(4))
            self.publish_and_free(pool, b"a", b"b")
            pool.free_blocks(pool.get_new_blocks(2))
            forget(pool)
            assert pool.tier.lookup([b"a"]) == 0
        assert pool.stores == []


def make_scheduler(num_blocks: int, tier: LRUTier | None, **settings) -> Scheduler:
    settings = {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 64, **settings}
    return Scheduler(SchedulerConfig(**settings), CacheConfig(num_blocks, block_size=4), tier=tier)


def run(scheduler: Scheduler, executor: FillingExecutor, *requests: Request) -> list[SchedulerOutput]:
    """To the end."""
    for request in requests:
        scheduler.add_request(request)
    outputs = []
    while scheduler.has_unfinished_requests():
        outputs.append(scheduler.schedule())
        scheduler.update_from_output(outputs[-1], executor.execute(outputs[-1]).sampled_token_ids)
        scheduler.kv_cache_manager.check_invariants()
    assert not executor.wrong
    return outputs


def make_request(name: str, tokens: range, max_tokens: int = 1) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens))


def test_a_prompt_comes_back_from_the_second_tier():
    """Four blocks are usable: the second prompt takes all, the first returns."""
    scheduler, executor = make_scheduler(5, LRUTier(8)), FillingExecutor()
    run(scheduler, executor, make_request("a", range(16)))
    (stored,) = run(scheduler, executor, make_request("b", range(100, 116)))
    assert len(stored.stores) == 4 and not stored.loads

    again = make_request("c", range(16))
    (step,) = run(scheduler, executor, again)
    assert len(step.loads) == 3 and step.num_hit_tokens == {"c": 12}  # the last token at least is computed
    assert step.num_scheduled_tokens == {"c": 4} and again.num_cached_tokens == 12
    assert step.new_block_ids["c"][:3] == [block_id for _, block_id in step.loads]
    assert scheduler.kv_cache_manager.take_prefix_cache_stats().loaded == 12

    (hit,) = run(scheduler, executor, make_request("d", range(16)))
    assert not hit.loads and hit.num_hit_tokens == {"d": 12}  # now they are in the pool


def test_after_the_step_what_it_loaded_may_go():
    scheduler, executor = make_scheduler(5, LRUTier(8)), FillingExecutor()
    for name, first in (("a", 0), ("b", 100), ("c", 0)):
        run(scheduler, executor, make_request(name, range(first, first + 16)))
    assert scheduler.kv_cache_manager.prefix_cache_stats.loaded and not scheduler.kv_cache_manager.tier.pinned


def test_first_the_pool_then_the_tier():
    scheduler, executor = make_scheduler(6, LRUTier(8)), FillingExecutor()
    run(scheduler, executor, make_request("a", range(16)))
    run(scheduler, executor, make_request("b", range(100, 112)))  # one block was unused, so it takes a's last two
    (step,) = run(scheduler, executor, make_request("c", range(17)))
    assert step.num_hit_tokens == {"c": 16} and len(step.loads) == 2


def test_a_block_is_stored_and_loaded_in_one_step():
    """Two prompts enter together: the blocks of the first push out what the second wants."""
    scheduler, executor = make_scheduler(7, LRUTier(8)), FillingExecutor()
    run(scheduler, executor, make_request("a", range(9)))
    run(scheduler, executor, make_request("x", range(200, 216)))
    scheduler.add_request(make_request("b", range(100, 112)))
    scheduler.add_request(make_request("c", range(9)))
    outputs = run(scheduler, executor)
    assert outputs[0].num_hit_tokens == {"b": 0, "c": 8}
    stored = {slot for _, slot in outputs[0].stores}
    assert stored & {slot for slot, _ in outputs[0].loads}


def test_no_blocks_no_loads():
    """An admission that fails leaves the tier as it was."""
    scheduler, executor = make_scheduler(5, LRUTier(8)), FillingExecutor()
    run(scheduler, executor, make_request("a", range(16)))
    scheduler.add_request(make_request("b", range(100, 116), max_tokens=1))
    scheduler.schedule()  # b holds all four
    scheduler.add_request(make_request("c", range(16)))
    output = scheduler.schedule()
    assert output.num_waiting == 1 and not output.loads and not scheduler.kv_cache_manager.tier.pinned


def test_who_does_not_read_the_cache_loads_nothing():
    scheduler, executor = make_scheduler(5, LRUTier(8)), FillingExecutor()
    run(scheduler, executor, make_request("a", range(16)))
    run(scheduler, executor, make_request("b", range(100, 116)))
    request = Request("c", range(16), SamplingParams(max_tokens=1, prompt_logprobs=0))
    (step,) = run(scheduler, executor, request)
    assert not step.loads and request.num_cached_tokens == 0


@pytest.mark.parametrize("seed", range(30))
def test_random_workloads(seed):
    """Prefixes in common, preemptions, aborts, resets, fresh starts, and a tier of one to twelve slots: no block ever
    holds anything else than its hash says, and each request gets its tokens."""
    rng = random.Random(seed)
    slots = rng.randint(1, 12)
    policy = rng.choice(("fcfs", "priority"))
    scheduler = make_scheduler(13, LRUTier(slots), max_num_batched_tokens=rng.choice((6, 16, 64)), policy=policy)
    executor, requests = FillingExecutor(), []
    loads = stores = preempted = 0
    for number in range(40):
        shared, own = rng.randint(0, 12), rng.randint(1, 8)
        prompt = [rng.choice((1, 2))] * shared + [10 + number] * own
        requests.append(Request(str(number), prompt, SamplingParams(max_tokens=rng.randint(1, 12))))
        requests[-1].priority = rng.randint(0, 3) if policy == "priority" else 0
    late = list(requests)
    while late or scheduler.has_unfinished_requests():
        while late and rng.random() < 0.4:
            scheduler.add_request(late.pop())
        output = scheduler.schedule()
        loads, stores = loads + len(output.loads), stores + len(output.stores)
        preempted += len(output.preempted_req_ids)
        chance = rng.random()
        if chance < 0.02:  # after half of the copies
            for block_id, slot in output.stores[: len(output.stores) // 2]:
                executor.tier[slot] = executor.blocks[block_id]
            scheduler.start_over(list(scheduler.requests.values()))
        else:
            scheduler.update_from_output(output, executor.execute(output).sampled_token_ids)
        if chance > 0.99:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        elif chance > 0.97:
            scheduler.finish_requests(rng.choice(list(scheduler.requests) or [""]), RequestStatus.FINISHED_ABORTED)
        scheduler.kv_cache_manager.check_invariants()
    assert not executor.wrong and stores and loads and preempted
    assert all(request.is_finished for request in requests)
    assert scheduler.kv_cache_manager.block_pool.usage == 0.0


def test_without_a_tier_nothing_is_copied():
    scheduler, executor = make_scheduler(5, None), FillingExecutor()
    outputs = run(scheduler, executor, *(make_request(str(n), range(n * 10, n * 10 + 16)) for n in range(4)))
    assert not any(output.stores or output.loads for output in outputs)
