"""Operations and bytes counted by hand, bounds that are bounds, and where batching stops helping."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.theory import find_device, find_model, list_models, roofline, sizing

QWEN = find_model("qwen2.5-7b")
H100 = find_device("h100-sxm")
FLOP_S, BYTES_S = H100.flop_s(), H100.bandwidth
models = st.sampled_from(list_models())
settings.register_profile("theory", deadline=None)  # other programs may hold the processor
settings.load_profile("theory")


chunks = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(1, 5000)),
        st.tuples(st.integers(1, 300), st.integers(0, 5000)).map(lambda chunk: (chunk[0], chunk[0] + chunk[1])),
    ),
    min_size=1,
    max_size=20,
)


def brute_force_pairs(new, end, window=None):
    return sum(min(position + 1, window or end) for position in range(end - new, end))


@given(st.integers(1, 60), st.integers(0, 60), st.one_of(st.none(), st.integers(1, 70)))
def test_visible_pairs(new, before, window):
    assert roofline.visible_pairs(new, new + before, window) == brute_force_pairs(new, new + before, window)


class TestStep:
    def test_decode_by_hand(self):
        """Qwen2.5-7B, 8 requests of 1,000 tokens, bfloat16."""
        step = roofline.decode_step(QWEN, 8, 1000)
        linear = QWEN.attention_parameters + QWEN.mlp_parameters
        assert step.parts["projections"].flops == 2 * linear * 8
        assert step.parts["projections"].bytes == pytest.approx(2 * linear)
        assert step.parts["attention"].flops == 8 * 1000 * 28 * 4 * 28 * 128
        assert step.parts["attention"].bytes == 8 * 1001 * 57344  # read, and one token each written
        assert step.parts["lm_head"].flops == 2 * 8 * 3584 * 152064
        assert step.parts["lm_head"].bytes == pytest.approx(2 * 3584 * 152064)

    def test_prefill_by_hand(self):
        step = roofline.prefill_step(QWEN, 1000)
        assert step.parts["attention"].flops == 1000 * 1001 / 2 * 28 * 4 * 28 * 128
        assert step.parts["lm_head"].flops == 2 * 3584 * 152064  # one row
        assert step.num_tokens == 1000

    @given(models, st.integers(1, 64), st.integers(2, 5000))
    def test_a_mixed_step_is_the_sum_of_its_requests(self, model, batch, context):
        """Of everything but the weights, which are read once."""
        mixed = roofline.step_cost(model, [(1, context)] * batch + [(min(context, 512), context)])
        decode = roofline.decode_step(model, batch, context)
        prefill = roofline.step_cost(model, [(min(context, 512), context)])
        assert mixed.flops == pytest.approx(decode.flops + prefill.flops)
        assert mixed.bytes <= decode.bytes + prefill.bytes
        attention = [step.parts["attention"].bytes for step in (mixed, decode, prefill)]
        assert attention[0] == pytest.approx(attention[1] + attention[2])

    @given(models, chunks, st.sampled_from(["auto", "fp8"]), st.one_of(st.none(), st.integers(0, 5)))
    def test_it_is_the_sum_over_chunks(self, model, chunks, dtype, num_sampled):
        """Written out once more, chunk by chunk and layer by layer; equal to the last bit."""
        for tp in list(sizing.possible_tp(model))[:2]:
            attention = moved = 0.0
            for kind in ("full_attention", "sliding_attention"):
                count = model.layer_types.count(kind)
                limit = model.sliding_window if kind == "sliding_attention" else None
                pairs = sum(
                    brute_force_pairs(new, end, limit) * roofline.flops_per_pair(model, new == 1, kind)
                    for new, end in chunks
                )
                read = sum(end if limit is None else min(end, limit - 1 + new) for new, end in chunks)
                attention += count * pairs
                written = sum(new for new, _ in chunks)
                moved += count * (read + written) * sizing.kv_bytes_per_token_and_layer(model, dtype, tp, kind)
            states = len(chunks) * model.layer_types.count("linear_attention") * sizing.state_bytes_per_layer(model, tp)
            cost = roofline.CostModel(model, kv_dtype=dtype, tp=tp)
            step = cost.step(chunks, num_sampled)
            assert step.parts["attention"] == roofline.Part(attention / tp, moved + 2 * states)
            assert step == roofline.step_cost(model, chunks, kv_dtype=dtype, tp=tp, num_sampled=num_sampled)
            assert step == cost.step(chunks, num_sampled)  # it keeps nothing

    def test_latent_attention_in_a_mixed_step(self):
        """Each chunk is priced by its own length: a decode beside a prompt computes as a decode does alone."""
        model = find_model("deepseek-v3")
        decode, prompt = roofline.flops_per_pair(model, True), roofline.flops_per_pair(model, False)
        assert decode > prompt
        mixed = roofline.step_cost(model, [(1, 1000), (10, 10)]).parts["attention"]
        assert mixed.flops == model.num_layers * (1000 * decode + 55 * prompt)

    @given(models, st.integers(2, 300), st.integers(1, 100))
    def test_chunks_compute_what_the_whole_prompt_does(self, model, n, size):
        whole = roofline.prefill_step(model, n)
        chunks = [
            roofline.step_cost(
                model, [(min(size, n - start), min(start + size, n))], num_sampled=int(start + size >= n)
            )
            for start in range(0, n, size)
        ]
        if model.latent is None or size > 1:
            same = [c for c in chunks if c.num_tokens > 1 or model.latent is None]
            if len(same) == len(chunks):
                assert sum(c.flops for c in chunks) == pytest.approx(whole.flops)
        assert sum(c.bytes for c in chunks) >= whole.bytes * 0.999

    @given(models, st.integers(1, 200), st.integers(1, 5000))
    def test_tp_divides_the_work(self, model, batch, context):
        tp = list(sizing.possible_tp(model))[-1]
        alone, shared = (roofline.decode_step(model, batch, context, tp=n) for n in (1, tp))
        assert shared.flops == pytest.approx(alone.flops / tp)
        assert alone.bytes / tp <= shared.bytes * (1 + 1e-9) and shared.bytes <= alone.bytes * (1 + 1e-9)

    def test_experts(self):
        """One token reads 2 of Mixtral's 8 experts; a hundred read all of them, and compute two each."""
        mixtral = find_model("mixtral-8x7b")
        assert roofline.experts_touched(mixtral, 1) == pytest.approx(2)
        assert roofline.experts_touched(mixtral, 100) == pytest.approx(8)
        one, many = (roofline.decode_step(mixtral, batch, 100).parts["projections"] for batch in (1, 100))
        assert many.bytes > 3 * one.bytes and many.flops == pytest.approx(100 * one.flops)

    @pytest.mark.parametrize(
        ("chunks", "message"),
        [
            ([], "at least one request"),
            ([(0, 5)], "new tokens must be a whole number of at least 1"),
            ([(5, 4)], "tokens of the request must be a whole number of at least 5"),
            ([(1, 5), (True, 5)], "new tokens must be a whole number of at least 1, got True"),
            ([(1, 5.5)], "tokens of the request must be a whole number of at least 1, got 5.5"),
        ],
    )
    def test_refused(self, chunks, message):
        with pytest.raises(ValueError, match=message):
            roofline.step_cost(QWEN, chunks)


