"""From a GPU's memory to tokens: what the weights take, what a token of KV cache takes, how many requests fit.

Bytes are per GPU wherever tensor parallelism (`tp`) or pipeline parallelism (`pp`) is given. GB is 10^9 bytes and GiB
is 2^30; a plain number of bytes is neither, so convert at the edges: `80 * GB`, `53.6 * GIB` (of `minivllm.theory`).

The rules are those of vLLM 0.30.0 (v1/core/kv_cache_utils.py, v1/kv_cache_interface.py, v1/worker/gpu_worker.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from minivllm.checkpoint_files import checkpoint_bytes as checkpoint_bytes
from minivllm.checks import require_int
from minivllm.theory.dtypes import DTYPES, EXPERTS_ONLY, KV_DTYPES, WEIGHT_BITS, full_dtype
from minivllm.theory.model_spec import FULL, LINEAR, SLIDING, ModelSpec
from minivllm.theory.quantity import Quantity
from minivllm.units import GIB, cdiv


class NoRoom(ValueError):
    """The weights and what else must be in memory leave nothing for the KV cache."""


def kv_dtype_name(name: str, spec: ModelSpec) -> str:
    """The name in full, a key of KV_DTYPES; "auto" is the model's own. ValueError lists the names."""
    own = (spec.kv_quantization or spec.dtype) if name == "auto" else name
    key = full_dtype(own)
    if key not in KV_DTYPES:
        raise ValueError(f"KV dtype {own!r} is unknown; known: auto, {', '.join(KV_DTYPES)}")
    return key


def check_parallel(spec: ModelSpec, tp: int, pp: int = 1) -> None:
    """ValueError if the model cannot be cut so: heads must divide, and every stage needs a layer."""
    require_int("tp", tp, 1)
    require_int("pp", pp, 1)
    problem = _why_not_tp(spec, tp)
    if problem:
        possible = ", ".join(map(str, sorted(possible_tp(spec))))
        raise ValueError(f"{spec.name} has {problem}; tp can be {possible}")
    if pp > spec.num_layers:
        raise ValueError(f"{spec.name} has {spec.num_layers} layers, too few for pp = {pp} stages")


def _why_not_tp(spec: ModelSpec, tp: int) -> str:
    """What keeps `tp` GPUs from sharing the heads; empty if nothing does."""
    if spec.num_heads % tp:
        return f"{spec.num_heads} attention heads, which {tp} GPUs cannot share evenly"
    for heads in sorted({spec.heads_of(kind)[0] for kind in (FULL, SLIDING)}, reverse=True):
        if spec.latent is None and heads % tp and tp % heads:
            return f"{heads} KV heads: tp must divide them or be a multiple of them, and {tp} is neither"
    if spec.linear is not None and (spec.linear.num_key_heads % tp or spec.linear.num_value_heads % tp):
        both = f"{spec.linear.num_key_heads} key and {spec.linear.num_value_heads} value heads of linear attention"
        return f"{both}, which {tp} GPUs cannot share evenly"
    return ""


def check_context(spec: ModelSpec, context: int) -> None:
    """ValueError if a request of that length is longer than the model was made for."""
    if context > spec.max_position_embeddings:
        raise ValueError(
            f"context {context:,} is more than {spec.name} was made for: at most {spec.max_position_embeddings:,} "
            "tokens (max_position_embeddings)"
        )


