"""From operations and bytes to time: how fast a step can be at best, and what limits it.

A processor does at most F operations and moves at most B bytes per second. Work of `flops` operations on `bytes` takes
at least max(flops / F, bytes / B); which of the two counts is a question of the intensity flops / bytes beside the
ridge point F / B (Williams et al. 2009, doi:10.1145/1498765.1498785).

The first half works on plain numbers, as one does on a napkin; the second counts a `ModelSpec`'s steps by part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from minivllm.checks import require_int
from minivllm.theory.dtypes import EXPERTS_ONLY
from minivllm.theory.model_spec import FULL, LINEAR, SLIDING, ModelSpec
from minivllm.theory.quantity import Quantity
from minivllm.theory.sizing import (
    check_parallel,
    kv_bytes_per_token_and_layer,
    state_bytes_per_layer,
    weight_format,
)

# --- On a napkin ---------------------------------------------------------------------------------------------------


def ridge_point(flop_s: float, bytes_s: float) -> Quantity:
    """Operations per byte at which compute and memory take equally long. Dense rates only."""
    _positive(flop_s=flop_s, bytes_s=bytes_s)
    return Quantity(
        flop_s / bytes_s, "FLOP/B", "ridge point", "flop_s / bytes_s",
        {"flop_s": Quantity(flop_s, "FLOP/s", "compute"), "bytes_s": Quantity(bytes_s, "B/s", "bandwidth")},
    )  # fmt: skip


def linear_intensity(num_tokens: float, bytes_per_weight: float = 2) -> Quantity:
    """Operations per byte of a linear layer over `num_tokens`: 2 operations per weight and token, a read per weight."""
    _positive(num_tokens=num_tokens, bytes_per_weight=bytes_per_weight)
    return Quantity(
        2 * num_tokens / bytes_per_weight, "FLOP/B", "intensity of a linear layer", "2 * tokens / bytes_per_weight",
        {"tokens": num_tokens, "bytes_per_weight": bytes_per_weight},
    )  # fmt: skip


def critical_batch(
    flop_s: float, bytes_s: float, bytes_per_weight: float = 2, weights_per_active: float = 1
) -> Quantity:
    """Tokens in a step at which the linear layers reach the ridge, KV reads not counted.

    `weights_per_active` is how many weights are read for each that a token uses: 1 for a dense model, about
    experts / experts per token for a mixture.
    """
    ridge = ridge_point(flop_s, bytes_s)
    return Quantity(
        ridge * bytes_per_weight / 2 * weights_per_active, "tokens", "critical batch",
        "ridge * bytes_per_weight / 2 * weights_per_active",
        {"ridge": ridge, "bytes_per_weight": bytes_per_weight, "weights_per_active": weights_per_active},
    )  # fmt: skip


def critical_batch_with_kv(
    flop_s: float, bytes_s: float, weights: float, flops_per_token: float, kv_bytes_per_request: float
) -> Quantity:
    """The decode batch at which compute takes as long as all reads, each request's KV cache included.

    Infinite if a request's reads alone take longer than its operations: then no batch is large enough.
    """
    _positive(flop_s=flop_s, bytes_s=bytes_s, weights=weights, flops_per_token=flops_per_token)
    per_request = flops_per_token / flop_s - kv_bytes_per_request / bytes_s  # s that a request adds to compute's lead
    return Quantity(
        weights / bytes_s / per_request if per_request > 0 else math.inf, "requests", "critical batch with KV reads",
        "weights / bytes_s / (flops_per_token / flop_s - kv_bytes_per_request / bytes_s)",
        {
            "weights": weights, "bytes_s": bytes_s, "flops_per_token": flops_per_token, "flop_s": flop_s,
            "kv_bytes_per_request": kv_bytes_per_request,
        },
    )  # fmt: skip


def decode_step_seconds(
    batch: int,
    weights: float,
    kv_bytes_per_request: float,
    bytes_s: float,
    flops_per_token: float = 0,
    flop_s: float = math.inf,
) -> Quantity:
    """Seconds of a decode step: the larger of reading the weights and computing, and then every request's KV cache.

    The KV reads come on top: attention has so few operations per byte that they never hide behind its compute
    (scaling-book, "All about Transformer Inference"). For several chips give the sum of their rates.
    """
    require_int("batch", batch, 1)
    _positive(weights=weights, bytes_s=bytes_s, flop_s=flop_s)
    if not (kv_bytes_per_request >= 0 and flops_per_token >= 0):
        raise ValueError(
            f"kv_bytes_per_request is {kv_bytes_per_request!r} and flops_per_token {flops_per_token!r}, expected 0 or "
            "more"
        )
    read = "weights / bytes_s"
    terms = {
        "weights": Quantity(weights, "B", "weights"), "bytes_s": Quantity(bytes_s, "B/s", "bandwidth"), "batch": batch,
        "kv_bytes_per_request": Quantity(kv_bytes_per_request, "B", "KV cache of a request"),
    }  # fmt: skip
    if flops_per_token:
        read = f"max({read}, batch * flops_per_token / flop_s)"
        terms |= {"flops_per_token": flops_per_token, "flop_s": Quantity(flop_s, "FLOP/s", "compute")}
    return Quantity(
        max(weights / bytes_s, batch * flops_per_token / flop_s) + batch * kv_bytes_per_request / bytes_s,
        "s", "decode step", f"{read} + batch * kv_bytes_per_request / bytes_s", terms,
    )  # fmt: skip


def prefill_seconds(parameters: float, num_tokens: int, flop_s: float, efficiency: float = 1) -> Quantity:
    """Seconds of a prompt's linear layers: 2 operations per parameter and token. Attention comes on top."""
    _positive(parameters=parameters, flop_s=flop_s, num_tokens=num_tokens)
    _share(efficiency=efficiency)
    return Quantity(
        2 * parameters * num_tokens / (flop_s * efficiency), "s", "prefill",
        "2 * parameters * tokens / (flop_s * efficiency)",
        {"parameters": parameters, "tokens": num_tokens, "flop_s": flop_s, "efficiency": efficiency},
    )  # fmt: skip


