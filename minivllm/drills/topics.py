"""The questions by topic, and a draw from them that a seed decides."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from minivllm.drills.answers import Drill

Maker = Callable[[random.Random], Drill]
# In this order, which is part of what a seed draws; the files in questions/ fill them.
TOPICS: dict[str, list[Maker]] = {"sizing": [], "capacity": [], "roofline": [], "units": []}


def drill(topic: str) -> Callable[[Maker], Maker]:
    """Register a maker under its topic."""

    def register(maker: Maker) -> Maker:
        TOPICS[topic].append(maker)
        return maker

    return register


def maker_of(name: str) -> Maker:
    """The question that the function of that name makes, such as "kv_per_token". ValueError for an unknown one."""
    makers = {maker.__name__: maker for some in TOPICS.values() for maker in some}
    if name not in makers:
        raise ValueError(f"unknown question {name!r}; questions: {', '.join(makers)}")
    return makers[name]


def draw(count: int, seed: int, topic: str | None = None) -> list[Drill]:
    """`count` drills in an order that the seed decides; every maker of the topic comes before one comes again."""
    if topic is not None and topic not in TOPICS:
        raise ValueError(f"unknown topic {topic!r}; topics: {', '.join(TOPICS)}")
    rng = random.Random(seed)
    makers = [maker for name, some in TOPICS.items() if topic in (None, name) for maker in some]
    order: list[Maker] = []
    while len(order) < count:
        order += rng.sample(makers, len(makers))
    return [make(maker, rng.randrange(2**32)) for maker in order[:count]]


def make(maker: Maker, seed: int) -> Drill:
    """One drill, with traps that are (nearly) right left out: with these numbers the mistake does not show."""
    made = maker(random.Random(seed))
    by_value: dict[float, list[str]] = {}  # two mistakes may give one value, and are then named together
    for mistake, value in made.traps.items():
        if math.isfinite(value) and not made._is(value, made.answer):
            same = next((known for known in by_value if math.isclose(known, value, rel_tol=1e-6)), value)
            by_value.setdefault(same, []).append(mistake)
    traps = {"; or ".join(mistakes): value for value, mistakes in by_value.items()}
    return replace(made, traps=traps)
