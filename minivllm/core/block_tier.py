"""A second tier: room elsewhere (host memory, a disk) for blocks that the pool is about to forget.

It decides and never moves a byte. Its slots are numbers; which block goes to which slot and back is part of the step
(`SchedulerOutput.stores`, `loads`), and the executor copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol


class BlockTier(Protocol):
    """What the block pool (store) and the KV manager (look up, load) ask a second tier.

    A step copies all of its stores before its loads, and both before its forward pass.
    """

    num_slots: int

    def lookup(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, it holds."""
        ...

    def load(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The slots of blocks that it holds. Until the step is complete they are not given to others."""
        ...

    def store(self, block_hash: bytes) -> int | None:
        """A slot for a block that is evicted; None if it holds it already, or does not want it."""
        ...

    def complete_step(self) -> None:
        """All copies that were asked for have been made."""
        ...

    def clear(self) -> None:
        """Forget everything: the cache was reset, or a step was cut short, perhaps between two copies."""
        ...


class LRUTier:
    """Keeps whatever is evicted, and makes room by forgetting what was longest neither stored, hit nor loaded."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a second tier needs at least one slot, got {num_slots}.")
        self.num_slots = num_slots
        self.clear()

    def clear(self) -> None:
        self.slots: OrderedDict[bytes, int] = OrderedDict()  # by block hash, the least recently used first
        self.pinned: set[bytes] = set()  # being loaded
        self._unused = list(range(self.num_slots))

    def lookup(self, block_hashes: Sequence[bytes]) -> int:
        for index, block_hash in enumerate(block_hashes):
            if block_hash not in self.slots:
                return index
        return len(block_hashes)

    def load(self, block_hashes: Sequence[bytes]) -> list[int]:
        self.pinned.update(block_hashes)
        for block_hash in reversed(block_hashes):  # the first is the most recent: without it the others are no use
            self.slots.move_to_end(block_hash)
        return [self.slots[block_hash] for block_hash in block_hashes]

    def store(self, block_hash: bytes) -> int | None:
        if block_hash in self.slots:
            self.slots.move_to_end(block_hash)
            return None
        if self._unused:
            slot = self._unused.pop()
        else:
            oldest = next((held for held in self.slots if held not in self.pinned), None)
            if oldest is None:
                return None
            slot = self.slots.pop(oldest)
        self.slots[block_hash] = slot
        return slot

    def complete_step(self) -> None:
        self.pinned.clear()
