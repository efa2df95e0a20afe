"""`python -m minivllm size`, `roofline` and `drill`: the calculators on the command line."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivllm.theory.catalog import Device, find_device, find_model, list_devices, list_models, plain_name
from minivllm.theory.drills import TOPICS, draw, play
from minivllm.theory.model_spec import FULL, LINEAR, SLIDING, ModelSpec, full_dtype
from minivllm.theory.plan import Plan, Settings, as_served, make_plan
from minivllm.theory.quantity import Quantity, format_bytes
from minivllm.theory.roofline import (
    Step,
    critical_batch,
    critical_batch_with_kv,
    decode_step,
    prefill_step,
    ridge_point,
    step_time,
)
from minivllm.theory.sizing import (
    KV_DTYPES,
    WEIGHT_BITS,
    check_context,
    checkpoint_bytes,
    kv_bytes_per_request,
    kv_bytes_per_token,
    kv_dtype_name,
    pipeline_stages,
    state_bytes_per_layer,
    weight_bytes,
    weight_format,
)
from minivllm.theory.ways_out import ways_out
from minivllm.units import GIB

LARGEST = 10**9  # of any number on the command line


def add_parsers(commands: argparse._SubParsersAction) -> None:
    """Add the commands to the program's parser; each sets `run`, the function that runs it."""
    size = commands.add_parser(
        "size", help="how many requests of a model fit on a GPU, and what limits them", description=_SIZE
    )
    size.set_defaults(run=run_size)
    _add_model_and_gpu(size)
    size.add_argument(
        "--context", type=_count, help="tokens of a request, prompt and output (default: the model's most)"
    )
    size.add_argument("--concurrency", type=_count, help="requests wanted at the same time")
    size.add_argument("--pp", type=_count, default=1, help="pipeline stages (default 1)")
    size.add_argument("--gpu-memory-utilization", type=_number, default=0.92, help="share of the memory (default 0.92)")
    size.add_argument("--block-size", type=_count, default=16, help="tokens of a KV block (default 16)")
    size.add_argument("--max-num-seqs", type=_count, help="default: vllm serve's, 256 or 1,024 by GPU")
    size.add_argument("--max-num-batched-tokens", type=_count, help="default: vllm serve's, 2,048 to 16,384 by GPU")
    size.add_argument("--weights-gib", type=_number, help="size of the checkpoint, where it is known")
    size.add_argument("--activation-gib", type=_number, help="activation peak, where vLLM's log shows it")
    size.add_argument("--other-gib", type=_number_or_0, default=0.5, help="CUDA context, NCCL, graphs (assumed: 0.5)")

    roofline = commands.add_parser(
        "roofline", help="how fast prefill and decode can be at best, and what bounds them", description=_ROOFLINE
    )
    roofline.set_defaults(run=run_roofline)
    _add_model_and_gpu(roofline)
    roofline.add_argument("--context", type=_count, help="tokens of each request (default 4,096, or the model's most)")
    roofline.add_argument("--batch", type=_count, nargs="+", default=[1, 8, 32, 128, 256], help="decode batch sizes")
    roofline.add_argument("--compute-efficiency", type=_number, default=1.0, help="reached share of the peak FLOP/s")
    roofline.add_argument("--memory-efficiency", type=_number, default=1.0, help="reached share of the bandwidth")
    roofline.add_argument(
        "--compute-dtype", default="auto", help="of the products (default: fp8 for fp8 weights, else the model's)"
    )
    roofline.add_argument("--plot", metavar="FILE", help="write the roofline as a picture (png, svg, pdf)")

    known = commands.add_parser("catalog", help="the models and GPUs that are known by name")
    known.set_defaults(run=run_catalog)
    known.add_argument("text", nargs="?", default="", help="only names that contain this")

    drill = commands.add_parser("drill", help="napkin questions of an interview, with a score", description=_DRILL)
    drill.set_defaults(run=run_drill)
    drill.add_argument("--topic", help=f"one of {', '.join(TOPICS)} (default: all)")
    drill.add_argument("--count", type=_count, default=10, help="questions (default 10)")
    drill.add_argument("--seed", type=int, help="the same seed draws the same questions (default: new ones each time)")


_DRILL = (
    "Answer with a number, with or without a unit: 56, 56 KiB and 57344 B are the same. A wrong answer that comes from "
    "a well-known mistake is told which; then there is a second try. Enter alone gives up, q ends the round."
)
_SIZE = (
    "Weights, KV cache per token, blocks, and the requests that fit. Weights come from the parameter count, "
    "activations are estimated, the rest is assumed: give --weights-gib and --activation-gib where a log shows them."
)
_ROOFLINE = "Lower bounds of prefill and decode from counted operations and bytes, with peak rates from data sheets."


