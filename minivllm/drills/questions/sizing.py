"""Bytes: of a token's cache, of a request's, of the weights."""

from __future__ import annotations

import random

from minivllm.drills.answers import Drill
from minivllm.drills.questions.models import GQA, MHA, as_if_mha, shape
from minivllm.drills.topics import drill
from minivllm.theory import sizing
from minivllm.theory.catalog import find_model
from minivllm.theory.quantity import Quantity
from minivllm.units import GB, GIB


@drill("sizing")
def kv_per_token(rng: random.Random) -> Drill:
    spec = find_model(rng.choice(GQA))
    right = sizing.kv_bytes_per_token(spec, "bfloat16")
    return Drill(
        "KV cache per token",
        f"{shape(spec)}. How much KV cache does one token take in bfloat16?",
        right,
        "KiB",
        {
            "by counting query heads: only KV heads are cached": as_if_mha(spec, right),
            "without the factor 2 (keys and values), or without the 2 bytes per number": right / 2,
            "for one layer: every layer has a cache of its own": right / spec.num_layers,
            "by taking bits for bytes: bfloat16 has 2 bytes": right * 8,
        },
    )


@drill("sizing")
def kv_per_request(rng: random.Random) -> Drill:
    spec, context = find_model(rng.choice(GQA)), rng.choice((2048, 4096, 8192, 16384, 32768))
    right = sizing.kv_bytes_per_request(spec, context, "bfloat16")
    return Drill(
        "KV cache of a request",
        f"{shape(spec)}. How much KV cache does a request of {context:,} tokens take in bfloat16?",
        right,
        "GiB",
        {
            "by counting query heads: only KV heads are cached": as_if_mha(spec, right),
            "without the factor 2 (keys and values), or without the 2 bytes per number": right / 2,
            "in GB where GiB was asked": right / GB * GIB,
        },
        0.015,
    )


@drill("sizing")
def kv_dtype(rng: random.Random) -> Drill:
    spec, context = find_model(rng.choice(GQA)), rng.choice((8192, 16384, 32768))
    right = sizing.kv_bytes_per_request(spec, context, "fp8")
    return Drill(
        "KV cache in fp8",
        f"{shape(spec)}. Weights are bfloat16, the KV cache is fp8 with one scale per tensor. How much does a request "
        f"of {context:,} tokens take?",
        right,
        "GiB",
        {
            "with the weights' 2 bytes: the cache has a dtype of its own": 2 * right,
            "with half a byte: fp8 is 8 bits": right / 2,
            "by counting query heads: only KV heads are cached": as_if_mha(spec, right),
        },
    )


@drill("sizing")
def kv_of_a_batch(rng: random.Random) -> Drill:
    spec, batch, context = find_model(rng.choice(MHA)), rng.choice((100, 500, 1000)), rng.choice((512, 1024, 2048))
    one = sizing.kv_bytes_per_request(spec, context, "float16")
    right = Quantity(batch * one, "B", "KV cache of all", "requests * one", {"requests": batch, "one": one})
    return Drill(
        "KV cache of many requests",
        f"{shape(spec)}. {batch:,} requests of {context:,} tokens at the same time, float16: how much KV cache?",
        right,
        "GB",
        {
            "in GiB where GB was asked": right * GB / GIB,
            "without the factor 2 (keys and values), or without the 2 bytes per number": right / 2,
            "for one request": one,
        },
        0.015,
    )


@drill("sizing")
def kv_on_two_gpus(rng: random.Random) -> Drill:
    spec = find_model(rng.choice(("llama-3.1-8b", "llama-3.1-70b", "qwen2.5-72b")))
    tp = rng.choice((2, 4, 8, 16))
    right = sizing.kv_bytes_per_token(spec, "bfloat16", tp)
    alone = sizing.kv_bytes_per_token(spec, "bfloat16")
    return Drill(
        "KV cache under tensor parallelism",
        f"{shape(spec)}. Tensor parallelism over {tp} GPUs: how much KV cache does a token take on each of them, in "
        "bfloat16?",
        right,
        "KiB",
        {
            "by dividing on: with more GPUs than KV heads, heads are replicated": alone / tp,
            "without sharing: each GPU caches its own KV heads only": alone,
            "without the factor 2 (keys and values), or without the 2 bytes per number": right / 2,
            "by dividing the query heads' cache": as_if_mha(spec, alone) / tp,
        },
    )


