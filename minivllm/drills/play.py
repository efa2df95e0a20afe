"""Asking: a round at a terminal, and a quiz in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minivllm.drills.answers import Drill
from minivllm.drills.topics import draw


def play(
    drills: Sequence[Drill],
    ask: Callable[[str], str],
    tell: Callable[[str], None] = print,
) -> tuple[int, int]:
    """Ask each drill, twice at most; returns (right at the first try, asked).

    An empty answer gives up. "q", the end of the input or Ctrl-C ends the round, and what was asked by then counts.
    """
    tell("A plain number counts in the unit in brackets. Enter alone shows the solution, q ends.")
    right = asked = 0
    for number, one in enumerate(drills, 1):
        tell(f"\n{number}/{len(drills)} {one.name}\n{one.question}")
        tries: list[bool] = []
        try:
            _ask_one(one, ask, tell, tries)
        except (EOFError, KeyboardInterrupt):
            asked += bool(tries)
            tell("")
            break
        asked += 1
        right += tries[:1] == [True]
    tell(f"\nScore: {right} of {asked} at the first try.")
    return right, asked


def _ask_one(one: Drill, ask: Callable[[str], str], tell: Callable[[str], None], tries: list[bool]) -> None:
    """Ask until it is right, given up or wrong twice; `tries` takes whether each answer was right."""
    while len(tries) < 2 and True not in tries:
        text = ask(f"answer ({one.asked}): ").strip()
        if not text:
            break
        if text.lower() in ("q", "quit", "exit"):
            raise EOFError
        try:
            verdict = one.check(text)
        except ValueError as error:  # not a try: nothing was answered
            tell(f"? {error}")
            continue
        tries.append(verdict.is_right)
        tell(f"{'✓' if verdict.is_right else '✗'} {verdict.message}")
    tell(one.explain())


class Quiz:
    """Drills in a notebook, where nothing can be typed at a prompt: `questions()`, `answer(1, "56 KiB")`, `score()`."""

    def __init__(self, count: int = 5, seed: int = 0, topic: str | None = None) -> None:
        self.drills = draw(count, seed, topic)
        self.first_tries: dict[int, bool] = {}

    def questions(self) -> None:
        """Print all of them, each with the unit of a plain number."""
        for number, one in enumerate(self.drills, 1):
            print(f"{number}  {one.question} ({one.asked})")

    def answer(self, number: int, value: float | str) -> None:
        """Print whether that is right, and which mistake it looks like if not. The first try counts."""
        if not self._has(number):
            return
        if value is None or value is ... or (isinstance(value, str) and not value.strip()):
            print(f"question {number} is not answered yet")
            return
        try:
            verdict = self.drills[number - 1].check(value)
        except (ValueError, TypeError) as error:  # not a try: nothing was answered
            print(f"? {error}")
            return
        self.first_tries.setdefault(number, verdict.is_right)
        print(f"{'✓' if verdict.is_right else '✗'} {verdict.message}")

    def explain(self, number: int) -> None:
        """Print the formula, with the numbers of the question, and the answer. It counts as a try."""
        if not self._has(number):
            return
        self.first_tries.setdefault(number, False)
        print(self.drills[number - 1].explain())

    def _has(self, number: int) -> bool:
        exists = number in range(1, len(self.drills) + 1)
        if not exists:
            print(f"? question {number!r} does not exist: there are {len(self.drills)}, counted from 1")
        return exists

    def score(self) -> str:
        right = sum(self.first_tries.values())
        return f"{right} of {len(self.drills)} right at the first try, {len(self.first_tries)} tried"