class TestTime:
    @given(models, st.integers(1, 512), st.integers(1, 8000))
    def test_the_three_bounds_are_ordered(self, model, batch, context):
        step = roofline.decode_step(model, batch, context)
        all_, parts, none = (
            roofline.step_time(step, FLOP_S, BYTES_S, overlap=overlap).seconds for overlap in ("all", "parts", "none")
        )
        assert all_ <= parts * (1 + 1e-9) and parts <= none * (1 + 1e-9) and none <= 2 * all_ * (1 + 1e-9)

    def test_what_binds(self):
        decode = roofline.step_time(roofline.decode_step(QWEN, 1, 1000), FLOP_S, BYTES_S)
        prefill = roofline.step_time(roofline.prefill_step(QWEN, 4096), FLOP_S, BYTES_S)
        assert (decode.bound, prefill.bound) == ("memory", "compute")

    def test_efficiencies_and_all_reduce(self):
        step = roofline.decode_step(QWEN, 16, 1000, tp=4)
        fast = roofline.step_time(step, FLOP_S, BYTES_S, overlap="none")
        slow = roofline.step_time(step, FLOP_S, BYTES_S, overlap="none", compute_efficiency=0.5, memory_efficiency=0.5)
        assert slow.seconds == pytest.approx(2 * fast.seconds)
        linked = roofline.step_time(step, FLOP_S, BYTES_S, overlap="none", link_bytes_s=450e9, tp=4)
        message = 2 * 28 * 16 * 3584 * 2  # two per layer
        assert linked.all_reduce_s == pytest.approx(2 * 3 / 4 * message / 450e9)
        assert linked.seconds == pytest.approx(fast.seconds + linked.all_reduce_s)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"overlap": "some"}, "overlap is 'some'"),
            ({"compute_efficiency": 0}, "compute_efficiency is 0, expected 0.001 to 1"),
            ({"memory_efficiency": 1.1}, "memory_efficiency is 1.1"),
        ],
    )
    def test_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            roofline.step_time(roofline.decode_step(QWEN, 1, 10), FLOP_S, BYTES_S, **options)
        with pytest.raises(ValueError, match="flop_s is 0, expected a positive number"):
            roofline.step_time(roofline.decode_step(QWEN, 1, 10), 0, BYTES_S)


