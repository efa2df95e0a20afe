"""A question with its answer, and what somebody typed judged by it: units, parsing, the mistake that it looks like."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from minivllm.theory.quantity import Quantity, format_number

# What may be typed after a number, and how much of the base unit it is.
UNITS: dict[str, dict[str, float]] = {
    "B": {
        "b": 1, "bytes": 1, "byte": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
        "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    },
    "s": {"s": 1, "sec": 1, "seconds": 1, "ms": 1e-3, "milliseconds": 1e-3, "us": 1e-6, "µs": 1e-6, "\u03bcs": 1e-6},
    "FLOP/B": {"flop/b": 1, "flop/byte": 1, "flops/b": 1, "flops/byte": 1, "ops/byte": 1},
    "tokens": {"tokens": 1, "token": 1, "requests": 1},
    "requests": {"requests": 1, "request": 1, "x": 1},
    "blocks": {"blocks": 1, "block": 1},
    "tokens/s": {"tokens/s": 1, "tok/s": 1, "t/s": 1, "tokens/sec": 1},
    "GPUs": {"gpus": 1, "gpu": 1},
    "%": {"%": 1, "percent": 1},
    "": {"": 1, "x": 1, "times": 1, "experts": 1},
}  # fmt: skip


def _named_units(unit: str) -> list[tuple[str, float]]:
    """The units of that kind as they are written, and their size."""
    names = ("B", "KiB", "MiB", "GiB", "TiB", "kB", "MB", "GB", "TB", "s", "ms", "µs")
    return [(name, UNITS[unit][name.lower()]) for name in names if name.lower() in UNITS[unit]]


@dataclass(frozen=True)
class Verdict:
    is_right: bool
    message: str


@dataclass(frozen=True)
class Drill:
    """One question with its parameters filled in.

    `ask_in` is the unit of a plain number, such as "KiB". `tolerance` is relative, 0 for counts. `traps` maps what a
    mistake is called to the value that it gives, in the unit of `answer`.
    """

    name: str
    question: str
    answer: Quantity
    ask_in: str
    traps: Mapping[str, float] = field(default_factory=dict)
    tolerance: float = 0.02
    is_conversion: bool = False  # then an answer in another unit would only repeat the question

    def parse(self, text: str) -> float:
        """The value that somebody typed, in the unit of `answer`. ValueError says what it could not read."""
        number, unit = self._read(text)
        return number * UNITS[self.answer.unit][unit.lower()]

    def _read(self, text: str) -> tuple[float, str]:
        """Number and unit, which is `ask_in` if none was typed."""
        match = re.fullmatch(r"\s*([-+]?[\d.,_]*\d[\d.,_]*(?:e[-+]?\d+)?)\s*(\S*)\s*", text, re.IGNORECASE)
        if match is None:
            raise ValueError(f"{text.strip()!r} is not a number; write one, with or without a unit ({self.ask_in})")
        number, unit = match.group(1), match.group(2) or self.ask_in
        if "," in number and not re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", number):
            raise ValueError(f"{number!r} can be read in two ways; write a decimal point, and commas only at thousands")
        if unit.lower() not in UNITS[self.answer.unit]:
            raise ValueError(f"the unit {unit!r} does not fit; a plain number counts as {self.ask_in or 'a ratio'}")
        if self.is_conversion and unit.lower() != self.ask_in.lower():
            raise ValueError(f"the question is how many {self.ask_in} it is; you gave {unit}")
        try:
            return float(re.sub(r"[,_]", "", number)), unit
        except ValueError:
            raise ValueError(f"{number!r} is not a number") from None

    def check(self, value: float | str) -> Verdict:
        """Whether it is right; if not, which mistake it looks like. A plain number is in `ask_in`."""
        number, unit = self._read(value) if isinstance(value, str) else (float(value), self.ask_in)
        found = number * UNITS[self.answer.unit].get(unit.lower(), 1)
        if self._is(found, self.answer):
            return Verdict(True, self.answer_text)
        near = {
            f"that is what one gets {mistake}": abs(found - wrong) / abs(wrong or 1)
            for mistake, wrong in self.traps.items()
            if self._is(found, wrong)
        }
        if unit.lower() == self.ask_in.lower():
            for name, size in _named_units(self.answer.unit):
                off = abs(number * size / self.answer - 1) if self.answer else 1
                if off < 0.005:
                    near[f"that would be right in {name}; {self.ask_in} is asked for"] = off
        if self.ask_in == "%" and self.answer and abs(100 * number / self.answer - 1) < 0.005:
            near["that is a fraction; percent is asked for"] = 0.0
        if near:
            return Verdict(False, min(near, key=lambda text: near[text]))
        if self.answer and found / self.answer > 0:
            ratio = max(found / self.answer, self.answer / found)
            side = "large" if found > self.answer else "small"
            how = f"{100 * (ratio - 1):.2g} %" if ratio < 1.1 else f"a factor of {format_number(float(f'{ratio:.3g}'))}"
            return Verdict(False, f"too {side}, by {how}")
        return Verdict(False, "no")

    @property
    def asked(self) -> str:
        """The unit of a plain number, and how exact it must be."""
        exact = "exactly" if self.tolerance == 0 else f"within {100 * self.tolerance:g} %"
        return f"{self.ask_in}, {exact}" if self.ask_in else exact

    @property
    def answer_text(self) -> str:
        """The answer in the unit that was asked for."""
        return f"{format_number(self.answer / self._one)} {self.ask_in}".rstrip()

    def explain(self) -> str:
        """The formula with the numbers of the question, down to the answer in the unit that was asked for."""
        lines = self.answer.explain(depth=0).splitlines()
        if not lines[-1].endswith(f"= {self.answer_text}"):
            lines.append(f"{' ' * len(self.answer.name)} = {self.answer_text}")
        for term in self.answer.terms.values():
            if isinstance(term, Quantity) and term.formula:
                lines += ["  " + line for line in term.explain(depth=0, width=76).splitlines()]
        return "\n".join(lines)

    @property
    def _one(self) -> float:
        """One of the asked unit, in the unit of `answer`."""
        return UNITS[self.answer.unit].get(self.ask_in.lower(), 1)

    def _is(self, found: float, wanted: float) -> bool:
        return math.isclose(found, wanted, rel_tol=max(self.tolerance, 1e-9), abs_tol=1e-12)