def run_size(args: argparse.Namespace) -> int:
    """ValueError if something cannot be or does not fit."""
    spec, device = _model(args), find_device(args.gpu)
    settings = Settings(
        context=args.context or spec.max_position_embeddings,
        concurrency=args.concurrency,
        tp=args.tp,
        pp=args.pp,
        kv_dtype=args.kv_dtype,
        weight_dtype=args.weight_dtype,
        weight_bytes=_known_weight_bytes(args, spec),
        gpu_memory_utilization=args.gpu_memory_utilization,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        activation_bytes=None if args.activation_gib is None else args.activation_gib * GIB,
        other_bytes=args.other_gib * GIB,
    )
    plan = make_plan(spec, device, settings)
    if args.json:
        print(json.dumps(plan_as_dict(plan), indent=2))
        return 0
    rows = plan_rows(plan)
    if spec.dtype == "float32" and "auto" in (args.weight_dtype, args.kv_dtype):
        rows.insert(2, ("note", "a float32 checkpoint, which vLLM serves in 16 bits"))
    print(_table(rows))
    if args.explain:
        for quantity in (plan.per_token, plan.budget, plan.per_request, plan.requests_in_memory):
            print(f"\n{quantity.explain(depth=0)}")
    print(f"\nLimit: {plan.limit}.")
    if not plan.fits:
        ways = [_as_options(change) for change in ways_out(plan)] or ["a larger GPU, or a smaller model"]
        print(f"{'Any of these' if len(ways) > 1 else 'This'} would do: {'; or '.join(ways)}.")
    return 0


def _known_weight_bytes(args: argparse.Namespace, spec: ModelSpec) -> float | None:
    """Given, or the size of the files beside the config, unless another dtype is asked for."""
    if args.weights_gib is not None:
        return args.weights_gib * GIB
    is_loaded_as_stored = spec.dtype != "float32" or spec.quantization is not None
    if args.config is not None and args.weight_dtype == "auto" and is_loaded_as_stored:
        return checkpoint_bytes(args.config)
    return None