def test_layers_of_two_shapes():
    """Gemma-4-31B: heads of 512 where attention is full, of 256 within windows."""
    gemma = find_model("gemma-4-31b")
    attention = roofline.decode_step(gemma, 1, 10_000).parts["attention"]
    assert attention.flops == 4 * 32 * (10 * 512 * 10_000 + 50 * 256 * 1024)
    assert attention.bytes == 10 * 8192 * 10_001 + 50 * 16_384 * 1025


@pytest.mark.parametrize(
    "call",
    [
        lambda: roofline.prefill_seconds(7e9, -5, FLOP_S),
        lambda: roofline.decode_attention_intensity(32, 0),
        lambda: roofline.decode_step_seconds(1, 16e9, -5, BYTES_S),
    ],
)
def test_what_cannot_be(call):
    with pytest.raises(ValueError, match="expected"):
        call()


class TestCriticalBatch:
    def test_mixtures_need_more(self):
        dense = roofline.critical_batch(FLOP_S, BYTES_S)
        assert roofline.critical_batch(FLOP_S, BYTES_S, weights_per_active=4) == 4 * dense

    def test_with_kv_it_is_where_both_take_equally_long(self):
        weights, flops, kv = 15e9, 15e9, 500 * 57344 * 0.1
        batch = roofline.critical_batch_with_kv(FLOP_S, BYTES_S, weights, flops, kv)
        assert batch * flops / FLOP_S == pytest.approx((weights + batch * kv) / BYTES_S)
        assert batch > roofline.critical_batch(FLOP_S, BYTES_S)

    def test_long_contexts_never_get_there(self):
        """Qwen2.5-7B on an H100: from 900 tokens on, a request's KV takes longer to read than its token to compute."""
        flops = 2 * 7.6e9
        assert roofline.critical_batch_with_kv(FLOP_S, BYTES_S, 15.2e9, flops, 4096 * 57344) == math.inf
        assert roofline.critical_batch_with_kv(FLOP_S, BYTES_S, 15.2e9, flops, 800 * 57344) < math.inf
