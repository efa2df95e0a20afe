"""What fits: budgets, blocks, requests, GPUs."""

from __future__ import annotations

import math
import random

from minivllm.drills.answers import Drill
from minivllm.drills.questions.models import GQA
from minivllm.drills.topics import drill
from minivllm.theory import sizing
from minivllm.theory.catalog import find_model
from minivllm.theory.quantity import Quantity
from minivllm.units import GB, GIB


@drill("capacity")
def budget(rng: random.Random) -> Drill:
    spec, share = find_model(rng.choice(("qwen2.5-7b", "llama-3.1-8b", "qwen2.5-14b"))), rng.choice((0.85, 0.9, 0.92))
    memory, peak = 79.2 * GIB, rng.choice((2, 3, 4)) * GIB
    held = round(sizing.weight_bytes(spec) / GIB, 1) * GIB
    right = sizing.kv_budget(memory, share, held, peak)
    return Drill(
        "KV budget",
        f"A GPU reports 79.2 GiB, gpu_memory_utilization is {share:g}, {spec.name} takes {held / GIB:.1f} GiB, the "
        f"activation peak is {peak / GIB:.0f} GiB. How much is left for the KV cache?",
        right,
        "GiB",
        {
            "without the weights: they come off first": memory * share - peak,
            "without the activation peak: it comes off too": memory * share - held,
            "by applying the utilisation to what is left after the weights": (memory - held - peak) * share,
            "without the utilisation": memory - held - peak,
        },
        0.01,
    )


@drill("capacity")
def blocks(rng: random.Random) -> Drill:
    spec, gib = find_model(rng.choice(GQA)), rng.choice((2.5, 7.3, 11.7, 19.4, 40.6))
    per_token = sizing.kv_bytes_per_token(spec, "bfloat16")
    right = sizing.num_kv_blocks(gib * GIB, per_token)
    return Drill(
        "blocks",
        f"{gib} GiB are left for the KV cache of {spec.name}, which takes {per_token:,.0f} bytes per token. How many "
        "blocks of 16 tokens is that?",
        right,
        "blocks",
        {
            "by rounding up: a block that does not fit whole is none": right + 1,
            "for tokens: a block holds 16 of them": math.floor(gib * GIB / per_token),
            "by reading GiB as GB": math.floor(gib * GB / per_token / 16),
        },
        0,
    )


@drill("capacity")
def concurrency(rng: random.Random) -> Drill:
    length = rng.choice((4096, 8192, 16384))
    tokens = 16 * rng.randrange(2000, 30000)
    right = sizing.max_concurrency(tokens, length)
    return Drill(
        "maximum concurrency",
        f'vLLM logs "GPU KV cache size: {tokens:,} tokens" with max_model_len {length:,}. Which maximum '
        "concurrency does it print?",
        right,
        "requests",
        {
            "in blocks: divide tokens by tokens": right / 16,
            "upside down": 1 / right,
        },
        0.01,
    )


@drill("capacity")
def whole_requests(rng: random.Random) -> Drill:
    spec, context, gb = find_model(rng.choice(GQA)), rng.choice((4096, 8192)), rng.choice((21.3, 40.8, 53.6))
    need = sizing.kv_bytes_per_request(spec, context, "bfloat16")
    right = sizing.requests_that_fit(gb * GB, need)
    return Drill(
        "requests that fit",
        f"{gb} GB (not GiB) are left for the KV cache of {spec.name}, {sizing.kv_bytes_per_token(spec):,.0f} bytes per "
        f"token. How many requests of {context:,} tokens fit at the same time?",
        right,
        "requests",
        {
            "by reading GB as GiB": math.floor(gb * GIB / need),
            "by rounding up: a request that half fits does not run": right + 1,
        },
        0,
    )


@drill("capacity")
def utilisation(rng: random.Random) -> Drill:
    memory, held = rng.choice(((40, 26), (24, 15), (80, 70)))
    before, after = 0.9, 0.95
    left = memory * before - held, memory * after - held
    right = Quantity(
        100 * (left[1] / left[0] - 1), "%", "gain",
        "100 * ((memory * after - weights) / (memory * before - weights) - 1)",
        {"memory": memory, "weights": held, "before": before, "after": after},
    )  # fmt: skip
    return Drill(
        "five points of utilisation",
        f"A GPU of {memory} GB holds {held} GB of weights. By how many percent does the KV cache grow if "
        "gpu_memory_utilization goes from 0.90 to 0.95? (Nothing else takes memory.)",
        right,
        "%",
        {
            "by comparing the shares: weights do not grow with them": 100 * (after / before - 1),
            "in percent of the GPU": 100 * (after - before),
        },
    )


@drill("capacity")
def gpus_for_weights(rng: random.Random) -> Drill:
    spec = find_model(rng.choice(("llama-3.1-70b", "qwen2.5-72b", "llama-3.1-405b")))
    assert spec.published_parameters is not None  # the catalogue has it for each of them
    held = sizing.weight_bytes(spec, "bfloat16")
    usable = 0.9 * 80 * GB
    right = Quantity(
        2 ** math.ceil(math.log2(held / usable)), "GPUs", "GPUs", "2 ** ceil(doublings)",
        {"doublings": Quantity(math.log2(held / usable), "", "doublings")},
    )  # fmt: skip
    return Drill(
        "GPUs for the weights",
        f"{spec.name} in bfloat16, {spec.published_parameters / 1e9:.1f} billion parameters; GPUs of 80 GB, of "
        "which 90 % may be used. What is the smallest power of two of GPUs that holds the weights alone?",
        right,
        "GPUs",
        {
            "with 1 byte per parameter": 2 ** math.ceil(math.log2(held / 2 / usable)),
            "by dividing and rounding up: servers and heads come in powers of two": math.ceil(held / usable),
        },
        0,
    )
