"""`minivllm size`: how many requests of a model fit on a GPU, and what limits them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from minivllm.cli.arguments import add_model_and_gpu, chosen_model, count, number, number_or_0
from minivllm.cli.text import not_known, show, table
from minivllm.theory.catalog import find_device
from minivllm.theory.model_spec import FULL, LINEAR, SLIDING, ModelSpec
from minivllm.theory.plan import Plan, Settings, make_plan
from minivllm.theory.quantity import format_bytes
from minivllm.theory.sizing import (
    KV_DTYPES,
    checkpoint_bytes,
    kv_bytes_per_request,
    kv_bytes_per_token,
    kv_dtype_name,
    pipeline_stages,
    state_bytes_per_layer,
)
from minivllm.theory.ways_out import ways_out
from minivllm.units import GIB


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Weights, KV cache per token, blocks, and the requests that fit. Weights come from the parameter count, "
        "activations are estimated, the rest is assumed: give --weights-gib and --activation-gib where a log shows "
        "them."
    )
    add_model_and_gpu(parser)
    parser.add_argument(
        "--context", type=count, help="tokens of a request, prompt and output (default: the model's most)"
    )
    parser.add_argument("--concurrency", type=count, help="requests wanted at the same time")
    parser.add_argument("--pp", type=count, default=1, help="pipeline stages (default 1)")
    parser.add_argument(
        "--gpu-memory-utilization", type=number, default=0.92, help="share of the memory (default 0.92)"
    )
    parser.add_argument("--block-size", type=count, default=16, help="tokens of a KV block (default 16)")
    parser.add_argument("--max-num-seqs", type=count, help="default: vllm serve's, 256 or 1,024 by GPU")
    parser.add_argument("--max-num-batched-tokens", type=count, help="default: vllm serve's, 2,048 to 16,384 by GPU")
    parser.add_argument("--weights-gib", type=number, help="size of the checkpoint, where it is known")
    parser.add_argument("--activation-gib", type=number, help="activation peak, where vLLM's log shows it")
    parser.add_argument("--other-gib", type=number_or_0, default=0.5, help="CUDA context, NCCL, graphs (assumed: 0.5)")


def run(args: argparse.Namespace) -> int:
    """ValueError if something cannot be or does not fit."""
    spec, device = chosen_model(args), find_device(args.gpu)
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
    show(table(rows))
    if args.explain:
        for quantity in (plan.per_token, plan.budget, plan.per_request, plan.requests_in_memory):
            show(f"\n{quantity.explain(depth=0)}")
    show(f"\nLimit: {plan.limit}.")
    if not plan.fits:
        ways = [_as_options(change) for change in ways_out(plan)] or ["a larger GPU, or a smaller model"]
        show(f"{'Any of these' if len(ways) > 1 else 'This'} would do: {'; or '.join(ways)}.")
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
        rows.append(("note", not_known(spec.model_type)))
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
