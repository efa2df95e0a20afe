"""A Quantity is a number, and its explanation computes to that number."""

import copy
import math
import pickle

import pytest

from minivllm.theory import GB, GIB, Quantity, find_device, find_model, roofline, sizing
from minivllm.theory.kv_layout import kv_layout
from minivllm.theory.plan import Settings, make_plan
from minivllm.theory.quantity import format_bytes, format_value

QWEN, DEEPSEEK, GEMMA, MIXTRAL, HYBRID = map(
    find_model, ("qwen2.5-7b", "deepseek-v3", "gemma-3-27b", "mixtral-8x7b", "qwen3.5-27b")
)
STEP = roofline.decode_step(QWEN, 32, 4096)

QUANTITIES = {
    "per token": sizing.kv_bytes_per_token(QWEN),
    "per token, latent": sizing.kv_bytes_per_token(DEEPSEEK),
    "per token, int4": sizing.kv_bytes_per_token(QWEN, "int4", tp=4),
    "per layer": sizing.kv_bytes_per_token_and_layer(QWEN),
    "per request": sizing.kv_bytes_per_request(QWEN, 4096),
    "per request, windows": sizing.kv_bytes_per_request(GEMMA, 8192),
    "per request, states": sizing.kv_bytes_per_request(HYBRID, 8192),
    "blocks per request": kv_layout(QWEN).blocks_per_request(4097),
    "blocks per request, windows": kv_layout(GEMMA).blocks_per_request(8192, 4096),
    "blocks per request, states": kv_layout(HYBRID).blocks_per_request(8192),
    "bytes per request": kv_layout(GEMMA).bytes_per_request(8192, 4096),
    "block bytes": kv_layout(HYBRID, "fp8", tp=2).block_bytes,
    "blocks of the budget": kv_layout(GEMMA).num_blocks(20 * GIB),
    "concurrency, windows": kv_layout(GEMMA).max_concurrency(15480, 32768, 16384),
    "requests in memory": make_plan(GEMMA, find_device("h100-sxm"), Settings(8192)).requests_in_memory,
    "weights": sizing.weight_bytes(QWEN),
    "weights, 4 bits": sizing.weight_bytes(QWEN, "int4", tp=2),
    "activations": sizing.activation_bytes(QWEN, 8192, 256),
    "budget": sizing.kv_budget(80 * GB, 0.92, sizing.weight_bytes(QWEN), 2 * GIB, GIB),
    "blocks": sizing.num_kv_blocks(21520, 1),
    "tokens": sizing.num_kv_tokens(1345),
    "concurrency": sizing.max_concurrency(57008, 16384),
    "requests": sizing.requests_that_fit(53.6 * GB, 655360 * 4096),
    "parameters": QWEN.parameters,
    "active parameters": MIXTRAL.active_parameters,
    "ridge": roofline.ridge_point(989.4e12, 3.35e12),
    "linear": roofline.linear_intensity(32),
    "critical": roofline.critical_batch(989.4e12, 3.35e12, 1, 4),
    "critical with KV": roofline.critical_batch_with_kv(989.4e12, 3.35e12, 15e9, 15e9, 57344 * 100),
    "decode": roofline.decode_step_seconds(32, 15e9, 57344 * 4096, 3.35e12, 15e9, 989.4e12),
    "prefill": roofline.prefill_seconds(7.6e9, 4096, 989.4e12, 0.6),
    "used": roofline.bandwidth_used(39, 16.2e9),
    "whole memory": roofline.memory_read_seconds(80 * GB, 3.35e12),
    "all-reduce": roofline.all_reduce_seconds(1e6, 4, 450e9),
    "decode attention": roofline.decode_attention_intensity(28, 4),
    "prefill attention": roofline.unfused_prefill_attention_intensity(4096, 128),
    "servers": roofline.prefill_servers_per_decode_server(0.91, 0.019, 32, 512),
    "flops": STEP.flops,
    "bytes": STEP.bytes,
    "intensity": STEP.intensity,
    **{
        f"time, {overlap}": roofline.step_time(STEP, 989.4e12, 3.35e12, overlap=overlap).seconds
        for overlap in ("parts", "all", "none")
    },
    "time, two GPUs": roofline.step_time(
        roofline.decode_step(QWEN, 32, 4096, tp=2), 989.4e12, 3.35e12, link_bytes_s=450e9, tp=2
    ).seconds,
}


