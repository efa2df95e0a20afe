"""The roofline: what a processor can do at each intensity, and where steps lie on it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from minivllm.theory.roofline import Step
from minivllm.viz.style import COLORS, GREY, new_figure


def roofline_figure(flop_s: float, bytes_s: float, steps: Mapping[str, Step], title: str = "") -> Figure:
    """Attainable FLOP/s over FLOP/B, both logarithmic, with each step at the height that the roof allows it."""
    fig, ax = new_figure(4.0)
    ridge = flop_s / bytes_s
    found = [float(step.intensity) for step in steps.values()]
    low, high = min([*found, ridge / 300]) / 2, max([*found, ridge * 10]) * 2
    x = np.array([low, ridge, high])
    ax.loglog(x, np.minimum(x * bytes_s, flop_s), color=GREY, lw=2)
    ax.axvline(ridge, color=GREY, lw=1, ls=":")
    ax.annotate(f"ridge {ridge:,.0f} FLOP/B", (ridge, flop_s), xytext=(-6, 6), textcoords="offset points", ha="right")
    for i, (name, step) in enumerate(steps.items()):
        intensity = float(step.intensity)
        height = min(intensity * bytes_s, flop_s)
        ax.plot(intensity, height, "o", color=COLORS[i % len(COLORS)], ms=7)
        ax.annotate(name, (intensity, height), xytext=(7, -11), textcoords="offset points")
    ax.set_xlabel("intensity, FLOP per byte")
    ax.set_ylabel("attainable FLOP/s")
    ax.set_ylim(top=flop_s * 3)
    if title:
        ax.set_title(title)
    return fig
