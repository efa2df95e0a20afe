"""Napkin drills: interview questions with a number for an answer, drawn anew from a seed.

A drill knows the right value with its explanation, and the values that well-known mistakes lead to: a wrong answer that
is one of them is told which. To add one, write a function that takes a random generator and returns a `Drill`, and
decorate it with its topic.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from minivllm.theory import roofline, sizing
from minivllm.theory.catalog import find_device, find_model
from minivllm.theory.model_spec import ModelSpec
from minivllm.theory.quantity import Quantity, format_number
from minivllm.units import GB, GIB

# What may be typed after a number, and how much of the base unit it is.
UNITS: dict[str, dict[str, float]] = {
    "B": {
        "b": 1, "bytes": 1, "byte": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
        "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    },
    "s": {"s": 1, "sec": 1, "seconds": 1, "ms": 1e-3, "milliseconds": 1e-3, "us": 1e-6, "µs": 1e-6, "\u03bcs": 1e-6},
    "FLOP/B": {"flop/b": 1, "flop/byte": 1, "flops/b": 1, "flops/byte": 1, "ops/byte": 1},
    "tokens": {"tokens": 1, "token": 1, "requests": 1},
    "requests": {"requests": 1, "request": 1, "x": 1},
    "blocks": {"blocks": 1, "block": 1},
    "tokens/s": {"tokens/s": 1, "tok/s": 1, "t/s": 1, "tokens/sec": 1},
    "GPUs": {"gpus": 1, "gpu": 1},
    "%": {"%": 1, "percent": 1},
    "": {"": 1, "x": 1, "times": 1, "experts": 1},
}  # fmt: skip


def _named_units(unit: str) -> list[tuple[str, float]]:
    """The units of that kind as they are written, and their size."""
    names = ("B", "KiB", "MiB", "GiB", "TiB", "kB", "MB", "GB", "TB", "s", "ms", "µs")
    return [(name, UNITS[unit][name.lower()]) for name in names if name.lower() in UNITS[unit]]


@dataclass(frozen=True)
class Verdict:
    is_right: bool
    message: str


@dataclass(frozen=True)
class Drill:
    """One question with its parameters filled in.

    `ask_in` is the unit of a plain number, such as "KiB". `tolerance` is relative, 0 for counts. `traps` maps what a
    mistake is called to the value that it gives, in the unit of `answer`.
    """

    name: str
    question: str
    answer: Quantity
    ask_in: str
    traps: Mapping[str, float] = field(default_factory=dict)
    tolerance: float = 0.02
    is_conversion: bool = False  # then an answer in another unit would only repeat the question

    def parse(self, text: str) -> float:
        """The value that somebody typed, in the unit of `answer`. ValueError says what it could not read."""
        number, unit = self._read(text)
        return number * UNITS[self.answer.unit][unit.lower()]

    def _read(self, text: str) -> tuple[float, str]:
        """Number and unit, which is `ask_in` if none was typed."""
        match = re.fullmatch(r"\s*([-+]?[\d.,_]*\d[\d.,_]*(?:e[-+]?\d+)?)\s*(\S*)\s*", text, re.IGNORECASE)
        if match is None:
            raise ValueError(f"{text.strip()!r} is not a number; write one, with or without a unit ({self.ask_in})")
        number, unit = match.group(1), match.group(2) or self.ask_in
        if "," in number and not re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", number):
            raise ValueError(f"{number!r} can be read in two ways; write a decimal point, and commas only at thousands")
        if unit.lower() not in UNITS[self.answer.unit]:
            raise ValueError(f"the unit {unit!r} does not fit; a plain number counts as {self.ask_in or 'a ratio'}")
        if self.is_conversion and unit.lower() != self.ask_in.lower():
            raise ValueError(f"the question is how many {self.ask_in} it is; you gave {unit}")
        try:
            return float(re.sub(r"[,_]", "", number)), unit
        except ValueError:
            raise ValueError(f"{number!r} is not a number") from None

    def check(self, value: float | str) -> Verdict:
        """Whether it is right; if not, which mistake it looks like. A plain number is in `ask_in`."""
        number, unit = self._read(value) if isinstance(value, str) else (float(value), self.ask_in)
        found = number * UNITS[self.answer.unit].get(unit.lower(), 1)
        if self._is(found, self.answer):
            return Verdict(True, self.answer_text)
        near = {
            f"that is what one gets {mistake}": abs(found - wrong) / abs(wrong or 1)
            for mistake, wrong in self.traps.items()
            if self._is(found, wrong)
        }
        if unit.lower() == self.ask_in.lower():
            for name, size in _named_units(self.answer.unit):
                off = abs(number * size / self.answer - 1) if self.answer else 1
                if off < 0.005:
                    near[f"that would be right in {name}; {self.ask_in} is asked for"] = off
        if self.ask_in == "%" and self.answer and abs(100 * number / self.answer - 1) < 0.005:
            near["that is a fraction; percent is asked for"] = 0.0
        if near:
            return Verdict(False, min(near, key=near.get))
        if self.answer and found / self.answer > 0:
            ratio = max(found / self.answer, self.answer / found)
            side = "large" if found > self.answer else "small"
            how = f"{100 * (ratio - 1):.2g} %" if ratio < 1.1 else f"a factor of {format_number(float(f'{ratio:.3g}'))}"
            return Verdict(False, f"too {side}, by {how}")
        return Verdict(False, "no")

    @property
    def asked(self) -> str:
        """The unit of a plain number, and how exact it must be."""
        exact = "exactly" if self.tolerance == 0 else f"within {100 * self.tolerance:g} %"
        return f"{self.ask_in}, {exact}" if self.ask_in else exact

    @property
    def answer_text(self) -> str:
        """The answer in the unit that was asked for."""
        return f"{format_number(self.answer / self._one)} {self.ask_in}".rstrip()

    def explain(self) -> str:
        """The formula with the numbers of the question, down to the answer in the unit that was asked for."""
        lines = self.answer.explain(depth=0).splitlines()
        if not lines[-1].endswith(f"= {self.answer_text}"):
            lines.append(f"{' ' * len(self.answer.name)} = {self.answer_text}")
        for term in self.answer.terms.values():
            if isinstance(term, Quantity) and term.formula:
                lines += ["  " + line for line in term.explain(depth=0, width=76).splitlines()]
        return "\n".join(lines)

    @property
    def _one(self) -> float:
        """One of the asked unit, in the unit of `answer`."""
        return UNITS[self.answer.unit].get(self.ask_in.lower(), 1)

    def _is(self, found: float, wanted: float) -> bool:
        return math.isclose(found, wanted, rel_tol=max(self.tolerance, 1e-9), abs_tol=1e-12)


Maker = Callable[[random.Random], Drill]
TOPICS: dict[str, list[Maker]] = {}


def drill(topic: str) -> Callable[[Maker], Maker]:
    """Register a maker under its topic."""

    def register(maker: Maker) -> Maker:
        TOPICS.setdefault(topic, []).append(maker)
        return maker

    return register


def draw(count: int, seed: int, topic: str | None = None) -> list[Drill]:
    """`count` drills in an order that the seed decides; every maker of the topic comes before one comes again."""
    if topic is not None and topic not in TOPICS:
        raise ValueError(f"unknown topic {topic!r}; topics: {', '.join(TOPICS)}")
    rng = random.Random(seed)
    makers = [maker for name, some in TOPICS.items() if topic in (None, name) for maker in some]
    order: list[Maker] = []
    while len(order) < count:
        order += rng.sample(makers, len(makers))
    return [make(maker, rng.randrange(2**32)) for maker in order[:count]]


def make(maker: Maker, seed: int) -> Drill:
    """One drill, with traps that are (nearly) right left out: with these numbers the mistake does not show."""
    made = maker(random.Random(seed))
    by_value: dict[float, list[str]] = {}  # two mistakes may give one value, and are then named together
    for mistake, value in made.traps.items():
        if math.isfinite(value) and not made._is(value, made.answer):
            same = next((known for known in by_value if math.isclose(known, value, rel_tol=1e-6)), value)
            by_value.setdefault(same, []).append(mistake)
    traps = {"; or ".join(mistakes): value for value, mistakes in by_value.items()}
    return replace(made, traps=traps)


# --- Sizing --------------------------------------------------------------------------------------------------------

_GQA = ("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-72b", "llama-3.1-8b", "llama-3.1-70b", "mistral-7b-v0.3", "qwen3-8b")
_MHA = ("llama-2-7b", "llama-2-13b", "opt-13b")


def _shape(spec: ModelSpec) -> str:
    heads = f"{spec.num_heads} query heads, {spec.num_kv_heads} KV heads of dimension {spec.head_dim}"
    return f"{spec.name}: {spec.num_layers} layers, {heads}, hidden size {spec.hidden_size:,}"


def _as_if_mha(spec: ModelSpec, value: float) -> float:
    return value * spec.num_heads / spec.num_kv_heads


@drill("sizing")
def kv_per_token(rng: random.Random) -> Drill:
    spec = find_model(rng.choice(_GQA))
    right = sizing.kv_bytes_per_token(spec, "bfloat16")
    return Drill(
        "KV cache per token",
        f"{_shape(spec)}. How much KV cache does one token take in bfloat16?",
        right,
        "KiB",
        {
            "by counting query heads: only KV heads are cached": _as_if_mha(spec, right),
            "without the factor 2 (keys and values), or without the 2 bytes per number": right / 2,
            "for one layer: every layer has a cache of its own": right / spec.num_layers,
            "by taking bits for bytes: bfloat16 has 2 bytes": right * 8,
        },
    )


@drill("sizing")
def kv_per_request(rng: random.Random) -> Drill:
    spec, context = find_model(rng.choice(_GQA)), rng.choice((2048, 4096, 8192, 16384, 32768))
    right = sizing.kv_bytes_per_request(spec, context, "bfloat16")
    return Drill(
        "KV cache of a request",
        f"{_shape(spec)}. How much KV cache does a request of {context:,} tokens take in bfloat16?",
        right,
        "GiB",
        {
            "by counting query heads: only KV heads are cached": _as_if_mha(spec, right),
            "without the factor 2 (keys and values), or without the 2 bytes per number": right / 2,
            "in GB where GiB was asked": right / GB * GIB,
        },
        0.015,
    )


@drill("sizing")
def kv_dtype(rng: random.Random) -> Drill:
    spec, context = find_model(rng.choice(_GQA)), rng.choice((8192, 16384, 32768))
    right = sizing.kv_bytes_per_request(spec, context, "fp8")
    return Drill(
        "KV cache in fp8",
        f"{_shape(spec)}. Weights are bfloat16, the KV cache is fp8 with one scale per tensor. How much does a request "
        f"of {context:,} tokens take?",
        right,
        "GiB",
        {
            "with the weights' 2 bytes: the cache has a dtype of its own": 2 * right,
            "with half a byte: fp8 is 8 bits": right / 2,
            "by counting query heads: only KV heads are cached": _as_if_mha(spec, right),
        },
    )


@drill("sizing")
def kv_of_a_batch(rng: random.Random) -> Drill:
    spec, batch, context = find_model(rng.choice(_MHA)), rng.choice((100, 500, 1000)), rng.choice((512, 1024, 2048))
    one = sizing.kv_bytes_per_request(spec, context, "float16")
    right = Quantity(batch * one, "B", "KV cache of all", "requests * one", {"requests": batch, "one": one})
    return Drill(
        "KV cache of many requests",
        f"{_shape(spec)}. {batch:,} requests of {context:,} tokens at the same time, float16: how much KV cache?",
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
        f"{_shape(spec)}. Tensor parallelism over {tp} GPUs: how much KV cache does a token take on each of them, in "
        "bfloat16?",
        right,
        "KiB",
        {
            "by dividing on: with more GPUs than KV heads, heads are replicated": alone / tp,
            "without sharing: each GPU caches its own KV heads only": alone,
            "without the factor 2 (keys and values), or without the 2 bytes per number": right / 2,
            "by dividing the query heads' cache": _as_if_mha(spec, alone) / tp,
        },
    )


@drill("sizing")
def latent(rng: random.Random) -> Drill:
    spec = find_model(rng.choice(("deepseek-v2", "deepseek-v2-lite", "deepseek-v3")))
    right = sizing.kv_bytes_per_token(spec, "bfloat16")
    found = spec.latent
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


# --- Capacity ------------------------------------------------------------------------------------------------------


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
    spec, gib = find_model(rng.choice(_GQA)), rng.choice((2.5, 7.3, 11.7, 19.4, 40.6))
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
    spec, context, gb = find_model(rng.choice(_GQA)), rng.choice((4096, 8192)), rng.choice((21.3, 40.8, 53.6))
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


# --- Roofline ------------------------------------------------------------------------------------------------------


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
    spec, batch = find_model(rng.choice(_GQA)), rng.choice((8, 64, 256))
    right = roofline.decode_attention_intensity(spec.num_heads, spec.num_kv_heads)
    return Drill(
        "intensity of decode attention",
        f"{_shape(spec)}, bfloat16 cache, {batch} requests at once. How many operations per byte does decode attention "
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


# --- Units and the cache ---------------------------------------------------------------------------------------------


@drill("units")
def gb_to_gib(rng: random.Random) -> Drill:
    gb = rng.choice((24, 40, 48, 80, 141))
    right = Quantity(gb * GB, "B", "memory", "label * 10 ** 9", {"label": gb})
    return Drill(
        "GB and GiB",
        f"A label says {gb} GB and means 10^9 bytes each. How many GiB is that?",
        right,
        "GiB",
        {
            "by multiplying: a GiB is larger, so there are fewer": gb * GB * (GIB / GB) ** 2,
            "as if they were the same": gb * GIB,
        },
        0.005,
        is_conversion=True,
    )


@drill("units")
def repeated_work(rng: random.Random) -> Drill:
    n = rng.choice((10, 100, 2048))
    right = Quantity(
        100 * (1 - 2 / (n + 1)), "%", "repeated token computations", "100 * (1 - 2 / (tokens + 1))", {"tokens": n}
    )
    return Drill(
        "what a cache saves",
        f"Without a KV cache, a model generates {n:,} tokens one after the other and recomputes all of them at each "
        "step (1 + 2 + ... + n token computations). What percentage of these computations repeats an earlier one?",
        right,
        "%",
        {
            "as half of them": 50.0,
            "by comparing with n squared": 100 * (1 - 1 / n),
            "as the share that is new": 200 / (n + 1),
        },
        0.0004 if n > 1000 else 0.005,
    )


@drill("units")
def last_block(rng: random.Random) -> Drill:
    block_size, length = rng.choice((16, 32)), rng.randrange(100, 3000)
    right = Quantity(
        math.ceil(length / block_size), "blocks", "blocks", "ceil(tokens / block_size)",
        {"tokens": length, "block_size": block_size},
    )  # fmt: skip
    return Drill(
        "blocks of a request",
        f"How many blocks of {block_size} tokens does a request of {length:,} tokens hold?",
        right,
        "blocks",
        {"by rounding down: the last tokens need a block too": length // block_size},
        0,
    )


# --- Playing ---------------------------------------------------------------------------------------------------------


def play(
    drills: Sequence[Drill],
    ask: Callable[[str], str],
    tell: Callable[[str], None] = print,
) -> tuple[int, int]:
    """Ask each drill, twice at most; returns (right at the first try, asked).

    An empty answer gives up. "q", the end of the input or Ctrl-C ends the round, and what was asked by then counts.
    """
    tell("A plain number counts in the unit in brackets. Enter alone shows the solution, q ends.")
    right = asked = 0
    for number, one in enumerate(drills, 1):
        tell(f"\n{number}/{len(drills)} {one.name}\n{one.question}")
        tries: list[bool] = []
        try:
            _ask_one(one, ask, tell, tries)
        except (EOFError, KeyboardInterrupt):
            asked += bool(tries)
            tell("")
            break
        asked += 1
        right += tries[:1] == [True]
    tell(f"\nScore: {right} of {asked} at the first try.")
    return right, asked


def _ask_one(one: Drill, ask: Callable[[str], str], tell: Callable[[str], None], tries: list[bool]) -> None:
    """Ask until it is right, given up or wrong twice; `tries` takes whether each answer was right."""
    while len(tries) < 2 and True not in tries:
        text = ask(f"answer ({one.asked}): ").strip()
        if not text:
            break
        if text.lower() in ("q", "quit", "exit"):
            raise EOFError
        try:
            verdict = one.check(text)
        except ValueError as error:  # not a try: nothing was answered
            tell(f"? {error}")
            continue
        tries.append(verdict.is_right)
        tell(f"{'✓' if verdict.is_right else '✗'} {verdict.message}")
    tell(one.explain())


class Quiz:
    """Drills in a notebook, where nothing can be typed at a prompt: `questions()`, `answer(1, "56 KiB")`, `score()`."""

    def __init__(self, count: int = 5, seed: int = 0, topic: str | None = None) -> None:
        self.drills = draw(count, seed, topic)
        self.first_tries: dict[int, bool] = {}

    def questions(self) -> None:
        """Print all of them, each with the unit of a plain number."""
        for number, one in enumerate(self.drills, 1):
            print(f"{number}  {one.question} ({one.asked})")

    def answer(self, number: int, value: float | str) -> None:
        """Print whether that is right, and which mistake it looks like if not. The first try counts."""
        if not self._has(number):
            return
        if value is None or value is ... or (isinstance(value, str) and not value.strip()):
            print(f"question {number} is not answered yet")
            return
        try:
            verdict = self.drills[number - 1].check(value)
        except (ValueError, TypeError) as error:  # not a try: nothing was answered
            print(f"? {error}")
            return
        self.first_tries.setdefault(number, verdict.is_right)
        print(f"{'✓' if verdict.is_right else '✗'} {verdict.message}")

    def explain(self, number: int) -> None:
        """Print the formula, with the numbers of the question, and the answer. It counts as a try."""
        if not self._has(number):
            return
        self.first_tries.setdefault(number, False)
        print(self.drills[number - 1].explain())

    def _has(self, number: int) -> bool:
        exists = number in range(1, len(self.drills) + 1)
        if not exists:
            print(f"? question {number!r} does not exist: there are {len(self.drills)}, counted from 1")
        return exists

    def score(self) -> str:
        right = sum(self.first_tries.values())
        return f"{right} of {len(self.drills)} right at the first try, {len(self.first_tries)} tried"