def bandwidth_used(tokens_s: float, bytes_per_token: float) -> Quantity:
    """B/s that a measured decode speed at batch 1 implies, if each token reads all the weights once."""
    return Quantity(
        tokens_s * bytes_per_token, "B/s", "bandwidth used", "tokens_s * bytes_per_token",
        {"tokens_s": tokens_s, "bytes_per_token": bytes_per_token},
    )  # fmt: skip


def memory_read_seconds(memory_bytes: float, bytes_s: float) -> Quantity:
    """Seconds to read the whole memory once: no decode step of a full GPU can need longer for its reads."""
    _positive(memory_bytes=memory_bytes, bytes_s=bytes_s)
    return Quantity(
        memory_bytes / bytes_s, "s", "reading the whole memory", "memory / bytes_s",
        {"memory": memory_bytes, "bytes_s": bytes_s},
    )  # fmt: skip


def all_reduce_seconds(message_bytes: float, tp: int, link_bytes_s: float) -> Quantity:
    """Seconds of a ring all-reduce among `tp` GPUs, by bandwidth: each sends 2 (tp - 1) / tp of the message.

    `link_bytes_s` is one GPU's in one direction.
    """
    require_int("tp", tp, 1)
    _positive(link_bytes_s=link_bytes_s)
    return Quantity(
        2 * (tp - 1) / tp * message_bytes / link_bytes_s, "s", "all-reduce",
        "2 * (tp - 1) / tp * message / link_bytes_s",
        {"tp": tp, "message": message_bytes, "link_bytes_s": link_bytes_s},
    )  # fmt: skip


def decode_attention_intensity(num_heads: int, num_kv_heads: int, bytes_per_element: float = 2) -> Quantity:
    """Operations per byte of decode attention, for any batch and context: each request reads its own cache.

    A cached key is used once by each query head of its group (2 operations per element), and so is its value.
    """
    _positive(num_heads=num_heads, num_kv_heads=num_kv_heads, bytes_per_element=bytes_per_element)
    return Quantity(
        2 * (num_heads / num_kv_heads) / bytes_per_element, "FLOP/B", "intensity of decode attention",
        "2 * (heads / KV_heads) / bytes_per_element",
        {"heads": num_heads, "KV_heads": num_kv_heads, "bytes_per_element": bytes_per_element},
    )  # fmt: skip


