"""Look-up, allocation and freeing without a scheduler. Read it beside `minivllm/core/kv_cache_manager.py`.

Blocks hold four tokens, and block 0 is the null block.
"""

from __future__ import annotations

import random

import pytest

from minivllm.config import CacheConfig
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams


def make_manager(num_blocks: int = 9, max_model_len: int = 64, **settings) -> KVCacheManager:
    return KVCacheManager(CacheConfig(num_blocks, **{"block_size": 4, **settings}), max_model_len)


def grow(request: Request) -> None:
    """One more token was sampled."""
    request.all_token_ids.append(7)
    request.num_tokens += 1


def make_request(name: str, num_tokens: int, first: int = 0) -> Request:
    """Prompts that begin with the same token have their prefix in common."""
    return Request(name, range(first, first + num_tokens), SamplingParams(max_tokens=50))


def admit(manager: KVCacheManager, request: Request, num_new: int | None = None, **flags) -> list[int] | None:
    """What the scheduler does with a waiting request: hits, then blocks; its new blocks. `num_new` None: all of it."""
    hits = manager.get_computed_blocks(request)
    num_hit_tokens = len(hits) * manager.block_size
    num_new = request.num_tokens - num_hit_tokens if num_new is None else num_new
    new_blocks = manager.allocate_slots(request, num_new, hits, admission=True, **flags)
    if new_blocks is None:
        return None
    request.num_computed_tokens = num_hit_tokens + num_new
    return [block.block_id for block in new_blocks]


def compute(manager: KVCacheManager, request: Request, num_new: int = 1) -> list[int] | None:
    """The next tokens of a running request; its new blocks."""
    new_blocks = manager.allocate_slots(request, num_new)
    if new_blocks is None:
        return None
    request.num_computed_tokens += num_new
    return [block.block_id for block in new_blocks]


def state(manager: KVCacheManager) -> tuple:
    """Everything that a call could have changed."""
    pool = manager.block_pool
    return (
        {name: [block.block_id for block in table] for name, table in manager.block_tables.items()},
        dict(manager.num_published),
        [block.block_id for block in pool.free_queue],
        [(block.ref_cnt, block.block_hash) for block in pool.blocks],
    )


class TestLookUp:
    @pytest.mark.parametrize(("num_tokens", "hits"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 2)])
    def test_one_token_at_least_is_left_to_compute(self, num_tokens, hits):
        manager = make_manager()
        admit(manager, make_request("a", 10))  # two full blocks
        assert len(manager.get_computed_blocks(make_request("b", num_tokens))) == hits

    def test_hits_end_at_the_first_block_that_differs(self):
        manager = make_manager()
        admit(manager, make_request("a", 12))
        other = make_request("b", 13)
        other.all_token_ids[5] = 99
        assert [block.block_id for block in manager.get_computed_blocks(other)] == [1]

    def test_nothing_is_looked_up_with_caching_off(self):
        manager = make_manager(enable_prefix_caching=False)
        admit(manager, make_request("a", 12))
        assert manager.get_computed_blocks(make_request("b", 12)) == []

    def test_prompt_logprobs_need_the_whole_prompt_computed(self):
        manager = make_manager()
        admit(manager, make_request("a", 12))
        request = Request("b", range(12), SamplingParams(prompt_logprobs=1))
        assert not manager.lookup_enabled(request) and manager.get_computed_blocks(request) == []


class TestAllocation:
    def test_a_prompt_gets_blocks_for_all_its_tokens(self):
        manager = make_manager()
        assert admit(manager, make_request("a", 9)) == [1, 2, 3]
        assert manager.get_block_ids("a") == [1, 2, 3]

    def test_a_chunk_of_a_prompt_gets_blocks_for_the_chunk(self):
        manager = make_manager()
        request = make_request("a", 20)
        assert admit(manager, request, num_new=6) == [1, 2]
        assert compute(manager, request, num_new=6) == [3]

    def test_a_decode_gets_a_block_when_the_last_one_is_full(self):
        manager = make_manager()
        request = make_request("a", 3)
        admit(manager, request)
        new = []
        for _ in range(6):
            grow(request)
            new.append(compute(manager, request))
        assert new == [[], [2], [], [], [], [3]]

    def test_hits_come_first_in_the_table_and_are_shared(self):
        manager = make_manager()
        admit(manager, make_request("a", 10))
        assert admit(manager, make_request("b", 10)) == [4]
        assert manager.get_block_ids("b") == [1, 2, 4]
        assert [block.ref_cnt for block in manager.block_pool.blocks[1:5]] == [2, 2, 1, 1]

    def test_a_hit_on_a_free_block_makes_the_free_blocks_fewer(self):
        manager = make_manager(num_blocks=4)
        a = make_request("a", 8)
        admit(manager, a)
        manager.free(a)
        admit(manager, make_request("b", 4, first=50))
        assert manager.block_pool.num_free_blocks == 2  # both cache what "a" computed
        assert admit(manager, make_request("c", 9)) is None  # two hits and one more

    def test_no_slot_is_given_behind_max_model_len(self):
        manager = make_manager(max_model_len=8)
        request = make_request("a", 8)
        admit(manager, request)
        assert manager.allocate_slots(request, 5) == () and manager.get_block_ids("a") == [1, 2]


