"""Numbers that can say how they came about.

A `Quantity` is a float, so it adds, compares and formats like one; the result of arithmetic is a plain number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


class Quantity(float):
    """A value with its name, its unit, and the formula and terms it was computed from.

    `formula` is an expression in the names of `terms`; a term may be a Quantity itself.
    """

    name: str
    unit: str
    formula: str
    terms: Mapping[str, float]

    def __new__(
        cls, value: float, unit: str, name: str, formula: str = "", terms: Mapping[str, float] | None = None
    ) -> Quantity:
        self = super().__new__(cls, value)
        self.unit, self.name, self.formula, self.terms = unit, name, formula, dict(terms or {})
        return self

    def __reduce__(self) -> tuple:
        return Quantity, (float(self), self.unit, self.name, self.formula, self.terms)

    def __str__(self) -> str:
        return format_value(float(self), self.unit)

    def __repr__(self) -> str:
        return f"{self.name}: {self}"

    def explain(self, depth: int = 1, width: int = 78) -> str:
        """The formula, the formula with its terms filled in, and the result, a line each; lines longer than `width` go
        on below.

        Terms that were computed themselves follow, indented, down to `depth` levels below this one.
        """
        if not self.formula:
            return repr(self)
        indent = " " * len(self.name)
        filled = _IDENTIFIER.sub(self._value_of, self.formula)
        lines = []
        for line in (f"{self.name} = {self.formula}", f"{indent} = {filled}", f"{indent} = {self}"):
            lines += _wrap(line, width, indent + "   ")
        for term in self.terms.values():
            if depth > 0 and isinstance(term, Quantity) and term.formula:
                lines += ["  " + line for line in term.explain(depth - 1, width - 2).splitlines()]
        return "\n".join(lines)

    def _value_of(self, match: re.Match[str]) -> str:
        name = match.group()
        if name not in self.terms:
            return name  # a function, such as floor
        term = self.terms[name]
        unit = term.unit if isinstance(term, Quantity) else ""
        number = f"{term:,.0f}" if unit == "B" and abs(term) >= 1000 else format_number(float(term))
        return f"{number}{' ' + unit if unit else ''}"


def _wrap(line: str, width: int, indent: str) -> list[str]:
    """The line, broken before an operator wherever it is longer than `width`."""
    lines = []
    while len(line) > width:
        at = max(line.rfind(f" {operator} ", len(indent) + 1, width) for operator in "+-*/")
        if at < 0:
            break
        lines.append(line[:at])
        line = indent + line[at + 1 :]
    return [*lines, line]


def format_number(value: float) -> str:
    """As short as it can be without losing what matters: 57,344; 0.92; 3.35e+12."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000 and abs(value) < 1e9:
        return f"{value:,.1f}"
    return f"{value:.4g}"


def format_value(value: float, unit: str) -> str:
    """Bytes in both spellings (56.00 KiB = 57.34 kB), seconds in a readable scale, everything else as a number."""
    if unit == "B":
        return format_bytes(value)
    if unit == "s":
        for scale, prefix in ((1, ""), (1e3, "m"), (1e6, "µ")):
            if abs(value) * scale >= 1:
                return f"{value * scale:,.4g} {prefix}s"
        return f"{value * 1e6:.4g} µs" if value else "0 s"
    if unit in ("FLOP", "FLOP/s", "B/s"):
        return _scaled(value, 1000, _DECIMAL, unit)
    return f"{format_number(value)} {unit}".rstrip()


def format_bytes(value: float) -> str:
    """57,344 B = 56.00 KiB = 57.34 kB. GiB is 2^30 bytes, GB is 10^9."""
    if abs(value) < 1024:
        return f"{format_number(value)} B"
    both = f"{_scaled(value, 1024, _BINARY, 'B')} = {_scaled(value, 1000, _DECIMAL, 'B')}"
    return f"{value:,.0f} B = {both}" if abs(value) < 1e6 else both


def _scaled(value: float, base: int, prefixes: tuple[str, ...], unit: str) -> str:
    power = 0
    while abs(value) >= base and power < len(prefixes) - 1:
        value, power = value / base, power + 1
    return f"{value:,.2f} {prefixes[power]}{unit}" if power else f"{format_number(value)} {unit}"
