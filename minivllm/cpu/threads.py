"""Threads on a machine that other programs use too, as laptops are.

The threads of a step wait for each other hundreds of times. When one of them has to share its core, all wait for it,
and decoding falls to a third. Two things help. Threads wait by spinning, and those that spin are in the way of the one
that is waited for: so they spin for a bounded time only (`limit_spinning`). And where all threads together get little
more than one core, one thread alone is faster (`StepThreads`).

SmolLM2 on two cores of a Xeon, batch 1 and 16 (tokens/s), alone and beside one busy process:

    threads  turns       alone           beside
    2        300,000     15.2   189       6.3    45     PyTorch's own way
    2        3,000       22.4   180      10.2   109
    2        1,000       18.7   191      13.5   146
    1        any         17.8   166      17.4   152
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

# GNU's OpenMP, which torch brings, spins 300,000 times by itself. This many nearly outlast the pauses inside a step.
SPIN_COUNT = 3000


def limit_spinning() -> bool:
    """Set the limit, unless the user has set something or torch is there already (it reads this once, as it starts);
    whether it counts. `minivllm` calls it when it is imported; no effect where torch has another OpenMP (macOS)."""
    if "torch" in sys.modules or "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        return False
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return True


class StepThreads:
    """Runs a step (`with step_threads:`) with torch's threads, or with one while several get no more than that.

    Whether they do is seen in the processor time of the whole process: several threads that have a core each take at
    least 1.4 s of it in a second, and little more than 1 s if they must share. (A step that has nothing to share among
    threads also takes 1 s, and loses nothing.) With one thread it cannot be seen, so from time to time a stretch of
    steps is run with all. Outside the steps torch keeps the number that its user gave it.
    """

    STRETCH = 0.5  # s of steps that are judged together: the system counts processor time in lumps
    ENOUGH = 1.2  # cores
    PAUSES = (2.0, 30.0)  # s with one thread until all are tried again; doubled each time that it was no use

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, processor_time: Callable[[], float] = time.process_time
    ) -> None:
        import torch

        self.torch, self.clock, self.processor_time = torch, clock, processor_time
        self.uses_one = False
        self._until = 0.0  # while `uses_one`: when to try again
        self._pause = self.PAUSES[0]
        self._wall = self._processor = 0.0  # of the stretch so far
        self._to_restore = 0  # inside a step with one thread: the user's number

    def __enter__(self) -> None:
        self._start, self._processor_start = self.clock(), self.processor_time()
        if self.uses_one and self._start >= self._until:
            self.uses_one = False
        if self._to_restore:  # an interrupt came between the end of a step and the next line
            self._restore()
        if self.uses_one:
            self._to_restore = self.torch.get_num_threads()
            self.torch.set_num_threads(1)

    def __exit__(self, *error: object) -> None:
        if self._to_restore:
            self._restore()
        elif self.torch.get_num_threads() > 1:
            self._wall += self.clock() - self._start
            self._processor += self.processor_time() - self._processor_start
            if self._wall >= self.STRETCH:
                self._judge()

    def _restore(self) -> None:
        self.torch.set_num_threads(self._to_restore)
        self._to_restore = 0

    def _judge(self) -> None:
        self.uses_one = self._processor < self.ENOUGH * self._wall
        self._wall = self._processor = 0.0
        if self.uses_one:
            self._until = self.clock() + self._pause
        shortest, longest = self.PAUSES
        self._pause = min(2 * self._pause, longest) if self.uses_one else shortest


def one_thread_after_fork() -> None:
    """In a forked child the threads of the parent's OpenMP do not exist, and work that is shared among them would wait
    for ever: so a child has one thread. Called once, when torch is there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_use_one_thread)


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)
