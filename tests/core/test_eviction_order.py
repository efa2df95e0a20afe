"""An eviction order is a class with the four methods of `FreeBlocks`; everything else stays as it is.

Two of them, beside vLLM's least recently used first.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from helpers.executors import TokenExecutor

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.block_pool import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.scheduler import Scheduler
from minivllm.request import Request, RequestStatus
from minivllm.sampling_params import SamplingParams


class MostRecentlyUsedFirst:
    """Two stacks: what caches nothing, and below it what is cached; of each, what was given back last comes first."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.uncached = dict.fromkeys(reversed(blocks))
        self.cached: dict[KVCacheBlock, None] = {}  # a dict, since a hit takes a block from anywhere

    @property
    def num_free_blocks(self) -> int:
        return len(self.uncached) + len(self.cached)

    def release(self, uncached: Sequence[KVCacheBlock], cached: Sequence[KVCacheBlock]) -> None:
        self.uncached.update(dict.fromkeys(uncached))
        self.cached.update(dict.fromkeys(cached))

    def remove(self, block: KVCacheBlock) -> None:
        del self.cached[block]

    def popleft(self) -> KVCacheBlock:
        block, _ = self.uncached.popitem() if self.uncached else self.cached.popitem()
        return block

    def __iter__(self) -> Iterator[KVCacheBlock]:
        yield from reversed(self.uncached)
        yield from reversed(self.cached)