def _as_options(change: dict[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items())


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    settings, spec = plan.settings, plan.spec
    gpus = settings.tp * settings.pp
    estimated = "given" if settings.activation_bytes is not None else "estimated"
    reported = "reported by the driver" if plan.device.memory_reported_gib else "as labelled"
    rows = [
        ("model", f"{spec.name}: {spec.describe_layers()} layers, {spec.num_heads} heads, {_kv_heads(spec)}"),
        ("dtypes", f"weights {_weight_dtype(plan)}, KV cache {_kv_dtype(plan)}"),
        ("GPUs", f"{gpus} x {plan.device.title}, {plan.device.memory_bytes / GIB:,.2f} GiB each ({reported})"),
        ("", "on each GPU"),
        ("weights", format_bytes(plan.weights)),
        ("activation peak", f"{format_bytes(plan.activation_peak)} ({estimated})"),
        ("other", f"{format_bytes(settings.other_bytes)} (assumed)"),
        ("KV budget", f"{format_bytes(plan.budget)} at {settings.gpu_memory_utilization:g} of the memory"),
        ("KV per token", format_bytes(plan.per_token) + _scales(plan)),
        ("", "on the server"),
        ("KV per request", f"{format_bytes(plan.per_request)} per GPU for {settings.context:,} tokens"),
    ]
    if len(plan.layout.num_groups) > 1 or SLIDING in spec.layer_types:
        need = kv_bytes_per_request(spec, settings.context, settings.kv_dtype, settings.tp, settings.pp)
        rest = "steps in flight" if SLIDING in spec.layer_types else "copies of states, unfilled blocks"
        rows.append(("its contents", f"{format_bytes(need)} (the rest is for {rest})"))
    sizes = " or ".join(f"{size:,}" for size in sorted(set(plan.layout.block_sizes.values())))
    rows += [("blocks", f"{int(plan.num_blocks):,} of {sizes} tokens{_groups(plan)}")]
    if SLIDING in spec.layer_types:
        growth = kv_bytes_per_token(spec, settings.kv_dtype, settings.tp, settings.pp, beyond_window=True)
        rows.append(("beyond the window", f"{format_bytes(growth)} per token and GPU"))
    if LINEAR in spec.layer_types:
        count = max(stage.count(LINEAR) for stage in pipeline_stages(spec, settings.pp))
        state = count * state_bytes_per_layer(spec, settings.tp)
        rows.append(("state", f"{format_bytes(state)} per request and GPU, whatever its length"))
    if not spec.is_known:
        rows.append(("note", _not_known(spec)))
    rows += [
        ("KV tokens", f"{plan.num_tokens:,}"),
        ("concurrency", f"{float(plan.max_concurrency):,.2f} requests of {settings.context:,} tokens"),
        ("requests at once", f"{plan.requests_at_once:,} (max_num_seqs {plan.max_num_seqs:,})"),
        ("longest context", f"{plan.longest_context:,} tokens for one request"),
    ]
    return rows


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """The plan for machines: bytes and counts, with the units in the names."""
    return {
        "model": plan.spec.name,
        "gpu": plan.device.name,
        "tp": plan.settings.tp,
        "pp": plan.settings.pp,
        "context_tokens": plan.settings.context,
        "memory_bytes_per_gpu": plan.device.memory_bytes,
        "weights_bytes_per_gpu": float(plan.weights),
        "activation_bytes_per_gpu": float(plan.activation_peak),
        "other_bytes_per_gpu": plan.settings.other_bytes,
        "weight_dtype": _weight_dtype(plan),
        "kv_dtype": _kv_dtype(plan),
        "gpu_memory_utilization": plan.settings.gpu_memory_utilization,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "architecture_known": plan.spec.is_known,
        "kv_budget_bytes_per_gpu": float(plan.budget),
        "kv_bytes_per_token_per_gpu": float(plan.per_token),
        "kv_bytes_per_request_per_gpu": float(plan.per_request),
        "block_size_tokens": plan.layout.block_size,
        "block_bytes_per_gpu": float(plan.layout.block_bytes),
        "blocks_per_request": int(plan.per_request.terms["blocks_per_request"]),
        "num_blocks": int(plan.num_blocks),
        "kv_tokens": plan.num_tokens,
        "max_concurrency_requests": float(plan.max_concurrency),
        "max_num_seqs": plan.max_num_seqs,
        "requests_at_once": plan.requests_at_once,
        "longest_context_tokens": plan.longest_context,
        "wanted_requests": plan.settings.concurrency,
        "fits": plan.fits,
        "limit": plan.limit,
    }


def _weight_dtype(plan: Plan) -> str:
    if plan.settings.weight_bytes is not None:
        return "as given"
    chosen = plan.settings.weight_dtype
    return plan.spec.quantization or plan.spec.dtype if chosen == "auto" else chosen


def _kv_dtype(plan: Plan) -> str:
    return kv_dtype_name(plan.settings.kv_dtype, plan.spec)


def _scales(plan: Plan) -> str:
    """What quantised caches store besides their elements."""
    dtype = KV_DTYPES[_kv_dtype(plan)]
    if not dtype.scale_bytes:
        return ""
    group = f"{dtype.group} elements" if dtype.group else "token and head"
    return f", scales included: {dtype.scale_bytes} bytes per {group}"


def _not_known(spec: ModelSpec) -> str:
    return f"model_type {spec.model_type!r} is not known here: counted as if it were a Llama"


def _groups(plan: Plan) -> str:
    """Where layers of several kinds share the pool: what each kind takes of it."""
    if len(plan.layout.num_groups) == 1:
        return ""
    short = {FULL: "full", SLIDING: "sliding", LINEAR: "linear"}
    groups = ", ".join(f"{number} {short[kind]}" for kind, number in plan.layout.num_groups.items())
    return f", for groups of layers: {groups}"


def _kv_heads(spec: ModelSpec) -> str:
    if spec.latent is not None:
        return f"one latent of {spec.latent.cached_per_token} elements"
    heads = f"{spec.num_kv_heads} KV heads of {spec.head_dim}"
    if spec.has_two_shapes:
        number, size = spec.heads_of(FULL)
        heads += f" ({number} of {size} where attention is full)"
    return heads


def run_drill(args: argparse.Namespace) -> int:
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


# --- roofline ------------------------------------------------------------------------------------------------------


def run_roofline(args: argparse.Namespace) -> int:
    """ValueError if something cannot be."""
    spec, device = as_served(_model(args)), find_device(args.gpu)
    if args.plot is not None and (os.path.isdir(args.plot) or not Path(args.plot).suffix):
        raise ValueError(f"the picture cannot be written to {args.plot!r}: give a file name, such as roofline.png")
    args.context = args.context or min(4096, spec.max_position_embeddings)
    check_context(spec, args.context)
    if max(args.batch) > 100_000:
        raise ValueError(f"--batch is {max(args.batch):,}, at most 100,000 requests")
    products = _compute_dtype(args, spec, device)
    flop_s = device.flop_s(products) * args.compute_efficiency
    bytes_s = device.bandwidth * args.memory_efficiency
    options = {"weight_dtype": args.weight_dtype, "kv_dtype": args.kv_dtype, "tp": args.tp}
    steps = [("prefill", 1, prefill_step(spec, args.context, **options))]
    steps += [("decode", batch, decode_step(spec, batch, args.context, **options)) for batch in args.batch]
    rows = [_roofline_row(args, device, products, *step) for step in steps]
    ridge = ridge_point(flop_s, bytes_s)
    one = decode_step(spec, 1, args.context, **options)
    per_token = one.parts["projections"].flops + one.parts["lm_head"].flops
    # At the ridge the batch is so large that all experts are read.
    whole = decode_step(spec, 4096, args.context, **options).parts
    weights = whole["projections"].bytes + whole["lm_head"].bytes
    alone = critical_batch(flop_s, bytes_s, 2 * weights / per_token)
    with_kv = critical_batch_with_kv(
        flop_s, bytes_s, weights, per_token + one.parts["attention"].flops, one.parts["attention"].bytes
    )
    if args.json:
        result = {
            "model": spec.name,
            "gpu": device.name,
            "tp": args.tp,
            "compute_dtype": products,
            "architecture_known": spec.is_known,
            "weights_fit": weight_bytes(spec, args.weight_dtype, args.tp) < device.memory_bytes,
            "context_tokens": args.context,
            "ridge_flop_per_byte": float(ridge),
            "critical_batch_weights_only": float(alone),
            "critical_batch_with_kv_reads": float(with_kv) if math.isfinite(with_kv) else None,
            "steps": rows,
        }
        print(json.dumps(result, indent=2))
    else:
        _print_roofline(spec, device, products, args, rows, ridge, alone, with_kv)
    if args.plot is not None:
        _plot(args.plot, spec, device, steps, flop_s, bytes_s)
    return 0


def _compute_dtype(args: argparse.Namespace, spec: ModelSpec, device: Device) -> str:
    """What the products run in: fp8 for weights in fp8 where the device has such a rate, as in vLLM, else the model's
    dtype. Other quantised weights are unpacked before the product."""
    if args.compute_dtype != "auto":
        return full_dtype(args.compute_dtype)
    is_fp8 = weight_format(spec, args.weight_dtype)[0] == "fp8"
    return "fp8" if is_fp8 and "fp8" in device.dense_tflop_s else spec.dtype


def _roofline_row(
    args: argparse.Namespace, device: Device, products: str, phase: str, batch: int, step: Step
) -> dict[str, Any]:
    link = None if device.interconnect_gb_s is None else device.interconnect_gb_s * 1e9
    time = step_time(
        step,
        device.flop_s(products),
        device.bandwidth,
        compute_efficiency=args.compute_efficiency,
        memory_efficiency=args.memory_efficiency,
        link_bytes_s=link,
        tp=args.tp,
    )
    tokens = step.num_tokens if phase == "prefill" else batch
    return {
        "phase": phase,
        "batch": batch,
        "flops": float(step.flops),
        "bytes": float(step.bytes),
        "intensity_flop_per_byte": float(step.intensity),
        "step_s": float(time.seconds),
        "all_reduce_s": time.all_reduce_s,
        "tokens_per_s": tokens / time.seconds,
        "bound": time.bound,
    }


def _print_roofline(
    spec: ModelSpec,
    device: Device,
    products: str,
    args: argparse.Namespace,
    rows: list[dict[str, Any]],
    ridge: Quantity,
    alone: Quantity,
    with_kv: Quantity,
) -> None:
    print(f"{spec.name} on {args.tp} x {device.title}, {args.context:,} tokens per request; at best:\n")
    header = ("", "batch", "FLOP/B", "ms", "tokens/s", "bound by")
    table = [header] + [
        (
            row["phase"],
            f"{row['batch']:,}",
            f"{row['intensity_flop_per_byte']:.1f}",
            f"{1e3 * row['step_s']:,.2f}",
            f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] >= 10 else f"{row['tokens_per_s']:.2g}",
            row["bound"],
        )
        for row in rows
    ]
    print(_columns(table))
    limit = f"{with_kv:,.0f}" if math.isfinite(with_kv) else "none: KV reads take longer than the computing they serve"
    print(
        f"\nridge point: {ridge:.0f} FLOP/B; critical batch: {alone:,.0f} by weights alone; with KV reads at this "
        f"context: {limit}"
    )
    print(
        f"products in {products}: {device.flop_s(products) / 1e12:,.0f} TFLOP/s dense; memory: "
        f"{device.bandwidth / 1e9:,.0f} GB/s"
    )
    weights = weight_bytes(spec, args.weight_dtype, args.tp)
    if weights >= device.memory_bytes:
        print(
            f"note: the weights, {format_bytes(weights)} per GPU, do not fit into its "
            f"{format_bytes(device.memory_bytes)}"
        )
    if not spec.is_known:
        print(f"note: {_not_known(spec)}")
    if args.explain:
        print(f"\n{ridge.explain()}\n\n{alone.explain(0)}\n\n{with_kv.explain(0)}")


