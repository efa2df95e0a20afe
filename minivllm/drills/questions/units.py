"""GB and GiB, rounding, and what a cache saves."""

from __future__ import annotations

import math
import random

from minivllm.drills.answers import Drill
from minivllm.drills.topics import drill
from minivllm.theory.quantity import Quantity
from minivllm.units import GB, GIB


@drill("units")
def gb_to_gib(rng: random.Random) -> Drill:
    gb = rng.choice((24, 40, 48, 80, 141))
    right = Quantity(gb * GB, "B", "memory", "label * 10 ** 9", {"label": gb})
    return Drill(
        "GB and GiB",
        f"A label says {gb} GB and means 10^9 bytes each. How many GiB is that?",
        right,
        "GiB",
        {
            "by multiplying: a GiB is larger, so there are fewer": gb * GB * (GIB / GB) ** 2,
            "as if they were the same": gb * GIB,
        },
        0.005,
        is_conversion=True,
    )


@drill("units")
def repeated_work(rng: random.Random) -> Drill:
    n = rng.choice((10, 100, 2048))
    right = Quantity(
        100 * (1 - 2 / (n + 1)), "%", "repeated token computations", "100 * (1 - 2 / (tokens + 1))", {"tokens": n}
    )
    return Drill(
        "what a cache saves",
        f"Without a KV cache, a model generates {n:,} tokens one after the other and recomputes all of them at each "
        "step (1 + 2 + ... + n token computations). What percentage of these computations repeats an earlier one?",
        right,
        "%",
        {
            "as half of them": 50.0,
            "by comparing with n squared": 100 * (1 - 1 / n),
            "as the share that is new": 200 / (n + 1),
        },
        0.0004 if n > 1000 else 0.005,
    )


@drill("units")
def last_block(rng: random.Random) -> Drill:
    block_size, length = rng.choice((16, 32)), rng.randrange(100, 3000)
    right = Quantity(
        math.ceil(length / block_size), "blocks", "blocks", "ceil(tokens / block_size)",
        {"tokens": length, "block_size": block_size},
    )  # fmt: skip
    return Drill(
        "blocks of a request",
        f"How many blocks of {block_size} tokens does a request of {length:,} tokens hold?",
        right,
        "blocks",
        {"by rounding down: the last tokens need a block too": length // block_size},
        0,
    )
