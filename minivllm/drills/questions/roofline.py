"""How fast at best: ridge points, steps, what they read."""

from __future__ import annotations

import random

from minivllm.drills.answers import Drill
from minivllm.drills.questions.models import GQA, shape
from minivllm.drills.topics import drill
from minivllm.theory import roofline
from minivllm.theory.catalog import find_device, find_model
from minivllm.theory.quantity import Quantity
from minivllm.units import GB, GIB


@drill("roofline")
def ridge(rng: random.Random) -> Drill:
    device = find_device(rng.choice(("h100-sxm", "h200", "a100-80gb-sxm", "l4", "b200", "mi300x")))
    right = roofline.ridge_point(device.flop_s(), device.bandwidth)
    return Drill(
        "ridge point",
        f"{device.title}: {device.flop_s() / 1e12:,.0f} TFLOP/s dense in bfloat16, {device.memory_bandwidth_gb_s:,.0f} "
        "GB/s. Where is its ridge point?",
        right,
        "FLOP/B",
        {
            "with the sparse rate, or the FP8 rate: dense products in bfloat16 are asked for": 2 * right,
            "upside down": 1 / right,
            "by a factor of 1,000: TFLOP/s over GB/s": right / 1000,
        },
    )


@drill("roofline")
def batch_at_ridge(rng: random.Random) -> Drill:
    device = find_device(rng.choice(("h100-sxm", "a100-80gb-sxm", "h200")))
    right = roofline.critical_batch(device.flop_s(), device.bandwidth, bytes_per_weight=1)
    return Drill(
        "critical batch with 8-bit weights",
        f"{device.title} ({device.flop_s() / 1e12:,.0f} TFLOP/s dense, {device.memory_bandwidth_gb_s:,.0f} GB/s). "
        "Weights are stored in 8 bits and multiplied in bfloat16. From which decode batch on are the linear layers "
        "compute-bound?",
        right,
        "tokens",
        {
            "for 16-bit weights (half the bytes, half the batch), or with the rate of 8-bit products": 2 * right,
            "for 4-bit weights": right / 2,
        },
        0.03,
    )


@drill("roofline")
def one_token(rng: random.Random) -> Drill:
    device = find_device(rng.choice(("h100-sxm", "a100-80gb-sxm", "l4", "rtx-4090")))
    gb = rng.choice((8.0, 15.2, 16.1))
    right = Quantity(
        device.bandwidth / (gb * GB), "tokens/s", "tokens per second", "bytes_s / weights",
        {"bytes_s": device.bandwidth, "weights": gb * GB},
    )  # fmt: skip
    return Drill(
        "decode at batch 1",
        f"A model of {gb:g} GB on {device.title} ({device.memory_bandwidth_gb_s:,.0f} GB/s). At most how many tokens "
        "per second can one request decode? (Short context.)",
        right,
        "tokens/s",
        {
            "from the FLOPs: at batch 1 reading the weights is what takes long": device.flop_s() / (gb * GB),
            "upside down: that is seconds per token": 1 / right,
        },
    )


@drill("roofline")
def decode_with_kv(rng: random.Random) -> Drill:
    batch, context = rng.choice(((32, 2048), (64, 2048), (32, 8192), (64, 4096), (108, 4096)))  # fit in 80 GB
    held, per_token, bytes_s = 16e9, 131072, 3.35e12
    right = roofline.decode_step_seconds(batch, held, context * per_token, bytes_s)
    return Drill(
        "decode step with KV reads",
        f"16 GB of weights, 131,072 bytes of KV cache per token, 3.35 TB/s. {batch} requests with {context:,} tokens "
        "of context each: how long does a decode step take at least? (Compute is not the limit.)",
        right,
        "ms",
        {
            "by forgetting the KV reads: every request's cache is read in every step": held / bytes_s,
            "by reading one request's cache: they share weights, not caches": (held + context * per_token) / bytes_s,
            "by forgetting the weights": batch * context * per_token / bytes_s,
            "by reading the weights once for each request: the batch shares them": batch
            * (held + context * per_token)
            / bytes_s,
        },
    )


