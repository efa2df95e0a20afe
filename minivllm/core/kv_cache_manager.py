"""Who holds which blocks: look-up, allocation and freeing by the rules of vLLM 0.30.0 (kv_cache_manager.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.config import CacheConfig
from minivllm.core.block_hash import extend_block_hashes
from minivllm.core.block_pool import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock, MakeFreeBlocks
from minivllm.core.block_tier import BlockTier
from minivllm.request import Request
from minivllm.units import cdiv

NO_BLOCKS: tuple[KVCacheBlock, ...] = ()


@dataclass(slots=True)
class PrefixCacheStats:
    """Prefix-cache look-ups in tokens, counted once per admission.

    Re-admissions after a preemption are apart, so that they do not inflate the hit rate.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    loaded: int = 0  # of all hits, those from the second tier
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, request: Request, num_hits: int, num_loaded: int = 0) -> None:
        self.loaded += num_loaded
        if request.num_preemptions > 0:
            self.preempted_requests += 1
            self.preempted_queries += request.num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += request.num_tokens
            self.hits += num_hits


class KVCacheManager:
    """Gives requests blocks and takes them back; the only writer of block tables."""

    def __init__(
        self,
        config: CacheConfig,
        max_model_len: int,
        free_blocks: MakeFreeBlocks = FreeKVCacheBlockQueue,
        tier: BlockTier | None = None,
    ) -> None:
        """`free_blocks` makes the eviction order of the pool; `tier`, if any, keeps what the pool forgets."""
        self.config = config
        self.block_size = config.block_size
        self.enable_caching = config.enable_prefix_caching
        self.max_model_len = max_model_len
        self.watermark_blocks = int(config.watermark * config.num_blocks)
        self.block_pool = BlockPool(config.num_blocks, free_blocks, tier)
        self.tier = tier
        self.loads: list[tuple[int, int]] = []  # (slot of the tier, block) that the next step must copy
        self.block_tables: dict[str, list[KVCacheBlock]] = {}
        # How many leading blocks of each table are published (or were hits). Published blocks are never re-hashed.
        self.num_published: dict[str, int] = {}
        self.prefix_cache_stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        return self.block_pool.usage

    def get_block_ids(self, request_id: str) -> list[int]:
        """The block table of a request: physical ids in logical order."""
        return [block.block_id for block in self.block_tables.get(request_id, NO_BLOCKS)]

    def lookup_enabled(self, request: Request) -> bool:
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """The longest run of leading full blocks that the cache holds, at most `num_tokens - 1` tokens of them.

        One token at least must be computed, or there would be no logits to sample from; since only whole blocks
        count, a prompt of exactly k cached blocks recomputes the whole last one.
        """
        hits: list[KVCacheBlock] = []
        if not self.lookup_enabled(request):
            return hits
        extend_block_hashes(request, self.block_size)
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def num_loadable_blocks(self, request: Request, num_hits: int) -> int:
        """How many more blocks the second tier holds, after the `num_hits` of `get_computed_blocks`."""
        if self.tier is None or not self.lookup_enabled(request):
            return 0
        return self.tier.lookup(request.block_hashes[num_hits : (request.num_tokens - 1) // self.block_size])

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hits: Sequence[KVCacheBlock] = NO_BLOCKS,
        *,
        num_loads: int = 0,
        admission: bool = False,
        reserve_full_sequence: bool = False,
        watermark: bool = False,
    ) -> Sequence[KVCacheBlock] | None:
        """Give `request` blocks for `num_new_tokens` more tokens, after the cached blocks `hits` and `num_loads` that
        come from the second tier.

        Returns the new blocks, or None, with nothing changed, if the pool is short. Blocks that become full are
        published for other requests at once, before the forward pass that fills them: a request admitted later in
        the same step can hit them, so the pass must write K/V before it reads any.

        admission: a waiting request enters (hits, loads and the two flags only count then);
        reserve_full_sequence: the request's whole present length must fit, not only this chunk;
        watermark: leave that many blocks free.

        `request.num_ready_tokens` says until when the next call can wait: there is no block to add, none to publish.
        """
        block_size, pool = self.block_size, self.block_pool
        num_tokens = request.num_computed_tokens + (len(hits) + num_loads) * block_size + num_new_tokens
        num_slots = num_tokens if num_tokens < self.max_model_len else self.max_model_len
        request_id = request.request_id
        if admission:
            table: list[KVCacheBlock] = []
            # Hits that nobody holds sit in the free queue: taking them makes the free count smaller too.
            taken = sum(block.ref_cnt == 0 for block in hits) + (self.watermark_blocks if watermark else 0)
            must_fit = (
                max(num_slots, min(request.num_tokens, self.max_model_len)) if reserve_full_sequence else num_slots
            )
            if cdiv(must_fit, block_size) - len(hits) + taken > pool.num_free_blocks:
                return None
            pool.touch(hits)
            table.extend(hits)
            if num_loads:
                table.extend(self._load(request.block_hashes[len(hits) : len(hits) + num_loads]))
            self.block_tables[request_id] = table
            self.num_published[request_id] = len(table)
        else:
            table = self.block_tables[request_id]

        num_new_blocks = cdiv(num_slots, block_size) - len(table)
        new_blocks: Sequence[KVCacheBlock] = NO_BLOCKS
        if num_new_blocks > 0:
            if num_new_blocks > pool.num_free_blocks:  # a running request; an admission was asked above
                return None
            new_blocks = pool.get_new_blocks(num_new_blocks)
            table.extend(new_blocks)

        ready = len(table) * block_size
        if self.enable_caching:
            num_full = min(num_tokens, request.num_tokens) // block_size
            if num_full > self.num_published[request_id]:
                self._publish(request, table, num_full)
            ready = min(ready, (num_full + 1) * block_size - 1)  # the next block becomes full
        request.num_ready_tokens = ready
        return new_blocks

    def _load(self, block_hashes: Sequence[bytes]) -> list[KVCacheBlock]:
        """New blocks that the next step fills from the second tier, published as those that it computes are."""
        assert self.tier is not None  # it said that it holds them
        slots = self.tier.load(block_hashes)  # first: what the new blocks cached may be stored there
        blocks = self.block_pool.get_new_blocks(len(slots))
        for block, block_hash, slot in zip(blocks, block_hashes, slots, strict=True):
            self.block_pool.publish(block, block_hash)
            self.loads.append((slot, block.block_id))
        return blocks

    def take_transfers(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(stores, loads) since the last call: (block, slot of the tier) to copy, then (slot, block)."""
        stores, loads = self.block_pool.stores, self.loads
        self.block_pool.stores, self.loads = [], []
        return stores, loads

    def _publish(self, request: Request, table: list[KVCacheBlock], num_full: int) -> None:
        extend_block_hashes(request, self.block_size)
        for index in range(self.num_published[request.request_id], num_full):
            self.block_pool.publish(table[index], request.block_hashes[index])
        self.num_published[request.request_id] = num_full

    def free(self, request: Request) -> None:
        """Take the request's blocks back, tail first, so that a tail is reused before the prefix it hangs on."""
        table = self.block_tables.pop(request.request_id, None)
        if table is not None:
            del self.num_published[request.request_id]
            self.block_pool.free_blocks(reversed(table))

    def free_unfilled(self, request: Request, num_computed_tokens: int) -> None:
        """Free a request that this step preempts: only `num_computed_tokens` of it are in the cache.

        Blocks that this step published were never filled, so their hashes must go, or the next request that hits
        them reads K/V that nobody computed. vLLM 0.30.0 leaves them in; the queue order is kept as it has it.
        """
        unfilled = self.block_tables.get(request.request_id, [])[num_computed_tokens // self.block_size :]
        self.free(request)
        for block in unfilled:
            if block.block_hash is not None:
                self.block_pool.evict(block)

    def confirm_filled(self) -> None:
        """The step is done, and with it the blocks that `allocate_slots` published for it."""
        self.block_pool.confirm_filled()

    def start_over(self) -> None:
        """Nobody holds a block any more, whatever state tables and pool are in."""
        self.block_tables, self.num_published, self.loads = {}, {}, []
        self.block_pool.start_over()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, with nothing changed, while any request holds one."""
        return self.block_pool.reset_prefix_cache()

    def take_prefix_cache_stats(self) -> PrefixCacheStats:
        """The statistics since the last call."""
        stats, self.prefix_cache_stats = self.prefix_cache_stats, PrefixCacheStats()
        return stats

    def check_invariants(self) -> None:
        """Raise RuntimeError if the bookkeeping contradicts itself. O(pool); tests call it after every step."""
        pool = self.block_pool
        free = [block.block_id for block in pool.free_queue]
        holders = [0] * len(pool.blocks)
        for request_id, table in self.block_tables.items():
            ids = [block.block_id for block in table]
            _require(len(set(ids)) == len(ids), f"table of {request_id} names a block twice: {ids}")
            for block_id in ids:
                holders[block_id] += 1
        _require(len(free) == pool.num_free_blocks, f"{len(free)} blocks queued, {pool.num_free_blocks} counted")
        _require(len(set(free)) == len(free), "a block is in the free queue twice")
        _require(holders[0] == 0 and 0 not in free, "the null block was handed out or is in the free queue")
        free_set = set(free)
        cached = defaultdict(list, {block_hash: [block] for block_hash, block in pool.cached_blocks.items()})
        for block_hash, others in pool.duplicates.items():
            _require(block_hash in cached and bool(others), "duplicates of a block that is not cached, or none")
            cached[block_hash] += others
        for block in pool.blocks[1:]:
            _require(
                block.ref_cnt == holders[block.block_id],
                f"block {block.block_id}: ref_cnt {block.ref_cnt}, but {holders[block.block_id]} tables hold it",
            )
            _require((block.ref_cnt == 0) == (block.block_id in free_set), f"{block}: free and used disagree")
            _require(
                block.block_hash is None or block in cached[block.block_hash],
                f"{block} carries a hash that the map does not know",
            )
        for block_hash, blocks in cached.items():
            _require(len(set(blocks)) == len(blocks), "the hash map names a block twice")
            for block in blocks:
                _require(block.block_hash == block_hash, f"{block} is listed under a hash that it does not carry")
        _require(set(self.block_tables) == set(self.num_published), "tables and published counts disagree")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"KV cache invariant broken: {what}")