def unfused_prefill_attention_intensity(num_tokens: int, head_dim: int) -> Quantity:
    """Operations per byte of a head's prefill attention that writes its scores to memory and reads them back, 2 bytes
    per element: 4 d n^2 + 3 n^2 operations on 8 n^2 + 8 n d bytes."""
    return Quantity(
        (4 * head_dim * num_tokens**2 + 3 * num_tokens**2) / (8 * num_tokens**2 + 8 * num_tokens * head_dim),
        "FLOP/B", "intensity of prefill attention, not fused",
        "(4 * head_dim * tokens ** 2 + 3 * tokens ** 2) / (8 * tokens ** 2 + 8 * tokens * head_dim)",
        {"tokens": num_tokens, "head_dim": head_dim},
    )  # fmt: skip


def prefill_servers_per_decode_server(prefill_s: float, step_s: float, batch: int, output_tokens: int) -> Quantity:
    """How many prefill servers keep one decode server busy: prompts per second that it finishes, times their time."""
    _positive(prefill_s=prefill_s, step_s=step_s, output_tokens=output_tokens)
    return Quantity(
        prefill_s * batch / (step_s * output_tokens), "", "prefill servers per decode server",
        "prefill_s * batch / (step_s * output_tokens)",
        {"prefill_s": prefill_s, "batch": batch, "step_s": step_s, "output_tokens": output_tokens},
    )  # fmt: skip


# --- A model's step, by part ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What one kind of layer computes and moves in a step, on one GPU."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Step:
    """One forward pass on one GPU: its parts run one after the other, in every layer."""

    num_tokens: int
    num_requests: int
    parts: dict[str, Part]  # "projections", "attention", "lm_head"
    all_reduce_bytes: float = 0  # sum of the messages of tensor parallelism

    @property
    def flops(self) -> Quantity:
        return self._total("flops", "FLOP")

    @property
    def bytes(self) -> Quantity:
        return self._total("bytes", "B")

    def _total(self, field: str, unit: str) -> Quantity:
        terms = {name: getattr(part, field) for name, part in self.parts.items()}
        return Quantity(sum(terms.values()), unit, f"{field} of the step", " + ".join(terms), terms)

    @property
    def intensity(self) -> Quantity:
        return Quantity(
            self.flops / self.bytes, "FLOP/B", "intensity of the step", "flops / bytes",
            {"flops": self.flops, "bytes": self.bytes},
        )  # fmt: skip


@dataclass(frozen=True)
class StepTime:
    """`seconds`, and what they go into. `bound` is "compute" or "memory": the larger of the two."""

    seconds: Quantity
    compute_s: float
    memory_s: float
    all_reduce_s: float

    @property
    def bound(self) -> str:
        return "compute" if self.compute_s > self.memory_s else "memory"


@dataclass(frozen=True)
class AttentionLayers:
    """What attention computes and moves in the layers of one kind."""

    count: int
    window: int | None
    flops_per_pair: int  # in one layer, by a chunk of several tokens, on all GPUs together
    decode_flops_per_pair: int  # by a single token: latent attention then computes otherwise
    bytes_per_token: float  # of one layer's cache, on one GPU