def kv_heads_per_gpu(spec: ModelSpec, tp: int = 1, kind: str = FULL) -> int:
    """Heads are shared out, and replicated once there are more GPUs than heads."""
    return max(1, spec.heads_of(kind)[0] // tp)


def pipeline_stages(spec: ModelSpec, pp: int) -> list[list[str]]:
    """The kinds of layers of each stage, shared out as vLLM does: what is left over goes to the last but one and up."""
    sizes = [spec.num_layers // pp] * pp
    for i in range(2, spec.num_layers % pp + 2):
        sizes[-i] += 1
    layers = iter(spec.layer_types)
    return [list(itertools.islice(layers, size)) for size in sizes]


# --- The KV cache --------------------------------------------------------------------------------------------------


def kv_bytes_per_token_and_layer(
    spec: ModelSpec, kv_dtype: str = "auto", tp: int = 1, kind: str | None = None
) -> Quantity:
    """Bytes that one attention layer caches for one token, on one GPU.

    `kind` is that of the layer; it need not be given where all layers with attention have the same heads.
    """
    if kind is None:
        kind = SLIDING if FULL not in spec.layer_types else FULL
        if spec.has_two_shapes:
            raise ValueError(f"{spec.name} has layers of two shapes: say which, {FULL} or {SLIDING}")
    check_parallel(spec, tp)
    dtype = KV_DTYPES[kv_dtype_name(kv_dtype, spec)]
    if spec.latent is not None:
        size = spec.latent.cached_per_token
        element = dtype.bytes_per_vector(size) / size
        return Quantity(
            size * element,
            "B",
            "KV cache of a token in a layer",
            "(kv_lora_rank + rope_head_dim) * bytes_per_element",
            {
                "kv_lora_rank": spec.latent.kv_lora_rank,
                "rope_head_dim": spec.latent.qk_rope_head_dim,
                "bytes_per_element": element,
            },
        )
    heads, head_dim = kv_heads_per_gpu(spec, tp, kind), spec.heads_of(kind)[1]
    element = dtype.bytes_per_vector(head_dim) / head_dim
    return Quantity(
        2 * heads * dtype.bytes_per_vector(head_dim),
        "B",
        "KV cache of a token in a layer",
        "2 * KV_heads * head_dim * bytes_per_element",
        {"KV_heads": heads, "head_dim": head_dim, "bytes_per_element": element},
    )


def kv_bytes_per_token(
    spec: ModelSpec, kv_dtype: str = "auto", tp: int = 1, pp: int = 1, *, beyond_window: bool = False
) -> Quantity:
    """Bytes of KV cache that one more token takes on one GPU: 2 x layers x KV heads x head_dim x bytes.

    Latent attention caches one vector that stands for K and V (no 2) and for all heads (tp does not divide it).
    `beyond_window` counts only the layers that keep growing once a request is longer than the sliding window.
    """
    check_parallel(spec, tp, pp)
    kinds = (FULL,) if beyond_window else (FULL, SLIDING)
    if spec.has_two_shapes:
        full = kv_bytes_per_token_and_layer(spec, kv_dtype, tp, FULL)
        windowed = 0 if beyond_window else kv_bytes_per_token_and_layer(spec, kv_dtype, tp, SLIDING)
        stage = max(pipeline_stages(spec, pp), key=lambda s: s.count(FULL) * full + s.count(SLIDING) * windowed)
        return Quantity(
            stage.count(FULL) * full + stage.count(SLIDING) * windowed, "B", "KV cache of a token",
            "full_layers * bytes_in_a_full_layer + windowed_layers * bytes_in_a_windowed_layer",
            {"full_layers": stage.count(FULL), "bytes_in_a_full_layer": full,
             "windowed_layers": stage.count(SLIDING), "bytes_in_a_windowed_layer": windowed},
        )  # fmt: skip
    count = max(sum(layer in kinds for layer in stage) for stage in pipeline_stages(spec, pp))
    one = kv_bytes_per_token_and_layer(spec, kv_dtype, tp)
    terms = {"layers": count, **one.terms}
    return Quantity(count * one, "B", "KV cache of a token", _with_layers(one.formula), terms)


def _with_layers(formula: str) -> str:
    return formula.replace("2 *", "2 * layers *", 1) if formula.startswith("2 *") else f"layers * {formula}"


def kv_bytes_per_block(spec: ModelSpec, block_size: int = 16, kv_dtype: str = "auto", tp: int = 1) -> Quantity:
    """Bytes of a block of `block_size` tokens in all layers, on one GPU: what this engine's pool is made of.

    vLLM's blocks are the same where all layers are of one kind; where they are not, see `kv_layout`.
    """
    require_int("block_size", block_size, 1)
    one = kv_bytes_per_token(spec, kv_dtype, tp)
    return Quantity(
        block_size * one, "B", "bytes of a block", "block_size * bytes_per_token",
        {"block_size": block_size, "bytes_per_token": one},
    )  # fmt: skip


def state_bytes_per_layer(spec: ModelSpec, tp: int = 1) -> float:
    """Bytes that a linear-attention layer keeps per request, however long, on one GPU: a matrix per head, and the last
    inputs of a short convolution."""
    if spec.linear is None:
        return 0
    state, conv = DTYPES[spec.linear.state_dtype or spec.dtype], DTYPES[spec.dtype]
    return (state * spec.linear.recurrent_elements + conv * spec.linear.conv_elements) / tp


def kv_bytes_per_request(
    spec: ModelSpec, num_tokens: int, kv_dtype: str = "auto", tp: int = 1, pp: int = 1
) -> Quantity:
    """Bytes of KV cache that a request of `num_tokens` needs on one GPU; with stages, on the one that needs most.

    A windowed layer needs the last `sliding_window` tokens, a linear one a state of fixed size. What a server sets
    aside is more: whole blocks, of all layers of a group (`kv_layout`).
    """
    require_int("num_tokens", num_tokens, 0)
    check_parallel(spec, tp, pp)
    one = kv_bytes_per_token_and_layer(spec, kv_dtype, tp, FULL)
    in_window = min(num_tokens, spec.sliding_window or 0)
    windowed = kv_bytes_per_token_and_layer(spec, kv_dtype, tp, SLIDING)
    state = state_bytes_per_layer(spec, tp)

    def need(layers: list[str]) -> float:
        tokens = layers.count(FULL) * num_tokens * one + layers.count(SLIDING) * in_window * windowed
        return tokens + layers.count(LINEAR) * state

    layers = max(pipeline_stages(spec, pp), key=need)
    formula = "layers * tokens * bytes_per_token_and_layer"
    terms = {"layers": layers.count(FULL), "tokens": num_tokens, "bytes_per_token_and_layer": one}
    if SLIDING in layers:
        size = "bytes_per_token_and_windowed_layer" if spec.has_two_shapes else "bytes_per_token_and_layer"
        formula += f" + windowed_layers * tokens_in_window * {size}"
        terms |= {"windowed_layers": layers.count(SLIDING), "tokens_in_window": in_window, size: windowed}
    if LINEAR in layers:
        formula += " + linear_layers * state_of_a_layer"
        terms |= {"linear_layers": layers.count(LINEAR), "state_of_a_layer": Quantity(state, "B", "state of a layer")}
    return Quantity(need(layers), "B", "KV cache of a request", formula, terms)


# --- Weights and the budget ----------------------------------------------------------------------------------------


def weight_bytes(spec: ModelSpec, weight_dtype: str = "auto", tp: int = 1, pp: int = 1) -> Quantity:
    """Bytes of the weights on one GPU, from the parameter count; exact for a checkpoint in one dtype.

    Quantised formats leave the embedding and the output head in 16 bits, MXFP4 (gpt-oss) everything but the experts.
    Where the files are at hand, their size is better: `checkpoint_bytes`.
    """
    check_parallel(spec, tp, pp)
    key, bits = weight_format(spec, weight_dtype)
    total = spec.published_parameters or float(spec.parameters)
    if bits >= 16:
        return Quantity(
            total * bits / 8 / (tp * pp), "B", "weights", "parameters * bits / 8 / GPUs",
            {"parameters": total, "bits": bits, "GPUs": tp * pp},
        )  # fmt: skip
    kept = spec.embedding_parameters + (0 if spec.tie_word_embeddings else spec.head_parameters)
    kept += spec.attention_parameters if key in EXPERTS_ONLY and spec.experts else 0
    return Quantity(
        (kept * 16 + (total - kept) * bits) / 8 / (tp * pp), "B", "weights",
        "(kept_in_16_bits * 16 + (parameters - kept_in_16_bits) * bits) / 8 / GPUs",
        {"kept_in_16_bits": kept, "parameters": total, "bits": bits, "GPUs": tp * pp},
    )  # fmt: skip


def weight_format(spec: ModelSpec, weight_dtype: str = "auto") -> tuple[str, float]:
    """The format that "auto" stands for, and its bits per weight. ValueError if it is not known here."""
    key = full_dtype(weight_dtype)
    if key == "auto":
        key = spec.quantization or spec.dtype
        if key not in WEIGHT_BITS:
            raise ValueError(
                f"{spec.name} is quantised in a way that is not known here {key.removeprefix('unknown ')}: give the "
                f"--weight-dtype that comes closest ({', '.join(WEIGHT_BITS)}), or, to `size`, the files' --weights-gib"
            )
    if key not in WEIGHT_BITS:
        raise ValueError(f"weight dtype {key!r} is unknown; known: auto, {', '.join(WEIGHT_BITS)}")
    return key, WEIGHT_BITS[key]


def activation_bytes(spec: ModelSpec, max_num_batched_tokens: int, max_num_seqs: int, tp: int = 1) -> Quantity:
    """An estimate of a step's activation peak on one GPU (vLLM measures it in a trial run at start).

    The widest moment: the residual stream twice, and an MLP's two inner activations, or a router's choice of experts
    for every token; then float32 logits, twice while they are sampled from, for each sequence.
    """
    element = DTYPES[spec.dtype]
    inner = spec.intermediate_size
    if spec.experts is not None:
        inner = max(spec.experts.experts_per_token * spec.experts.expert_size + spec.experts.shared_size, 1)
    per_token = element * (2 * spec.hidden_size + 3 * inner / tp)
    logits = 4 * spec.vocab_size * 2
    return Quantity(
        max_num_batched_tokens * per_token + max_num_seqs * logits,
        "B",
        "activation peak (estimated)",
        "batched_tokens * bytes_per_token + sequences * bytes_of_logits",
        {
            "batched_tokens": max_num_batched_tokens,
            "bytes_per_token": per_token,
            "sequences": max_num_seqs,
            "bytes_of_logits": logits,
        },
    )


def kv_budget(
    memory_bytes: float,
    gpu_memory_utilization: float,
    weights: float,
    activation_peak: float = 0,
    other: float = 0,
) -> Quantity:
    """Bytes left for the KV cache: utilisation x memory - weights - activation peak - other (CUDA context, NCCL ...).

    Raises NoRoom if nothing is left; the message has the terms.
    """
    if not memory_bytes > 0 or not math.isfinite(memory_bytes):
        raise ValueError(f"memory is {memory_bytes!r} bytes, expected a positive number")
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization is {gpu_memory_utilization!r}, expected more than 0 and at most 1")
    if not min(weights, activation_peak, other) >= 0:  # also false for a NaN
        raise ValueError("weights, activation peak and other memory must be 0 or more bytes")
    usable = memory_bytes * gpu_memory_utilization
    left = usable - weights - activation_peak - other
    if left <= 0:
        raise NoRoom(
            f"nothing is left for the KV cache: {gpu_memory_utilization:g} of {memory_bytes / GIB:,.2f} GiB is "
            f"{usable / GIB:,.2f} GiB, weights take {weights / GIB:,.2f}, activations {activation_peak / GIB:,.2f} and "
            f"the rest {other / GIB:,.2f} GiB. {_more_room(usable, weights)}"
        )
    return Quantity(
        left,
        "B",
        "KV budget",
        "memory * utilization - weights - activation_peak - other",
        {
            "memory": Quantity(memory_bytes, "B", "memory"),
            "utilization": gpu_memory_utilization,
            "weights": _as_bytes(weights, "weights"),
            "activation_peak": _as_bytes(activation_peak, "activation peak"),
            "other": _as_bytes(other, "other"),
        },
    )


def _more_room(usable: float, weights: float) -> str:
    if weights < usable:
        return "Lower activations (max_num_batched_tokens) or the rest, raise the utilization, or use larger GPUs"
    return "Use more GPUs (tp), smaller weights, or a larger GPU"


def _check_budget(budget: float) -> None:
    if not 0 <= budget < math.inf:
        raise ValueError(f"the budget is {budget!r} bytes, expected 0 or more")


def _as_bytes(value: float, name: str) -> Quantity:
    return value if isinstance(value, Quantity) else Quantity(value, "B", name)


# --- From bytes to requests ----------------------------------------------------------------------------------------


def num_kv_blocks(budget: float, bytes_per_token: float, block_size: int = 16) -> Quantity:
    """Whole blocks that the budget holds. (The engine keeps one of them, the null block, for itself.)"""
    require_int("block_size", block_size, 1)
    _check_budget(budget)
    if not bytes_per_token > 0:
        raise ValueError(f"a token takes {bytes_per_token!r} bytes, expected a positive number")
    return Quantity(
        math.floor(budget / (block_size * bytes_per_token)),
        "blocks",
        "blocks",
        "floor(budget / (block_size * bytes_per_token))",
        {"budget": _as_bytes(budget, "budget"), "block_size": block_size, "bytes_per_token": bytes_per_token},
    )


def num_kv_tokens(num_blocks: float, block_size: int = 16) -> Quantity:
    """vLLM's start-up line "GPU KV cache size: N tokens"."""
    return Quantity(
        num_blocks * block_size, "tokens", "KV tokens", "blocks * block_size",
        {"blocks": num_blocks, "block_size": block_size},
    )  # fmt: skip


def concurrency(num_blocks: float, blocks_per_request: float) -> Quantity:
    """vLLM's "Maximum concurrency": requests of full length that the pool holds at the same time, as a fraction and the
    null block counted in. A guarantee, not a cap: shorter requests fit more often."""
    return Quantity(
        num_blocks / blocks_per_request, "requests", "maximum concurrency", "num_blocks / blocks_per_request",
        {"num_blocks": num_blocks, "blocks_per_request": blocks_per_request},
    )  # fmt: skip


def max_concurrency(num_tokens: float, max_model_len: int, block_size: int = 16) -> Quantity:
    """`concurrency` from vLLM's other start-up line, "KV cache size: N tokens". For models whose layers all keep every
    token."""
    require_int("max_model_len", max_model_len, 1)
    require_int("block_size", block_size, 1)
    return Quantity(
        concurrency(num_tokens / block_size, cdiv(max_model_len, block_size)),
        "requests",
        "maximum concurrency",
        "tokens / block_size / ceil(max_model_len / block_size)",
        {"tokens": num_tokens, "block_size": block_size, "max_model_len": max_model_len},
    )


def requests_that_fit(budget: float, bytes_per_request: float) -> Quantity:
    """Whole requests of that size in the budget: a request that half fits does not run."""
    _check_budget(budget)
    if not bytes_per_request > 0:
        raise ValueError(f"a request takes {bytes_per_request!r} bytes, expected a positive number")
    return Quantity(
        math.floor(budget / bytes_per_request),
        "requests",
        "requests at once",
        "floor(budget / bytes_per_request)",
        {"budget": _as_bytes(budget, "budget"), "bytes_per_request": _as_bytes(bytes_per_request, "one request")},
    )


def possible_tp(spec: ModelSpec, most: int = 128) -> Iterator[int]:
    """The numbers of GPUs that can share the model's heads: powers of two first, as in servers."""
    numbers = [tp for tp in range(1, most + 1) if not _why_not_tp(spec, tp)]
    yield from sorted(numbers, key=lambda tp: (tp & (tp - 1) != 0, tp))