def _plot(
    path: str, spec: ModelSpec, device: Device, steps: list[tuple[str, int, Step]], flop_s: float, bytes_s: float
) -> None:
    from minivllm.viz.roofline import roofline_figure

    points = {f"{phase} {batch}": step for phase, batch, step in steps}
    figure = roofline_figure(flop_s, bytes_s, points, title=f"{spec.name} on {device.title}")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"the picture cannot be written to {path}: {error}") from None


# --- The catalogue -------------------------------------------------------------------------------------------------


def run_catalog(args: argparse.Namespace) -> int:
    """ValueError if no name contains the text."""
    text = plain_name(args.text)
    models = [as_served(model) for model in list_models() if text in plain_name(model.name)]
    devices = [device for device in list_devices() if text in plain_name(device.name)]
    if not models and not devices:
        raise ValueError(f"no model or GPU has {args.text[:40]!r} in its name; without a word, all are listed")
    if models:
        print(f"{'model':20}{'parameters':>12}{'KV per token':>14}{'context':>10}")
    for model in models:
        billions, kib = model.parameters / 1e9, kv_bytes_per_token(model) / 1024
        print(f"{model.name:20}{billions:>10.2f} B{kib:>10.1f} KiB{model.max_position_embeddings:>10,}")
    if models and devices:
        print()
    if devices:
        print(f"{'device':20}{'memory':>12}{'bandwidth':>14}{'bfloat16':>16}")
    for device in devices:
        rate = f"{device.flop_s() / 1e12:,.0f} TFLOP/s" if device.dense_tflop_s else "not published"
        memory = f"{device.memory_bytes / GIB:,.1f} GiB"
        print(f"{device.name:20}{memory:>12}{device.memory_bandwidth_gb_s:>9,.0f} GB/s{rate:>16}")
    return 0