@drill("roofline")
def throughput_with_kv(rng: random.Random) -> Drill:
    batch, context = rng.choice(((32, 4096), (32, 8192), (64, 4096), (108, 4096)))
    held, per_token, bytes_s = 16e9, 131072, 3.35e12
    step = roofline.decode_step_seconds(batch, held, context * per_token, bytes_s)
    right = Quantity(batch / step, "tokens/s", "tokens per second", "batch / step", {"batch": batch, "step": step})
    return Drill(
        "throughput with KV reads",
        f"16 GB of weights, 131,072 bytes of KV cache per token, 3.35 TB/s. {batch} requests of {context:,} tokens: at "
        "most how many tokens per second do they decode together?",
        right,
        "tokens/s",
        {
            "by forgetting the KV reads": batch / (held / bytes_s),
            "for one request of the batch": 1 / step,
        },
    )


@drill("roofline")
def prefill(rng: random.Random) -> Drill:
    billions, prompt, share = rng.choice((7.6, 14.8, 70.6)), rng.choice((2048, 8192)), rng.choice((0.4, 0.5, 0.6))
    device = find_device("h100-sxm")
    right = roofline.prefill_seconds(billions * 1e9, prompt, device.flop_s(), share)
    return Drill(
        "prefill",
        f"A model of {billions:g} billion parameters prefills {prompt:,} tokens on a GPU with "
        f"{device.flop_s() / 1e12:,.0f} TFLOP/s, of which it reaches {share:.0%}. How long does that take, "
        "attention not counted?",
        right,
        "ms",
        {
            "with one operation per weight: multiply and add are two": right / 2,
            "at the peak: the reached share is smaller": right * share,
            "with the training's 6 operations per weight": right * 3,
        },
    )


@drill("roofline")
def prefill_hit(rng: random.Random) -> Drill:
    prompt, cached = rng.choice((4096, 8192)), rng.choice((0.5, 0.75))
    whole = rng.choice((200, 400)) * 1e-3
    right = Quantity(
        whole * (1 - cached), "s", "prefill of the rest", "whole * (1 - cached)", {"whole": whole, "cached": cached}
    )
    return Drill(
        "prefill after a prefix hit",
        f"Prefilling {prompt:,} tokens takes {whole * 1e3:.0f} ms, spent in the linear layers. {cached:.0%} of the "
        "prompt is in the prefix cache. How long does the prefill take now?",
        right,
        "ms",
        {
            "as if a hit were free of everything": 0.0,
            "for the part that hits": whole * cached,
            "without the hit: cached tokens are not computed again": whole,
        },
    )


@drill("roofline")
def bandwidth(rng: random.Random) -> Drill:
    speed, gb, peak = rng.choice(((39, 16.2, 896), (95, 8.1, 1008), (140, 15.2, 3350)))
    used = roofline.bandwidth_used(speed, gb * GB)
    right = Quantity(
        100 * used / (peak * GB), "%", "share of the bandwidth", "100 * used / peak", {"used": used, "peak": peak * GB}
    )
    return Drill(
        "share of the bandwidth",
        f"One request decodes {speed} tokens/s with a model of {gb:g} GB on a GPU of {peak:,} GB/s. What percentage of "
        "the bandwidth is that?",
        right,
        "%",
        {"with the bytes of a GiB": right * GIB / GB, "as a fraction: percent were asked": right / 100},
    )


@drill("roofline")
def attention_intensity(rng: random.Random) -> Drill:
    spec, batch = find_model(rng.choice(GQA)), rng.choice((8, 64, 256))
    right = roofline.decode_attention_intensity(spec.num_heads, spec.num_kv_heads)
    return Drill(
        "intensity of decode attention",
        f"{shape(spec)}, bfloat16 cache, {batch} requests at once. How many operations per byte does decode attention "
        "do? (Count keys and values, two operations per multiply-add.)",
        right,
        "FLOP/B",
        {
            "with the batch: each request reads a cache of its own": right * batch,
            "as if every head had its own cache": 1.0,
        },
    )


@drill("roofline")
def experts(rng: random.Random) -> Drill:
    spec = find_model("mixtral-8x7b")
    batch = rng.choice((1, 2, 4))
    right = Quantity(
        roofline.experts_touched(spec, batch), "", "experts read per layer",
        "experts * (1 - (1 - per_token / experts) ** batch)",
        {"experts": 8, "per_token": 2, "batch": batch},
    )  # fmt: skip
    return Drill(
        "experts that a step reads",
        f"A mixture of 8 experts sends each token to 2 of them, evenly. How many experts of a layer does a decode step "
        f"with {batch} request{'s' if batch > 1 else ''} read on average?",
        right,
        "",
        {
            "by adding them up: tokens meet at the same experts": 2.0 * batch,
            "by reading all of them": 8.0,
            "for one token": 2.0,
        },
        0.01,
    )