class CostModel:
    """Operations and bytes of a model's steps on one of `tp` GPUs: what is the same for every step is computed once.

    Counted: two operations per weight and token, attention's two products over the visible keys, a read of every weight
    that is used, of every visible key and value once, and the new ones' write. Not counted: activations between layers,
    norms, the softmax; they are small beside these.
    """

    def __init__(self, spec: ModelSpec, weight_dtype: str = "auto", kv_dtype: str = "auto", tp: int = 1) -> None:
        check_parallel(spec, tp)
        self.spec, self.tp = spec, tp
        key, bits = weight_format(spec, weight_dtype)
        self.narrow, self.wide = bits / 8, max(bits / 8, 2)  # a quantised checkpoint keeps its head in 16 bits
        experts = spec.experts
        self.expert = idle = 0  # weights of an expert, in all its layers, and of those that a token is not sent to
        if experts is not None:
            self.expert = experts.num_layers * spec.one_mlp(experts.expert_size)
            idle = (experts.num_experts - experts.experts_per_token) * self.expert
        self.active = float(spec.attention_parameters + spec.mlp_parameters) - idle  # weights that a token uses
        self.mlp, self.head = spec.mlp_parameters, spec.head_parameters
        keeps_attention = key in EXPERTS_ONLY and experts is not None
        self.attention_bytes = spec.attention_parameters * (self.wide if keeps_attention else self.narrow)
        self.attention = [
            AttentionLayers(
                count,
                spec.sliding_window if kind == SLIDING else None,
                flops_per_pair(spec, False, kind),
                flops_per_pair(spec, True, kind),
                float(kv_bytes_per_token_and_layer(spec, kv_dtype, tp, kind)),
            )
            for kind in (FULL, SLIDING)
            if (count := spec.layer_types.count(kind))
        ]
        self.num_states, self.state_bytes = spec.layer_types.count(LINEAR), state_bytes_per_layer(spec, tp)

    def step(self, chunks: Sequence[tuple[int, int]], num_sampled: int | None = None) -> Step:
        """One step over `chunks`: (new tokens, tokens of the request after the step) each.

        A decode is (1, context), a whole prompt (n, n), a chunk of a longer one (n, so far). `num_sampled` rows get
        logits, one per request if not given.
        """
        if not chunks:
            raise ValueError("a step needs at least one request")
        decodes, prompts = [], []  # contexts of single tokens; chunks of several
        for new, end in chunks:
            if not (type(new) is type(end) is int and 1 <= new <= end):
                require_int("new tokens", new, 1)
                require_int("tokens of the request", end, new)
            if new == 1:
                decodes.append(end)
            else:
                prompts.append((new, end))
        tp, num_tokens = self.tp, len(decodes) + sum(new for new, _ in prompts)
        num_sampled = len(chunks) if num_sampled is None else num_sampled

        weights = self.attention_bytes + (self.mlp - self._untouched(num_tokens)) * self.narrow
        projections = Part(2 * self.active * num_tokens / tp, weights / tp)

        flops = moved = 0.0  # of attention, over all its layers
        for layers in self.attention:
            limit = layers.window
            # A single token reads what it sees; a chunk reads once what its tokens see together.
            seen = sum(decodes) if limit is None else sum([end if end < limit else limit for end in decodes])
            pairs = sum(visible_pairs(new, end, limit) for new, end in prompts)
            read = seen + sum(end if limit is None else min(end, limit - 1 + new) for new, end in prompts)
            flops += layers.count * (seen * layers.decode_flops_per_pair + pairs * layers.flops_per_pair)
            moved += layers.count * (read + num_tokens) * layers.bytes_per_token
        states = len(chunks) * self.num_states * self.state_bytes
        attention = Part(flops / tp, moved + 2 * states)

        lm_head = Part(2 * self.head * num_sampled / tp, self.head * self.wide / tp)
        messages = 2 * self.spec.num_layers * num_tokens * self.spec.hidden_size * 2 if tp > 1 else 0  # 2 B per element
        parts = {"projections": projections, "attention": attention, "lm_head": lm_head}
        return Step(num_tokens, len(chunks), parts, messages)

    def _untouched(self, num_tokens: int) -> float:
        """Weights of experts that none of the tokens is sent to."""
        if self.spec.experts is None:
            return 0.0
        return (self.spec.experts.num_experts - experts_touched(self.spec, num_tokens)) * self.expert


def step_cost(
    spec: ModelSpec,
    chunks: Sequence[tuple[int, int]],
    weight_dtype: str = "auto",
    kv_dtype: str = "auto",
    tp: int = 1,
    *,
    num_sampled: int | None = None,
) -> Step:
    """Operations and bytes of one step over `chunks`: (new tokens, tokens of the request after the step) each.

    What is counted, and what a chunk may be, say `CostModel` and its `step`; for many steps make one and keep it.
    """
    return CostModel(spec, weight_dtype, kv_dtype, tp).step(chunks, num_sampled)


class StepOptions(TypedDict, total=False):
    """The options of `step_cost`, to be handed on."""

    weight_dtype: str
    kv_dtype: str
    tp: int
    num_sampled: int | None


def decode_step(spec: ModelSpec, batch: int, context: int, **options: Unpack[StepOptions]) -> Step:
    """`batch` requests that each compute one token, which makes them `context` tokens long. Options of `step_cost`."""
    require_int("batch", batch, 1)
    return step_cost(spec, [(1, context)] * batch, **options)


