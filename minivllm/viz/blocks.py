"""Who held which KV block when: rebuilt from the event log, and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minivllm.core.events import EventLog
from minivllm.viz.style import COLORS, GREY, STYLE, new_figure

LIGHT_GREY = "#e4e4e4"


@dataclass(frozen=True)
class BlockHistory:
    """The block tables of a run over time.

    steps: step numbers. requests: ids, by first admission.
    held: bool [steps, requests, blocks]; whether the request's table names the block, right after scheduling.
    """

    steps: Sequence[int]
    requests: Sequence[str]
    held: np.ndarray

    @property
    def ref_counts(self) -> np.ndarray:
        """int [steps, blocks]: how many tables name each block."""
        return self.held.sum(axis=1)

    @property
    def owners(self) -> np.ndarray:
        """int [steps, blocks]: index of the request that holds the block (the earliest of several), -1 if nobody."""
        return np.where(self.held.any(axis=1), self.held.argmax(axis=1), -1)


def block_history(event_log: EventLog, num_blocks: int) -> BlockHistory:
    """Replay the log. `num_blocks` is the pool, the null block included.

    ValueError if the log does not add up because its beginning was dropped (a bounded log).
    """
    requests: dict[str, int] = {}
    for event in event_log:
        for request_id in event.hits:
            requests.setdefault(request_id, len(requests))
    tables: dict[str, list[int]] = {}
    held = np.zeros((len(event_log), len(requests), num_blocks), dtype=bool)
    for row, event in enumerate(event_log):
        for request_id in [*event.aborted, *event.preempted]:
            tables.pop(request_id, None)
        for request_id, block_ids in event.new_blocks.items():
            if request_id in event.hits:  # admitted in this step: the whole table comes
                tables[request_id] = []
            elif request_id not in tables:
                raise ValueError(f"step {event.step}: request {request_id!r} was admitted before this log begins")
            tables[request_id].extend(block_ids)
        for request_id, block_ids in tables.items():
            held[row, requests[request_id], block_ids] = True
        used, logged = int(held[row].any(axis=0).sum()), num_blocks - 1 - event.num_free_blocks
        if used != logged:
            raise ValueError(
                f"step {event.step}: the log's tables hold {used} blocks, but {logged} were in use; it lacks its "
                f"beginning"
            )
        for request_id in event.finished:
            tables.pop(request_id, None)
    return BlockHistory([event.step for event in event_log], list(requests), held)


def block_map(
    event_log: EventLog, num_blocks: int, names: Mapping[str, str] | None = None, height: float = 4.0
) -> Figure:
    """Physical blocks over time, coloured by who holds them; a block with several holders is split between them.

    names: request id -> what to call it (default: the id). Free blocks are white, the null block is grey.
    """
    history = block_history(event_log, num_blocks)
    names = names or {}
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(height)
        axes.add_patch(Rectangle((0, -0.5), len(history.steps), 1, color=LIGHT_GREY, linewidth=0))
        axes.text(len(history.steps) / 2, 0, "null block", ha="center", va="center", fontsize=8, color="#555555")
        for block in range(1, num_blocks):
            for start, stop, holders in _runs(history.held[:, :, block]):
                _cell(axes, start, block - 0.42, stop - start, 0.84, holders)
                label = "+".join(names.get(history.requests[r], history.requests[r]) for r in holders)
                _label(axes, start + 0.3, block, label, holders, ha="left", fontsize=8)
        axes.set_xlim(0, len(history.steps))
        axes.set_ylim(num_blocks - 0.5, -0.5)
        axes.set_yticks(range(num_blocks))
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.set_xlabel("engine step")
        axes.set_ylabel("physical block")
    return figure


def _runs(held: np.ndarray) -> list[tuple[int, int, list[int]]]:
    """Stretches of steps [start, stop) in which the same requests hold a block; `held` is [steps, requests]."""
    changes = np.flatnonzero((held[1:] != held[:-1]).any(axis=1)) + 1
    edges = pairwise([0, *changes.tolist(), len(held)])
    return [(start, stop, np.flatnonzero(held[start]).tolist()) for start, stop in edges if held[start].any()]


def block_tables(
    tables: Mapping[str, Sequence[int]], lengths: Mapping[str, int], block_size: int, num_blocks: int
) -> Figure:
    """Block tables above the pool that they point into.

    tables: name -> physical block ids in logical order. lengths: name -> tokens in the cache. A block of a table is
    filled as far as it holds tokens; a block of the pool has the colours of the requests that hold it.
    """
    columns = max(num_blocks, *(len(table) for table in tables.values()))
    small = 10 if columns <= 20 else 7
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(0.42 * (len(tables) + 2.4))
        for row, (name, table) in enumerate(tables.items()):
            axes.text(-0.3, row, f"{name}: {lengths[name]} tokens", ha="right", va="center")
            for logical, block_id in enumerate(table):
                filled = min(block_size, lengths[name] - logical * block_size) / block_size
                _cell(axes, logical + 0.04, row - 0.38, 0.92 * filled, 0.76, [row])
                _frame(axes, logical, row)
                _label(axes, logical + 0.5, row, str(block_id), fontsize=small)
        pool = len(tables) + 1
        axes.text(-0.3, pool, "pool", ha="right", va="center")
        for block_id in range(num_blocks):
            holders = [row for row, table in enumerate(tables.values()) if block_id in table]
            _cell(axes, block_id + 0.04, pool - 0.38, 0.92, 0.76, holders)
            _frame(axes, block_id, pool, color=LIGHT_GREY if block_id == 0 else None)
            size = small if block_id else small - 2
            _label(axes, block_id + 0.5, pool, str(block_id or "null"), holders, fontsize=size)
        axes.set_xlim(-0.02, columns + 0.02)
        axes.set_ylim(pool + 0.5, -0.5)
        axes.axis("off")
    return figure


def _cell(axes: Axes, x: float, y: float, width: float, height: float, requests: Sequence[int]) -> None:
    """A rectangle in the colours of the requests, one band each, light enough for black text on it."""
    for place, request in enumerate(requests):
        color = matplotlib.colors.to_rgb(COLORS[request % len(COLORS)])
        light = tuple(0.45 + 0.55 * part for part in color)
        band = height / len(requests)
        axes.add_patch(Rectangle((x, y + place * band), width, band, facecolor=light, edgecolor="white", linewidth=0.6))


def _frame(axes: Axes, column: int, row: int, color: str | None = None) -> None:
    """The outline of a block, filled with `color` if there is one."""
    fill = {"fill": False} if color is None else {"facecolor": color}
    axes.add_patch(Rectangle((column + 0.04, row - 0.38), 0.92, 0.76, edgecolor=GREY, **fill))


def _label(
    axes: Axes, x: float, y: float, text: str, holders: Sequence[int] = (), ha: str = "center", fontsize: int = 10
) -> None:
    """Text on a cell; where several colours meet, on a light ground."""
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6} if len(holders) > 1 else None
    axes.text(x, y, text, ha=ha, va="center", fontsize=fontsize, bbox=box)
