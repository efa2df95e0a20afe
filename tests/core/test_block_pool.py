"""The free queue and the pool by themselves: no request, no scheduler. Read it beside `minivllm/core/block_pool.py`."""

from __future__ import annotations

import random

import pytest

from minivllm.core.block_pool import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock


def make_queue(num_blocks: int) -> tuple[FreeKVCacheBlockQueue, list[KVCacheBlock]]:
    blocks = [KVCacheBlock(i) for i in range(num_blocks)]
    return FreeKVCacheBlockQueue(blocks), blocks


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def cached(pool: BlockPool, *hashes: bytes) -> list[KVCacheBlock]:
    """New blocks of `pool`, held once, filled and published under `hashes`."""
    blocks = pool.get_new_blocks(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.confirm_filled()
    return blocks


class TestFreeQueue:
    def test_blocks_come_in_the_order_in_which_they_were_put_in(self):
        queue, _ = make_queue(4)
        assert ids(queue) == [0, 1, 2, 3]
        assert ids([queue.popleft(), queue.popleft()]) == [0, 1]
        assert ids(queue) == [2, 3] and queue.num_free_blocks == 2

    @pytest.mark.parametrize(("taken", "left"), [(0, [1, 2, 3]), (1, [0, 2, 3]), (3, [0, 1, 2])])
    def test_a_block_can_leave_from_anywhere(self, taken, left):
        queue, blocks = make_queue(4)
        queue.remove(blocks[taken])
        assert ids(queue) == left and queue.num_free_blocks == 3
        assert blocks[taken].prev_free is None and blocks[taken].next_free is None

    def test_what_caches_nothing_goes_to_the_front_and_what_is_cached_to_the_back(self):
        queue, blocks = make_queue(6)
        for _ in range(4):
            queue.popleft()
        queue.release(uncached=[blocks[0], blocks[1]], cached=[blocks[3], blocks[2]])
        assert ids(queue) == [0, 1, 4, 5, 3, 2]

    def test_it_can_run_empty_and_be_filled_again(self):
        queue, blocks = make_queue(2)
        queue.popleft(), queue.popleft()
        assert ids(queue) == [] and queue.num_free_blocks == 0
        queue.release(uncached=[], cached=[blocks[1]])
        queue.release(uncached=[blocks[0]], cached=[])
        assert ids(queue) == [0, 1]

    def test_an_empty_queue_says_what_the_caller_forgot(self):
        queue, _ = make_queue(0)
        with pytest.raises(RuntimeError, match="compare with num_free_blocks first"):
            queue.popleft()

    @pytest.mark.parametrize("seed", range(20))
    def test_it_does_what_a_list_would_do(self, seed):
        rng = random.Random(seed)
        queue, blocks = make_queue(8)
        plain, out = list(blocks), []
        for _ in range(100):
            if plain and rng.random() < 0.5:
                block = rng.choice([plain[0], rng.choice(plain)])
                queue.remove(block) if rng.random() < 0.5 or block is not plain[0] else queue.popleft()
                plain.remove(block)
                out.append(block)
            else:
                rng.shuffle(out)
                front, back = out[: len(out) // 2], out[len(out) // 2 :]
                queue.release(front, back)
                plain, out = front + plain + back, []
            assert ids(queue) == ids(plain) and queue.num_free_blocks == len(plain)


class TestHandingOut:
    def test_block_0_is_the_null_block_and_is_never_handed_out(self):
        pool = BlockPool(4)
        assert (pool.num_usable_blocks, pool.num_free_blocks) == (3, 3)
        assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
        assert pool.num_free_blocks == 0 and pool.null_block.ref_cnt == 0

    def test_usage_is_the_share_of_usable_blocks_that_are_held(self):
        pool = BlockPool(5)
        assert pool.usage == 0.0
        blocks = pool.get_new_blocks(3)
        assert pool.usage == 0.75
        pool.free_blocks(blocks)
        assert pool.usage == 0.0

    def test_a_block_is_free_when_its_last_holder_gives_it_back(self):
        pool = BlockPool(4)
        blocks = pool.get_new_blocks(1)
        pool.touch(blocks)  # a second request holds it
        pool.free_blocks(blocks)
        assert blocks[0].ref_cnt == 1 and pool.num_free_blocks == 2
        pool.free_blocks(blocks)
        assert blocks[0].ref_cnt == 0 and pool.num_free_blocks == 3

    def test_uncached_blocks_are_used_again_first_and_cached_ones_last(self):
        pool = BlockPool(6)
        held = [*cached(pool, b"one", b"two"), *pool.get_new_blocks(1)]
        pool.free_blocks(reversed(held))
        assert ids(pool.free_queue) == [3, 4, 5, 2, 1]


class TestPrefixCache:
    def test_a_freed_block_can_still_be_hit(self):
        pool = BlockPool(4)
        [block] = cached(pool, b"one")
        pool.free_blocks([block])
        assert pool.get_cached_block(b"one") is block

    def test_its_hash_is_forgotten_when_it_is_handed_out(self):
        pool = BlockPool(2)
        [block] = cached(pool, b"one")
        pool.free_blocks([block])
        assert pool.get_new_blocks(1) == [block]
        assert pool.get_cached_block(b"one") is None and block.block_hash is None

    def test_a_hit_on_a_free_block_takes_it_out_of_the_queue(self):
        pool = BlockPool(5)
        blocks = cached(pool, b"one", b"two")
        pool.free_blocks(blocks)
        pool.touch([blocks[0]])
        assert ids(pool.free_queue) == [3, 4, 2] and blocks[0].ref_cnt == 1

    def test_of_two_blocks_with_one_hash_the_first_is_hit_until_it_is_evicted(self):
        pool = BlockPool(4)
        first, second = cached(pool, b"same", b"same")
        assert pool.get_cached_block(b"same") is first
        pool.evict(first)
        assert pool.get_cached_block(b"same") is second
        pool.evict(second)
        assert pool.get_cached_block(b"same") is None and not pool.cached_blocks

    def test_of_three_the_oldest_that_is_left_is_hit(self):
        pool = BlockPool(4)
        first, second, third = cached(pool, b"same", b"same", b"same")
        pool.evict(second)
        assert pool.get_cached_block(b"same") is first
        pool.evict(first)
        assert pool.get_cached_block(b"same") is third and not pool.duplicates

    def test_a_block_of_a_step_that_was_confirmed_stays(self):
        pool = BlockPool(4)
        [block] = cached(pool, b"one")
        pool.start_over()  # a later step failed
        assert pool.get_cached_block(b"one") is block

    def test_a_block_of_a_step_that_failed_is_found_no_more(self):
        pool = BlockPool(4)
        [block] = pool.get_new_blocks(1)
        pool.publish(block, b"one")
        assert pool.get_cached_block(b"one") is block  # within the step it can be hit already
        pool.start_over()
        assert pool.get_cached_block(b"one") is None and block.ref_cnt == 0

    def test_reset_is_refused_while_a_block_is_held(self):
        pool = BlockPool(4)
        [block] = cached(pool, b"one")
        assert not pool.reset_prefix_cache() and pool.get_cached_block(b"one") is block
        pool.free_blocks([block])
        assert pool.reset_prefix_cache() and pool.get_cached_block(b"one") is None and block.block_hash is None


class TestStartOver:
    def test_all_blocks_are_free_and_what_was_filled_is_still_cached(self):
        pool = BlockPool(5)
        [filled] = cached(pool, b"filled")
        [unfilled] = pool.get_new_blocks(1)
        pool.publish(unfilled, b"unfilled")
        pool.start_over()
        assert ids(pool.free_queue) == [2, 3, 4, 1]
        assert pool.get_cached_block(b"filled") is filled and pool.get_cached_block(b"unfilled") is None

    def test_it_may_be_called_again(self):
        pool = BlockPool(5)
        cached(pool, b"one", b"two")
        pool.start_over()
        before = ids(pool.free_queue)
        pool.start_over()
        assert ids(pool.free_queue) == before == [3, 4, 1, 2]
