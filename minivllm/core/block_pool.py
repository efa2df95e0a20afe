"""The pool of KV blocks: which are free, in what order they will be reused, and what the cached ones hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from minivllm.core.block_tier import BlockTier


class KVCacheBlock:
    """One physical block: an index into the KV cache tensor, and its bookkeeping."""

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0  # live block tables that hold it
        self.block_hash: bytes | None = None  # set while the prefix cache can find it
        # The neighbours in the free queue: blocks, or None while it is in no queue and nobody asks.
        self.prev_free: Any = None
        self.next_free: Any = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, cached={self.block_hash is not None})"


class FreeBlocks(Protocol):
    """The free blocks, and with them the eviction order: which of them is handed out, and forgotten, next.

    A policy is a class with these methods, made from the free blocks in order of their ids.
    """

    num_free_blocks: int

    def release(self, uncached: Sequence[KVCacheBlock], cached: Sequence[KVCacheBlock]) -> None:
        """Blocks that nobody holds any more, in the order in which they were given back."""
        ...

    def remove(self, block: KVCacheBlock) -> None:
        """Take out a block that was hit."""
        ...

    def popleft(self) -> KVCacheBlock:
        """Take out the block to use next."""
        ...

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """All of them, the next to be used first."""
        ...


class FreeKVCacheBlockQueue:
    """vLLM's order: least recently used first, and before all of them the blocks that cache nothing.

    A doubly linked list through the blocks themselves, so that a cached block which is hit again leaves the
    middle of the queue in O(1). A deque would have to search for it.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        # One sentinel closes the list to a ring: no operation has an "empty" or "at the end" case.
        self.sentinel = KVCacheBlock(-1)
        self.sentinel.prev_free = self.sentinel.next_free = self.sentinel
        self.num_free_blocks = 0
        self._insert(blocks, self.sentinel)

    def _insert(self, blocks: Sequence[KVCacheBlock], before: KVCacheBlock) -> None:
        last = before.prev_free
        for block in blocks:
            last.next_free = block
            block.prev_free = last
            last = block
        last.next_free = before
        before.prev_free = last
        self.num_free_blocks += len(blocks)

    def release(self, uncached: Sequence[KVCacheBlock], cached: Sequence[KVCacheBlock]) -> None:
        """Nothing is lost by using the `uncached` ones again, so they go to the front; the others to the back."""
        self._insert(uncached, self.sentinel.next_free)
        self._insert(cached, self.sentinel)

    def remove(self, block: KVCacheBlock) -> None:
        block.prev_free.next_free = block.next_free
        block.next_free.prev_free = block.prev_free
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def popleft(self) -> KVCacheBlock:
        block = self.sentinel.next_free
        if block is self.sentinel:
            raise RuntimeError("the free queue is empty: the caller did not compare with num_free_blocks first")
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self.sentinel.next_free
        while block is not self.sentinel:
            yield block
            block = block.next_free


# Makes an eviction order from the blocks that are free at the start, in order of their ids.
MakeFreeBlocks = Callable[[Sequence[KVCacheBlock]], FreeBlocks]