@drill("sizing")
def latent(rng: random.Random) -> Drill:
    spec = find_model(rng.choice(("deepseek-v2", "deepseek-v2-lite", "deepseek-v3")))
    right = sizing.kv_bytes_per_token(spec, "bfloat16")
    found = spec.latent
    assert found is not None  # all three have it
    without_rope = right * found.kv_lora_rank / found.cached_per_token
    return Drill(
        "KV cache of latent attention",
        f"{spec.name} has {spec.num_layers} layers with latent attention (MLA): kv_lora_rank "
        f"{found.kv_lora_rank}, qk_rope_head_dim {found.qk_rope_head_dim}, {spec.num_heads} heads. KV cache per "
        "token in bfloat16?",
        right,
        "KiB",
        {
            "with a factor 2: the latent stands for keys and values": 2 * right,
            "by doubling the latent and leaving out the rotary key": 2 * without_rope,
            "without the rotary key: it is cached beside the latent": right
            * found.kv_lora_rank
            / found.cached_per_token,
            "once per head: all heads share the latent": right * spec.num_heads,
        },
        0.01,
    )


@drill("sizing")
def windowed(rng: random.Random) -> Drill:
    spec, context = find_model("gemma-3-27b"), rng.choice((16384, 32768, 65536))
    full, sliding = spec.layer_types.count("full_attention"), spec.layer_types.count("sliding_attention")
    right = sizing.kv_bytes_per_request(spec, context, "bfloat16")
    one = sizing.kv_bytes_per_token_and_layer(spec, "bfloat16")
    assert spec.sliding_window is not None
    return Drill(
        "KV cache with sliding windows",
        f"{spec.name}: {full} layers with full attention, {sliding} with a window of {spec.sliding_window:,} tokens, "
        f"{spec.num_kv_heads} KV heads of dimension {spec.head_dim}. KV cache of a request of {context:,} tokens in "
        "bfloat16?",
        right,
        "GiB",
        {
            "with all tokens in all layers: a windowed layer keeps its window": (full + sliding) * context * one,
            "by leaving the windowed layers out": full * context * one,
            "by leaving the full layers out": sliding * spec.sliding_window * one,
        },
    )


@drill("sizing")
def hybrid(rng: random.Random) -> Drill:
    spec = find_model(rng.choice(("qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3-coder-next")))
    context = rng.choice((1024, 4096, 16384, 65536))
    full, linear = spec.layer_types.count("full_attention"), spec.layer_types.count("linear_attention")
    right = sizing.kv_bytes_per_request(spec, context, "bfloat16")
    one, state = sizing.kv_bytes_per_token_and_layer(spec, "bfloat16"), sizing.state_bytes_per_layer(spec)
    return Drill(
        "KV cache with linear attention",
        f"{spec.name}: {full} layers with full attention, {spec.num_kv_heads} KV heads of dimension {spec.head_dim}; "
        f"{linear} layers with linear attention, each with one state of {state / 2**20:.2f} MiB per request. What do "
        f"keys, values and states of a request of {context:,} tokens take in bfloat16 (contents, not whole blocks)?",
        right,
        "MiB",
        {
            "with keys and values in all layers: linear attention keeps a state instead": (full + linear)
            * context
            * one,
            "without the states": full * context * one,
            "with one state for all layers: each keeps its own": full * context * one + state,
            "without the factor 2 (keys and values), or without the 2 bytes per number": full * context * one / 2
            + linear * state,
        },
    )


@drill("sizing")
def weights(rng: random.Random) -> Drill:
    spec = find_model(rng.choice(("qwen2.5-7b", "llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b")))
    right = sizing.weight_bytes(spec, "bfloat16")
    active = spec.active_parameters / spec.parameters
    assert spec.published_parameters is not None  # the catalogue has it for each of them
    return Drill(
        "weights",
        f"{spec.name} has {spec.published_parameters / 1e9:.2f} billion parameters. How much memory do its bfloat16 "
        "weights take?",
        right,
        "GB",
        {
            "with 1 byte each: bfloat16 has 2": right / 2,
            "with 4 bytes each: that is float32": right * 2,
            "with the active parameters only: all experts must be in memory": right * active,
            "in GiB where GB was asked": right * GB / GIB,
        },
        0.01,
    )