class LeastFrequentlyUsedFirst:
    """Fewest hits first, and among equals the one that is free longest. What caches nothing before the rest."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.blocks = dict.fromkeys(blocks)
        self.hits: Counter[KVCacheBlock] = Counter()

    @property
    def num_free_blocks(self) -> int:
        return len(self.blocks)

    def release(self, uncached: Sequence[KVCacheBlock], cached: Sequence[KVCacheBlock]) -> None:
        self.blocks.update(dict.fromkeys([*uncached, *cached]))

    def remove(self, block: KVCacheBlock) -> None:
        del self.blocks[block]
        self.hits[block] += 1

    def popleft(self) -> KVCacheBlock:
        block = next(iter(self))
        del self.blocks[block]
        self.hits.pop(block, None)  # it will cache something else
        return block

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(sorted(self.blocks, key=lambda block: -1 if block.block_hash is None else self.hits[block]))


ORDERS = [FreeKVCacheBlockQueue, MostRecentlyUsedFirst, LeastFrequentlyUsedFirst]


def free_cached(pool: BlockPool, hashes: Sequence[bytes]) -> None:
    """Blocks that cache `hashes` and were given back in that order."""
    blocks = pool.get_new_blocks(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.confirm_filled()
    pool.free_blocks(blocks)


def hit(pool: BlockPool, block_hash: bytes) -> None:
    """A request comes, hits one block, and ends."""
    block = pool.get_cached_block(block_hash)
    pool.touch([block])
    pool.free_blocks([block])


@pytest.mark.parametrize(
    ("order", "uses", "evicted"),
    [
        (FreeKVCacheBlockQueue, "bba", "cb"),  # free longest: c, then b
        (MostRecentlyUsedFirst, "bba", "ab"),  # given back last: a, then b
        (LeastFrequentlyUsedFirst, "bba", "ca"),  # hits: c none, a one, b two
        (LeastFrequentlyUsedFirst, "cab", "ca"),  # one hit each: free longest
    ],
)
def test_each_order_evicts_what_it_says(order, uses, evicted):
    pool = BlockPool(4, free_blocks=order)
    free_cached(pool, [b"a", b"b", b"c"])
    for name in uses:
        hit(pool, name.encode())
    for name in evicted:
        assert name.encode() in pool.cached_blocks
        pool.get_new_blocks(1)
        assert name.encode() not in pool.cached_blocks


def test_a_block_that_is_used_for_something_else_starts_with_no_hits():
    pool = BlockPool(3, free_blocks=LeastFrequentlyUsedFirst)
    free_cached(pool, [b"a", b"b"])
    for name in (b"a", b"a", b"b", b"b", b"b"):
        hit(pool, name)
    free_cached(pool, [b"new"])  # in the place of a
    pool.get_new_blocks(1)
    assert set(pool.cached_blocks) == {b"b"}


def test_a_fresh_start_keeps_the_order():
    pool = BlockPool(4, free_blocks=MostRecentlyUsedFirst)
    free_cached(pool, [b"a", b"b", b"c"])
    pool.start_over()
    pool.get_new_blocks(1)
    assert set(pool.cached_blocks) == {b"a", b"b"}


def hit_tokens(order, rounds: int = 4, prompts: int = 5) -> int:
    """`prompts` prompts of one full block each come again and again, in turn, to a pool with room for fewer."""
    config = CacheConfig(num_blocks=5, block_size=4)
    manager = KVCacheManager(config, max_model_len=16, free_blocks=order)
    hits = 0
    for number in range(rounds * prompts):
        request = Request(str(number), [number % prompts] * 5, SamplingParams())
        blocks = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - 4 * len(blocks), blocks, admission=True)
        manager.confirm_filled()
        manager.free(request)
        manager.check_invariants()
        hits += 4 * len(blocks)
    return hits


def test_going_round_through_more_than_fits_never_hits_the_least_recently_used_order():
    assert hit_tokens(FreeKVCacheBlockQueue) == 0
    assert hit_tokens(MostRecentlyUsedFirst) > 0


def test_what_fits_is_always_hit_in_any_order():
    for order in ORDERS:
        assert hit_tokens(order, rounds=4, prompts=3) == 3 * 3 * 4


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(10))
def test_new_blocks_are_the_first_of_the_order(order, seed):
    rng = random.Random(seed)
    manager = KVCacheManager(CacheConfig(num_blocks=12, block_size=2), max_model_len=16, free_blocks=order)
    live: list[Request] = []
    for number in range(100):
        request = Request(str(number), [rng.randint(0, 1) for _ in range(rng.randint(1, 8))], SamplingParams())
        hits = manager.get_computed_blocks(request)
        expected = [block for block in manager.block_pool.free_queue if block not in hits]
        new_blocks = manager.allocate_slots(request, request.num_tokens - 2 * len(hits), hits, admission=True)
        if new_blocks is not None:
            assert list(new_blocks) == expected[: len(new_blocks)]
            live.append(request)
        manager.confirm_filled()
        manager.check_invariants()
        if new_blocks is None or rng.random() < 0.5:
            manager.free(live.pop(rng.randrange(len(live))))
            manager.check_invariants()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(10))
def test_random_workloads_run_to_their_end_in_any_order(order, seed):
    """With prefixes in common, preemptions, aborts, a failed step and a fresh start."""
    rng = random.Random(seed)
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=24, max_num_seqs=4, max_num_batched_tokens=16),
        CacheConfig(num_blocks=13, block_size=2),
        free_blocks=order,
    )
    executor, requests, preempted = TokenExecutor(), [], 0
    for number in range(30):
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 10))]
        requests.append(Request(str(number), prompt, SamplingParams(max_tokens=rng.randint(1, 12))))
        scheduler.add_request(requests[-1])
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        preempted += len(output.preempted_req_ids)
        chance = rng.random()
        if chance < 0.04:
            scheduler.start_over(list(scheduler.requests.values()))
        else:
            scheduler.update_from_output(output, executor.sample(output))
        if chance > 0.98:
            scheduler.finish_requests(rng.choice(list(scheduler.requests) or [""]), RequestStatus.FINISHED_ABORTED)
        scheduler.kv_cache_manager.check_invariants()
    assert preempted and all(request.is_finished for request in requests)
    assert scheduler.kv_cache_manager.block_pool.usage == 0.0
    assert isinstance(scheduler.kv_cache_manager.block_pool.free_queue, order)