class BlockPool:
    """All blocks, the free queue and the map from hash to cached blocks (vLLM 0.30.0, block_pool.py).

    A freed block keeps its hash, and so can still be hit, until it is handed out again.
    """

    def __init__(
        self,
        num_blocks: int,
        free_blocks: MakeFreeBlocks = FreeKVCacheBlockQueue,
        tier: BlockTier | None = None,
    ) -> None:
        """`free_blocks` makes the eviction order; `tier` is asked to keep what is evicted."""
        self._make_free_blocks = free_blocks
        self.tier = tier
        self.stores: list[tuple[int, int]] = []  # (block, slot of the tier) that the next step must copy
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        # Block 0 is never handed out: padded block tables and unused slots can point at it without harm.
        self.null_block = self.blocks[0]
        self.free_queue = free_blocks(self.blocks[1:])
        self.cached_blocks: dict[bytes, KVCacheBlock] = {}
        # Two requests that compute the same tokens at the same time publish one hash twice. Both blocks stay (a
        # block table never changes), and a look-up takes the first. The others, oldest first, are here: in a dict,
        # since one in the middle may be evicted.
        self.duplicates: dict[bytes, dict[KVCacheBlock, None]] = {}
        # Published for the step in progress, which has yet to fill them.
        self.unfilled: list[KVCacheBlock] = []

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_free_blocks

    @property
    def num_usable_blocks(self) -> int:
        return len(self.blocks) - 1

    @property
    def usage(self) -> float:
        """Share of the usable blocks that some request holds, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        return self.cached_blocks.get(block_hash)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take `num_blocks` from the head of the free queue; what they cached is forgotten.

        The caller has made sure that there are enough.
        """
        new_blocks = []
        for _ in range(num_blocks):
            block = self.free_queue.popleft()
            if block.block_hash is not None:
                if self.tier is not None:
                    self._store(block, block.block_hash, self.tier)
                self.evict(block)
            block.ref_cnt = 1
            new_blocks.append(block)
        return new_blocks

    def _store(self, block: KVCacheBlock, block_hash: bytes, tier: BlockTier) -> None:
        if block_hash not in self.duplicates:  # else another block still caches the same
            slot = tier.store(block_hash)
            if slot is not None:
                self.stores.append((block.block_id, slot))

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add one reference to each block of a hit; those that were free leave the queue."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop one reference of each, in the given order.

        Blocks that nobody holds any more become free; the eviction order decides when they are used again.
        """
        uncached: list[KVCacheBlock] = []
        cached: list[KVCacheBlock] = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (uncached if block.block_hash is None else cached).append(block)
        self.free_queue.release(uncached, cached)

    def publish(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Make a full block findable under its hash, for good only when `confirm_filled` says that it was filled."""
        self.unfilled.append(block)
        block.block_hash = block_hash
        if self.cached_blocks.setdefault(block_hash, block) is not block:
            self.duplicates.setdefault(block_hash, {})[block] = None

    def confirm_filled(self) -> None:
        """The step is done: what was published for it holds what its hash says, and what it had to copy is copied."""
        self.unfilled.clear()
        if self.tier is not None:
            self.tier.complete_step()

    def evict(self, block: KVCacheBlock) -> None:
        """Take a block out of the hash map; its table entries, if any, stay."""
        block_hash = block.block_hash
        assert block_hash is not None  # the callers ask first
        block.block_hash = None
        others = self.duplicates.get(block_hash)
        if others is None:
            del self.cached_blocks[block_hash]
            return
        if self.cached_blocks[block_hash] is block:
            block = self.cached_blocks[block_hash] = next(iter(others))
        del others[block]
        if not others:
            del self.duplicates[block_hash]

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes. Only when no request holds a block; False, with nothing changed, otherwise."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        self.cached_blocks.clear()
        self.duplicates.clear()
        for block in self.blocks:
            block.block_hash = None
        if self.tier is not None:
            self.tier.clear()
        return True

    def start_over(self) -> None:
        """Free all blocks, whatever state they are in; those that cache what was computed keep it. A second tier does
        not: nobody knows which copies were made."""
        if self.tier is not None:
            self.tier.clear()
        self.stores = []
        for block in self.unfilled:
            block.block_hash = None
        self.cached_blocks, self.duplicates = {}, {}
        for block in self.blocks:
            block.ref_cnt = 0
            if block.block_hash is not None:
                self.publish(block, block.block_hash)
        self.free_queue = self._make_free_blocks([])
        usable = self.blocks[1:]
        self.free_queue.release(
            [block for block in usable if block.block_hash is None],
            [block for block in usable if block.block_hash is not None],
        )
        self.unfilled.clear()
