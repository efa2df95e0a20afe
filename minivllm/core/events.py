"""The event log: one record a step, from which every figure, metric and test reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What happened in one engine step. `start` and `end` are the engine's clock, in seconds.

    scheduled: request id -> tokens computed in this step, in scheduling order.
    computed: request id -> tokens in the cache after this step.
    new_blocks: request id -> block ids; the whole table when the request was admitted in this step (its first
    `hits[id]` tokens came from the prefix cache), otherwise the additions. Requests that needed none are absent.
    finished: requests that ended in this step (all of them if its forward pass failed). aborted: those that were
    ended between the step before and this one; their blocks were free before this step was scheduled.
    stores, loads: (block, slot) and (slot, block) copied to and from a second tier before the forward pass.
    num_*: counts right after scheduling.
    """

    step: int
    start: float
    end: float
    scheduled: Mapping[str, int]
    computed: Mapping[str, int]
    new_blocks: Mapping[str, Sequence[int]]
    hits: Mapping[str, int]
    preempted: Sequence[str]
    finished: list[str]
    aborted: Sequence[str]
    num_free_blocks: int
    num_running: int
    num_waiting: int
    stores: Sequence[tuple[int, int]] = ()
    loads: Sequence[tuple[int, int]] = ()


class EventLog:
    """The last `max_steps` step events, oldest first. None keeps all of them: about 1 KB per step and request."""

    def __init__(self, max_steps: int | None = None) -> None:
        self._events: deque[StepEvent] = deque(maxlen=max_steps)

    def append(self, event: StepEvent) -> None:
        self._events.append(event)

    def clear(self) -> None:
        self._events.clear()

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[StepEvent]:
        return iter(self._events)

    @overload
    def __getitem__(self, index: int) -> StepEvent: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepEvent]: ...

    def __getitem__(self, index: int | slice) -> StepEvent | list[StepEvent]:
        return list(self._events)[index] if isinstance(index, slice) else self._events[index]

    def to_pandas(self) -> pandas.DataFrame:
        """One row a step, indexed by step number; times in seconds, tokens and blocks as counts."""
        import pandas

        rows = [
            {
                "step": event.step,
                "start_s": event.start,
                "duration_s": event.end - event.start,
                "requests": len(event.scheduled),
                "tokens": sum(event.scheduled.values()),
                "hit_tokens": sum(event.hits.values()),
                "new_blocks": sum(
                    len(ids) for ids in event.new_blocks.values()
                ),  # hit blocks of an admitted request counted in
                "preempted": len(event.preempted),
                "finished": len(event.finished),
                "aborted": len(event.aborted),
                "stored_blocks": len(event.stores),
                "loaded_blocks": len(event.loads),
                "free_blocks": event.num_free_blocks,
                "running": event.num_running,
                "waiting": event.num_waiting,
            }
            for event in self._events
        ]
        return pandas.DataFrame(rows).set_index("step") if rows else pandas.DataFrame()