def evaluate(quantity):
    names = {name.replace(" ", "_"): float(term) for name, term in quantity.terms.items()}
    functions = {"floor": math.floor, "ceil": math.ceil, "max": max, "min": min}
    return eval(quantity.formula, {"__builtins__": {}}, names | functions)


@pytest.mark.parametrize("name", QUANTITIES)
def test_the_formula_gives_the_value(name):
    quantity = QUANTITIES[name]
    assert quantity.formula and quantity.terms
    assert evaluate(quantity) == pytest.approx(float(quantity), rel=1e-12)


@pytest.mark.parametrize("name", QUANTITIES)
def test_the_explanation_names_every_term(name):
    quantity = QUANTITIES[name]
    formula, filled, result = quantity.explain(depth=0, width=1000).splitlines()
    assert formula == f"{quantity.name} = {quantity.formula}"
    assert result.strip() == f"= {quantity}"
    assert not [term for term in quantity.terms if term in filled.replace("max(", "").replace("floor(", "")]


def test_explain():
    assert sizing.kv_bytes_per_token(QWEN).explain() == (
        "KV cache of a token = 2 * layers * KV_heads * head_dim * bytes_per_element\n"
        "                    = 2 * 28 * 4 * 128 * 2\n"
        "                    = 57,344 B = 56.00 KiB = 57.34 kB"
    )


@pytest.mark.parametrize("name", QUANTITIES)
def test_long_lines_go_on_below(name):
    whole, broken = QUANTITIES[name].explain(width=10**6), QUANTITIES[name].explain()
    assert "".join(whole.split()) == "".join(broken.split())
    assert all(len(line) <= 78 for line in broken.splitlines())


def test_terms_that_were_computed_are_explained_below():
    lines = sizing.kv_bytes_per_request(QWEN, 4096).explain(width=1000).splitlines()
    assert lines[3] == "  KV cache of a token in a layer = 2 * KV_heads * head_dim * bytes_per_element"
    assert len(sizing.kv_bytes_per_request(QWEN, 4096).explain(depth=0, width=1000).splitlines()) == 3


def test_it_is_a_number():
    quantity = Quantity(3, "B", "three")
    assert quantity == 3 and quantity * 2 == 6 and type(quantity * 2) is float
    assert repr(quantity) == "three: 3 B" and quantity.explain() == "three: 3 B"
    for clone in (copy.deepcopy(quantity), pickle.loads(pickle.dumps(quantity))):
        assert (clone, clone.unit, clone.name) == (3, "B", "three")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (57344, "B", "57,344 B = 56.00 KiB = 57.34 kB"),
        (80 * GB, "B", "74.51 GiB = 80.00 GB"),
        (100, "B", "100 B"),
        (0, "B", "0 B"),
        (0.00257, "s", "2.57 ms"),
        (2.5, "s", "2.5 s"),
        (3e-6, "s", "3 µs"),
        (0, "s", "0 s"),
        (3.35e12, "B/s", "3.35 TB/s"),
        (295.34, "FLOP/B", "295.3 FLOP/B"),
        (math.inf, "requests", "inf requests"),
        (1344, "blocks", "1,344 blocks"),
        (0.92, "", "0.92"),
    ],
)
def test_format(value, unit, text):
    assert format_value(value, unit) == text


def test_format_bytes_below_zero():
    assert format_bytes(-2048) == "-2,048 B = -2.00 KiB = -2.05 kB"
