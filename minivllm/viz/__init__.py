"""Figures of the book: one style, and pictures that are drawn from the event log of a run.

Functions take data and return a Figure; nothing is set at import. A notebook calls `use_style()` once, and `show(fig,
alt)` for each figure.
"""

from minivllm.viz.blocks import BlockHistory, block_history, block_map, block_tables
from minivllm.viz.style import COLORS, GREY, STYLE, excerpt, new_figure, show, use_style

__all__ = [
    "COLORS",
    "GREY",
    "STYLE",
    "BlockHistory",
    "block_history",
    "block_map",
    "block_tables",
    "excerpt",
    "new_figure",
    "show",
    "use_style",
]