def prefill_step(spec: ModelSpec, num_tokens: int, cached: int = 0, **options: Unpack[StepOptions]) -> Step:
    """A prompt of `num_tokens`, of which the first `cached` need not be computed. Options of `step_cost`."""
    require_int("cached", cached, 0)
    return step_cost(spec, [(num_tokens - cached, num_tokens)], **options)


def step_time(
    step: Step,
    flop_s: float,
    bytes_s: float,
    *,
    compute_efficiency: float = 1,
    memory_efficiency: float = 1,
    overlap: str = "parts",
    link_bytes_s: float | None = None,
    tp: int = 1,
) -> StepTime:
    """The least time of a step on one GPU with these rates.

    `overlap` says what hides behind what. "parts": within a part the larger of compute and memory, and the parts one
    after the other (the default, and what a GPU's kernels do); "all": the larger of the two sums, the textbook's lower
    bound; "none": both add up, which is closer on processors that do not fetch ahead far enough.
    """
    _positive(flop_s=flop_s, bytes_s=bytes_s)
    _share(compute_efficiency=compute_efficiency, memory_efficiency=memory_efficiency)
    compute = {name: part.flops / (flop_s * compute_efficiency) for name, part in step.parts.items()}
    memory = {name: part.bytes / (bytes_s * memory_efficiency) for name, part in step.parts.items()}
    compute_s, memory_s = sum(compute.values()), sum(memory.values())
    terms: dict[str, float] = {"compute": _seconds(compute_s, "compute"), "memory": _seconds(memory_s, "memory")}
    if overlap == "parts":
        terms = {name: _seconds(max(compute[name], memory[name]), name) for name in compute}
        formula = " + ".join(terms)
    elif overlap == "all":
        formula = "max(compute, memory)"
    elif overlap == "none":
        formula = "compute + memory"
    else:
        raise ValueError(f"overlap is {overlap!r}, expected 'parts', 'all' or 'none'")
    seconds = max(terms.values()) if overlap == "all" else sum(terms.values())
    all_reduce = 0.0
    if tp > 1 and link_bytes_s is not None:
        all_reduce = float(all_reduce_seconds(step.all_reduce_bytes, tp, link_bytes_s))
        formula, terms = f"{formula} + all_reduce", terms | {"all_reduce": _seconds(all_reduce, "all-reduce")}
    return StepTime(Quantity(seconds + all_reduce, "s", "step", formula, terms), compute_s, memory_s, all_reduce)


def visible_pairs(new: int, end: int, window: int | None = None) -> int:
    """(query, key) pairs of a chunk's causal attention: its tokens are the last `new` of `end`, each sees itself and
    what is before it, at most `window` tokens."""
    first = end - new + 1  # tokens that the first query sees
    if window is None or end <= window:
        return (first + end) * new // 2
    if first >= window:
        return new * window
    below = window - first  # queries that see fewer than the window holds
    return (first + window - 1) * below // 2 + (new - below) * window


def flops_per_pair(spec: ModelSpec, is_decode: bool, kind: str = FULL) -> int:
    """Operations per (query, key) pair in one layer, all heads: q . k, and the value's weighted sum.

    Latent attention decodes on the compressed vectors themselves, which are longer than a head's keys; a prefill
    unpacks them first.
    """
    if spec.latent is None:
        return 4 * spec.num_heads * spec.heads_of(kind)[1]
    if is_decode:
        return 2 * spec.num_heads * (spec.latent.cached_per_token + spec.latent.kv_lora_rank)
    return 2 * spec.num_heads * (spec.latent.qk_nope_head_dim + spec.latent.qk_rope_head_dim + spec.latent.v_head_dim)


def experts_touched(spec: ModelSpec, num_tokens: int) -> float:
    """Experts of a layer that at least one of `num_tokens` is sent to, expected if the router chose evenly."""
    if spec.experts is None:
        return 0.0
    miss = 1 - spec.experts.experts_per_token / spec.experts.num_experts
    return spec.experts.num_experts * (1 - miss**num_tokens)


def _seconds(value: float, name: str) -> Quantity:
    return Quantity(value, "s", name)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} is {value!r}, expected a positive number")


def _share(**values: float) -> None:
    for name, value in values.items():
        if not 0.001 <= value <= 1:
            raise ValueError(f"{name} is {value!r}, expected 0.001 to 1")
