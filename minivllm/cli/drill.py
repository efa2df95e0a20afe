"""`minivllm drill`: napkin questions of an interview, with a score."""

from __future__ import annotations

import argparse
import random

from minivllm.cli.arguments import count
from minivllm.drills import TOPICS, draw, play


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer with a number, with or without a unit: 56, 56 KiB and 57344 B are the same. A wrong answer that comes "
        "from a well-known mistake is told which; then there is a second try. Enter alone gives up, q ends the round."
    )
    parser.add_argument("--topic", help=f"one of {', '.join(TOPICS)} (default: all)")
    parser.add_argument("--count", type=count, default=10, help="questions (default 10)")
    parser.add_argument("--seed", type=int, help="the same seed draws the same questions (default: new ones each time)")


def run(args: argparse.Namespace) -> int:
    """ValueError for an unknown topic."""
    if args.count > 1000:
        raise ValueError(f"--count is {args.count:,}, at most 1,000 questions in a round")
    seed = random.randrange(10**6) if args.seed is None else args.seed
    drills = draw(args.count, seed, args.topic)
    print(f"{len(drills)} question{'s' if len(drills) > 1 else ''}, seed {seed}.")
    play(drills, ask=_ask)
    return 0


def _ask(prompt: str) -> str:
    try:
        return input(prompt)
    except RuntimeError:  # standard input was closed before the program began
        raise EOFError from None
