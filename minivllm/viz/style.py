"""What all figures and source excerpts of the book share."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

# Okabe and Ito's palette, which colour-blind readers can tell apart; black and yellow are left out (text, contrast).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
GREY = "#8c8c8c"

STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",  # the site puts figures on a light card in dark mode
    "figure.dpi": 150,
    "savefig.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "lines.linewidth": 2,
}
WIDTH = 7.0  # inches: 700 px on the site, so that 10 pt are readable there


def use_style() -> None:
    """Make `STYLE` the default of all figures from here on."""
    matplotlib.rcParams.update(STYLE)


def new_figure(height: float, rows: int = 1, columns: int = 1, **keywords: Any) -> tuple[Figure, Any]:
    """(figure, axes) as from `plt.subplots`, in the book's style and width; `height` in inches."""
    with matplotlib.rc_context(STYLE):
        return plt.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained", **keywords)


def show(figure: Figure, alt: str) -> None:
    """Display a figure in a notebook, once, with a description for readers who do not see it."""
    from IPython.display import display

    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)


def excerpt(what: Any, first: str = "", last: str = "") -> str:
    """The live source of a function or class, from the line that contains `first` to the next that contains `last`.

    Without them, to the end of it. ValueError if a line is not there (any more), so that a text around it is noticed.
    """
    lines = inspect.getsource(what).splitlines()
    start = _find(lines, first, 0, what) if first else 0
    stop = _find(lines, last, start, what) if last else len(lines) - 1
    return textwrap.dedent("\n".join(lines[start : stop + 1]))


def _find(lines: list[str], wanted: str, start: int, what: Any) -> int:
    for number in range(start, len(lines)):
        if wanted in lines[number]:
            return number
    raise ValueError(f"the source of {getattr(what, '__qualname__', what)} has no line with {wanted!r}")
