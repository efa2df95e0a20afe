"""`minivllm roofline`: how fast prefill and decode can be at best, and what bounds them."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from minivllm.cli.arguments import add_model_and_gpu, chosen_model, count, number
from minivllm.cli.text import columns, escaped, not_known, show
from minivllm.resources import INSTALL
from minivllm.theory.catalog import find_device
from minivllm.theory.quantity import format_bytes
from minivllm.theory.roofline_report import RooflineReport, RooflineSettings, TimedStep, roofline_report


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lower bounds of prefill and decode from counted operations and bytes, with peak rates from data sheets."
    )
    add_model_and_gpu(parser)
    parser.add_argument("--context", type=count, help="tokens of each request (default 4,096, or the model's most)")
    parser.add_argument("--batch", type=count, nargs="+", default=[1, 8, 32, 128, 256], help="decode batch sizes")
    parser.add_argument("--compute-efficiency", type=number, default=1.0, help="reached share of the peak FLOP/s")
    parser.add_argument("--memory-efficiency", type=number, default=1.0, help="reached share of the bandwidth")
    parser.add_argument(
        "--compute-dtype", default="auto", help="of the products (default: fp8 for fp8 weights, else the model's)"
    )
    parser.add_argument("--plot", metavar="FILE", help="write the roofline as a picture (png, svg, pdf)")


def run(args: argparse.Namespace) -> int:
    """ValueError if something cannot be."""
    spec, device = chosen_model(args), find_device(args.gpu)
    if args.plot is not None and (os.path.isdir(args.plot) or not Path(args.plot).suffix):
        raise ValueError(f"the picture cannot be written to {args.plot!r}: give a file name, such as roofline.png")
    if max(args.batch) > 100_000:
        raise ValueError(f"--batch is {max(args.batch):,}, at most 100,000 requests")
    settings = RooflineSettings(
        context=args.context,
        batches=tuple(args.batch),
        tp=args.tp,
        kv_dtype=args.kv_dtype,
        weight_dtype=args.weight_dtype,
        compute_dtype=args.compute_dtype,
        compute_efficiency=args.compute_efficiency,
        memory_efficiency=args.memory_efficiency,
    )
    report = roofline_report(spec, device, settings)
    if args.json:
        print(json.dumps(report_as_dict(report), indent=2))
    else:
        _print(report)
    if args.explain:
        parts = (report.ridge.explain(), report.critical_batch.explain(0), report.critical_batch_with_kv.explain(0))
        show("\n" + "\n\n".join(parts))
    if args.plot is not None:
        _plot(report, args.plot)
    return 0


def report_as_dict(report: RooflineReport) -> dict[str, Any]:
    """The report for machines, with the units in the names."""
    with_kv = report.critical_batch_with_kv
    return {
        "model": report.spec.name,
        "gpu": report.device.name,
        "tp": report.tp,
        "compute_dtype": report.compute_dtype,
        "architecture_known": report.spec.is_known,
        "weights_fit": report.weights_fit,
        "context_tokens": report.context,
        "ridge_flop_per_byte": float(report.ridge),
        "critical_batch_weights_only": float(report.critical_batch),
        "critical_batch_with_kv_reads": float(with_kv) if math.isfinite(with_kv) else None,
        "steps": [_step_as_dict(timed) for timed in report.steps],
    }


def _step_as_dict(timed: TimedStep) -> dict[str, Any]:
    return {
        "phase": timed.phase,
        "batch": timed.batch,
        "flops": float(timed.step.flops),
        "bytes": float(timed.step.bytes),
        "intensity_flop_per_byte": float(timed.step.intensity),
        "step_s": float(timed.time.seconds),
        "all_reduce_s": timed.time.all_reduce_s,
        "tokens_per_s": timed.tokens_per_s,
        "bound": timed.time.bound,
    }


def _print(report: RooflineReport) -> None:
    spec, device, with_kv = report.spec, report.device, report.critical_batch_with_kv
    show(f"{escaped(spec.name)} on {report.tp} x {device.title}, {report.context:,} tokens per request; at best:\n")
    show(columns([("", "batch", "FLOP/B", "ms", "tokens/s", "bound by"), *map(_row, report.steps)]))
    limit = f"{with_kv:,.0f}" if math.isfinite(with_kv) else "none: KV reads take longer than the computing they serve"
    show(
        f"\nridge point: {report.ridge:.0f} FLOP/B; critical batch: {report.critical_batch:,.0f} by weights alone; "
        f"with KV reads at this context: {limit}"
    )
    show(
        f"products in {report.compute_dtype}: {device.flop_s(report.compute_dtype) / 1e12:,.0f} TFLOP/s dense; memory: "
        f"{device.bandwidth / 1e9:,.0f} GB/s"
    )
    if not report.weights_fit:
        show(
            f"note: the weights, {format_bytes(report.weights)} per GPU, do not fit into its "
            f"{format_bytes(device.memory_bytes)}"
        )
    if not spec.is_known:
        show(f"note: {not_known(spec.model_type)}")


def _row(timed: TimedStep) -> tuple[str, ...]:
    speed = timed.tokens_per_s
    return (
        timed.phase,
        f"{timed.batch:,}",
        f"{timed.step.intensity:.1f}",
        f"{1e3 * timed.time.seconds:,.2f}",
        f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}",
        timed.time.bound,
    )


def _plot(report: RooflineReport, path: str) -> None:
    """ValueError if the picture cannot be drawn here, or not be written."""
    try:
        from minivllm.viz.roofline import roofline_figure
    except ModuleNotFoundError as error:
        raise ValueError(f"--plot needs {error.name}, which is not installed: {INSTALL}") from None
    points = {f"{timed.phase} {timed.batch}": timed.step for timed in report.steps}
    title = f"{report.spec.name} on {report.device.title}"
    figure = roofline_figure(report.flop_s, report.bytes_s, points, title=title)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"the picture cannot be written to {path}: {error}") from None
