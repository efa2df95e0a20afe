"""How long torch's threads wait for each other by spinning, which is set before they start.

Between two parallel pieces of a step an idle thread spins for the next one, since being woken costs tens of
microseconds. GNU's OpenMP, which torch brings, spins 300,000 times. That is good as long as every thread has a core. On
a busy machine, the one that is waited for may not be running, and the one that spins is in its way: decoding falls to a
third. A few thousand turns nearly outlast the pauses inside a step, and no more.

On two cores of a Xeon, SmolLM2, batch 1 and 16 (tokens/s), quiet, and beside one busy process:

    turns      quiet            busy
    default    26     236       9.3    75
    30,000     28     251       5.4    60
    3,000      26     264       14    143
    1,000      23     250       16    162
    0          22     220       20    169
"""

from __future__ import annotations

import os
import sys

SPIN_COUNT = 3000


def limit_spinning() -> bool:
    """Set the limit, unless the user has set something or torch is there already (it reads this once, as it starts);
    whether it counts. `minivllm` calls it when it is imported; no effect where torch has another OpenMP (macOS)."""
    if "torch" in sys.modules or "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        return False
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return True


def one_thread_after_fork() -> None:
    """In a forked child the threads of the parent's OpenMP do not exist, and work that is shared among them would wait
    for ever: so a child has one thread. Called once, when torch is there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_use_one_thread)


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)
