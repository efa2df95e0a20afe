"""Text for a terminal: tables, and nothing in it that the terminal would obey."""

from __future__ import annotations


def escaped(text: str) -> str:
    """One line in which control characters are written out, `\\x1b`: names in a checkpoint are somebody else's text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show(text: str) -> None:
    """Print lines, each `escaped`."""
    print("\n".join(map(escaped, text.split("\n"))))


def not_known(model_type: str) -> str:
    return f"model_type {model_type!r} is not known here: counted as if it were a Llama"


def table(rows: list[tuple[str, str]]) -> str:
    """A name and a text a row; a text without a name is a heading."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {escaped(text)}" if name else f"\n{text}:" for name, text in rows)


def columns(rows: list[tuple[str, ...]]) -> str:
    """Numbers to the right; the first column and the last are words."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]))
    return "\n".join(lines)