# --- Shared --------------------------------------------------------------------------------------------------------


def _add_model_and_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a name that `catalog` lists, or its hub id")
    parser.add_argument("--config", metavar="PATH", help="instead of --model: a config.json, or the folder it is in")
    parser.add_argument("--gpu", required=True, help="a name that `catalog` lists, such as h100-sxm")
    parser.add_argument("--tp", type=_count, default=1, help="GPUs that share every layer (default 1)")
    parser.add_argument(
        "--kv-dtype", default="auto", help="auto, fp8, int8, int4, q8_0 ..., with their scales (default: the model's)"
    )
    parser.add_argument("--weight-dtype", default="auto", help=f"auto, {', '.join(WEIGHT_BITS)}")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON, with units in the names")
    output.add_argument("--explain", action="store_true", help="also print the formulas with their terms filled in")


def _model(args: argparse.Namespace) -> ModelSpec:
    if (args.model is None) == (args.config is None):
        raise ValueError("give either --model NAME or --config PATH")
    return find_model(args.model) if args.config is None else ModelSpec.from_file(Path(args.config))


def _parser_of(kind: Callable[[str], Any], what: str, least: float = 1e-300) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text.replace("_", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what}") from None
        if not least <= value <= LARGEST:
            raise argparse.ArgumentTypeError(f"{text[:40]} is not {what}")
        return value

    return parse


_count = _parser_of(int, f"a whole number from 1 to {LARGEST:,}")
_number = _parser_of(float, f"a positive number of at most {LARGEST:,}")
_number_or_0 = _parser_of(float, f"a number from 0 to {LARGEST:,}", least=0)


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" if name else f"\n{text}:" for name, text in rows)


def _columns(rows: list[tuple[str, ...]]) -> str:
    """Numbers to the right; the first column and the last are words."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]))
    return "\n".join(lines)