class TestRefusal:
    def test_an_admission_that_does_not_fit_changes_nothing(self):
        manager = make_manager(num_blocks=5)
        admit(manager, make_request("a", 10))
        before = state(manager)
        assert admit(manager, make_request("b", 17)) is None  # two hits and three more, of which one is free
        assert state(manager) == before

    def test_a_running_request_that_does_not_fit_keeps_what_it_has(self):
        manager = make_manager(num_blocks=3)
        request = make_request("a", 8)
        admit(manager, request)
        grow(request)
        before = state(manager)
        assert compute(manager, request) is None
        assert state(manager) == before

    def test_reserving_the_full_sequence_refuses_a_chunk_whose_rest_would_not_fit(self):
        manager = make_manager(num_blocks=5)
        assert admit(manager, make_request("a", 20), num_new=4, reserve_full_sequence=True) is None
        assert admit(manager, make_request("a", 20), num_new=4) == [1]

    def test_the_watermark_leaves_blocks_free(self):
        manager = make_manager(num_blocks=11, watermark=0.2)  # two of eleven
        assert admit(manager, make_request("a", 36), watermark=True) is None
        assert admit(manager, make_request("a", 32), watermark=True) == [1, 2, 3, 4, 5, 6, 7, 8]


class TestPublishing:
    def test_full_blocks_can_be_hit_in_the_same_step_and_the_last_one_cannot(self):
        manager = make_manager()
        admit(manager, make_request("a", 10))
        assert [block.block_hash is not None for block in manager.block_pool.blocks[1:4]] == [True, True, False]
        assert len(manager.get_computed_blocks(make_request("b", 13))) == 2

    def test_a_block_that_decodes_fill_is_published_with_its_last_token(self):
        manager = make_manager()
        request = make_request("a", 6)
        admit(manager, request)
        published = []
        for _ in range(3):
            published.append(manager.num_published["a"])
            grow(request)
            compute(manager, request)
        assert published == [1, 1, 2]

    def test_nothing_is_published_with_caching_off(self):
        manager = make_manager(enable_prefix_caching=False)
        admit(manager, make_request("a", 10))
        assert manager.num_published == {"a": 0} and not manager.block_pool.cached_blocks

    def test_slots_behind_the_known_tokens_are_not_published(self):
        manager = make_manager()
        request = make_request("a", 6)
        manager.allocate_slots(request, 9, admission=True)  # six known tokens, three still to be guessed
        assert manager.get_block_ids("a") == [1, 2, 3] and manager.num_published["a"] == 1


@pytest.mark.parametrize("seed", range(50))
def test_a_request_is_ready_until_allocate_slots_has_something_to_do(seed):
    rng = random.Random(seed)
    caching = rng.random() < 0.7
    manager = make_manager(num_blocks=100, block_size=rng.choice([1, 2, 3, 4, 16]), enable_prefix_caching=caching)
    request = make_request("a", rng.randint(1, 30))
    admit(manager, request, num_new=rng.randint(1, request.num_tokens))
    while request.num_tokens < 60:
        if request.num_computed_tokens == request.num_tokens:
            grow(request)
        num_new = rng.randint(1, min(3, request.num_tokens - request.num_computed_tokens))
        needed = request.num_computed_tokens + num_new > request.num_ready_tokens
        before = state(manager)
        compute(manager, request, num_new)
        assert needed == (state(manager) != before)


class TestFreeing:
    def test_the_tail_is_reused_before_the_prefix_it_hangs_on(self):
        manager = make_manager(num_blocks=6)
        request = make_request("a", 12)
        admit(manager, request)
        manager.free(request)
        assert [block.block_id for block in manager.block_pool.free_queue] == [4, 5, 3, 2, 1]

    def test_a_shared_block_stays_with_its_other_holder(self):
        manager = make_manager()
        a, b = make_request("a", 10), make_request("b", 10)
        admit(manager, a)
        admit(manager, b)
        manager.free(a)
        assert manager.block_pool.num_free_blocks == 5 and manager.get_block_ids("a") == []
        manager.check_invariants()

    def test_freeing_a_request_without_blocks_does_nothing(self):
        manager = make_manager()
        before = state(manager)
        manager.free(make_request("a", 10))
        assert state(manager) == before

    def test_a_preempted_request_leaves_no_hash_of_a_block_that_was_not_filled(self):
        manager = make_manager()
        request = make_request("a", 16)
        admit(manager, request, num_new=6)
        manager.confirm_filled()
        compute(manager, request, num_new=10)  # published for this step, which will not compute it
        manager.free_unfilled(request, num_computed_tokens=6)
        assert len(manager.get_computed_blocks(make_request("b", 16))) == 1
        manager.check_invariants()

    def test_after_a_failed_step_its_blocks_are_not_hit(self):
        manager = make_manager()
        request = make_request("a", 10)
        admit(manager, request)
        manager.start_over()
        assert manager.get_computed_blocks(make_request("b", 10)) == []
        assert manager.get_block_ids("a") == []

    def test_start_over_empties_the_tables_and_keeps_what_was_computed(self):
        manager = make_manager()
        admit(manager, make_request("a", 10))
        manager.confirm_filled()
        admit(manager, make_request("b", 10, first=50))
        manager.start_over()
        assert manager.block_tables == {} and manager.block_pool.num_free_blocks == 8
        assert len(manager.get_computed_blocks(make_request("c", 10))) == 2
        assert manager.get_computed_blocks(make_request("d", 10, first=50)) == []
        manager.check_invariants()


def test_statistics_count_an_admission_after_a_preemption_apart():
    manager = make_manager()
    request = make_request("a", 10)
    manager.prefix_cache_stats.record(request, num_hits=4)
    request.num_preemptions = 1
    manager.prefix_cache_stats.record(request, num_hits=8)
    stats = manager.take_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (1, 10, 4)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 10, 8)
    assert manager.take_prefix_cache_stats().requests == 0
