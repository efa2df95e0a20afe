"""Figures that people published, and what the calculators make of them.

Each test names its source. Where the published figure is wrong, the test has the right one and says what went wrong.
"""

import math

import pytest

from minivllm.theory import GB, GIB, ModelSpec, Quantity, dtypes, find_model, roofline, sizing
from minivllm.theory.kv_layout import KVLayout, kv_layout


def spec(layers, kv_heads, head_dim, q_heads=None, hidden=None, **more):
    """A model of which only the cache matters."""
    heads = q_heads or kv_heads
    return ModelSpec.from_hf(
        {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "num_key_value_heads": kv_heads,
            "num_attention_heads": heads,
            "head_dim": head_dim,
            "hidden_size": hidden or heads * head_dim,
            "intermediate_size": 4 * heads * head_dim,
            "vocab_size": 32000,
            "max_position_embeddings": 131072,
            **more,
        }
    )


LLAMA_8B = spec(32, 8, 128, 32)
LLAMA_70B = spec(80, 8, 128, 64)


def gib_of(tokens, bytes_per_token):
    return tokens * bytes_per_token / GIB


class TestStartUpLogs:
    """vLLM's lines "GPU KV cache size" and "Maximum concurrency", and its refusals."""

    @pytest.mark.parametrize(
        ("blocks", "max_model_len", "tokens", "concurrency"),
        [
            (127626, 2048, 2042016, 997.08),  # A06, vllm#13596
            (1381, 2048, 22096, 10.79),  # A07, vllm#12569
            (158656 // 16, 32768, 158656, 4.84),  # A08, vllm#17122
            (198784 // 16, 8192, 198784, 24.27),  # A16, vllm#17327
            (7584 // 16, 128, 7584, 59.25),  # A18, tt-xla#5727: the hybrid manager was off, every layer counts as full
            (27648, 8192, 442368, 54.00),  # A42: from invented logs, which pass this identity too
            (27853, 8192, 445648, 54.40),
        ],
    )
    def test_concurrency(self, blocks, max_model_len, tokens, concurrency):
        assert sizing.num_kv_tokens(blocks) == tokens
        assert sizing.max_concurrency(tokens, max_model_len) == pytest.approx(concurrency, abs=0.005)

    @pytest.mark.parametrize(
        ("model", "tp", "tokens", "gib"),
        [
            (LLAMA_70B, 1, 22096, 6.743),  # A07: 8-bit weights, 16-bit KV
            (LLAMA_8B, 1, 158656, 19.367),  # A08
            (LLAMA_8B, 1, 16816, 2.053),  # A23, bonito#7: Mistral-7B has the same sizes
            (LLAMA_8B, 1, 29568, 3.609),  # A24, worker-vllm#35
            (spec(32, 32, 128), 1, 24320, 11.875),  # A26, Qwen3#16: int4 weights, KV stays in 16 bits
            (spec(80, 64, 128), 2, 4464, 5.449),  # A27: a 72B without GQA
        ],
    )
    def test_pool(self, model, tp, tokens, gib):
        per_token = sizing.kv_bytes_per_token(model, tp=tp)
        assert gib_of(tokens, per_token) == pytest.approx(gib, abs=0.001)
        assert tokens % 16 == 0
        assert sizing.num_kv_blocks(tokens * per_token, per_token) == tokens // 16

    def test_eight_bit_weights(self):
        """A07: Llama-3.1-70B w8a8, logged as 67.7229 GB, which are GiB; embedding and head stay in 16 bits."""
        assert sizing.weight_bytes(find_model("llama-3.1-70b"), "int8") / GIB == pytest.approx(67.7229, rel=2e-3)

    def test_72b_without_gqa(self):
        assert sizing.kv_bytes_per_token(spec(80, 64, 128)) == 2621440  # A27
        assert sizing.kv_bytes_per_token(spec(80, 64, 128)) == 8 * sizing.kv_bytes_per_token(LLAMA_70B)

    def test_needed_and_longest(self):
        """A13, tpu-inference#223: the longest context is in whole pages, there of 256 tokens."""
        assert sizing.kv_bytes_per_request(LLAMA_8B, 131072) == 16 * GIB
        for block_size, longest in ((256, 5632), (1, 5816)):
            layout = kv_layout(LLAMA_8B, block_size=block_size)
            assert layout.longest_request(layout.num_blocks(0.71 * GIB), 131072) == longest

    @pytest.mark.parametrize(
        ("model", "tp", "blocks_per_4_gib", "mib"),
        [
            (spec(32, 32, 128), 1, 512, 8.0),  # A20, vllm#2418: Llama-2-7B, from the number of CPU blocks
            (LLAMA_70B, 2, 1638, 2.5),  # A22, OpenRLHF#336: so there were two GPUs
            (spec(64, 8, 128, 40), 2, 2048, 2.0),  # A28: Qwen2.5-32B
        ],
    )
    def test_bytes_of_a_block(self, model, tp, blocks_per_4_gib, mib):
        block = 16 * sizing.kv_bytes_per_token(model, tp=tp)
        assert block == mib * 2**20
        assert sizing.num_kv_blocks(4 * GIB, sizing.kv_bytes_per_token(model, tp=tp)) == blocks_per_4_gib

    @pytest.mark.parametrize(
        ("tokens", "blocks", "max_model_len"),
        [(3664, 229, 4096), (6048, 378, 8192), (16816, 1051, 32768), (29568, 1848, 32768), (24320, 1520, 32768),
         (4464, 279, 32768), (4336, 271, 32768), (1216, 76, 4096), (1792, 112, 4096)],
    )  # fmt: skip
    def test_refusals(self, tokens, blocks, max_model_len):
        """A20, A22, A23, A24, A26, A27, A28, A40: less than one request of full length."""
        assert sizing.num_kv_tokens(blocks) == tokens
        assert sizing.max_concurrency(tokens, max_model_len) < 1

    def test_shorter_max_model_len_frees_the_activation_peak(self):
        """A28: from 271 to 1,548 blocks."""
        assert pytest.approx(2.49, abs=0.005) == (1548 - 271) * 2 * 2**20 / GIB
        assert sizing.max_concurrency(24768, 4096) == pytest.approx(6.05, abs=0.01)

    def test_two_gpus_share_the_heads(self):
        """A30: the bytes of one rank, since the log's GiB are those of one rank."""
        ministral = spec(40, 8, 128, 32)
        per_token = sizing.kv_bytes_per_token(ministral, tp=2)
        assert per_token == 81920
        tokens = 16 * sizing.num_kv_blocks(52.36 * GIB, per_token)
        assert tokens == pytest.approx(686320, rel=1e-4)  # 52.36 is rounded
        assert sizing.max_concurrency(tokens, 100000) == pytest.approx(6.86, abs=0.005)

    def test_need_with_a_fixed_part(self):
        """A32, vllm#44376: dividing would promise 24,504 tokens; the fixed part leaves 13,528."""
        slope = (6.66 - 5.44) * GIB / (30000 - 13528)
        assert slope == pytest.approx(79.5e3, rel=1e-3)
        fixed = 6.66 * GIB - 30000 * slope
        assert fixed / GIB == pytest.approx(4.44, abs=0.005)
        assert pytest.approx(24504, abs=1) == 30000 * 5.44 / 6.66

    def test_budget_identity(self):
        """A34, vllm#14447: 16 RTX 3090; the logged total is rounded itself."""
        budget = sizing.kv_budget(23.58 * GIB, 0.99, 21.21 * GIB, 0.37 * GIB, 0.2 * GIB)
        assert budget / GIB == pytest.approx(1.57, abs=0.01)
        assert set(budget.terms) == {"memory", "utilization", "weights", "activation_peak", "other"}  # A44

    def test_five_points_of_utilisation(self):
        """A37, vllm#1018: a fifth more KV, because the weights stay as they are."""
        weights = 26 * GB
        before, after = (sizing.kv_budget(40 * GB, share, weights) for share in (0.9, 0.95))
        assert [before / GB, after / GB] == pytest.approx([10, 12])
        assert after / before - 1 == pytest.approx(0.2)

    def test_hybrids_before_020(self):
        """A14, vllm#40691: 0.19.0 logged 290,864 tokens and 33.04x for 32,768, which contradict each other. Both follow
        from 1,487 blocks of 784 tokens; the tokens took them to be shared out evenly among the four groups. Prefix
        caching of hybrids was off."""
        assert sizing.max_concurrency(290864, 32768) == pytest.approx(8.88, abs=0.005)
        assert pytest.approx(1082655, abs=1) == 33.04 * 32768
        layout = kv_layout(find_model("qwen3.5-27b"), enable_prefix_caching=False)
        assert round(layout.max_concurrency(1487, 32768), 2) == 33.04
        assert 1487 // sum(layout.num_groups.values()) * layout.block_size == 290864

    @pytest.mark.parametrize(
        ("model", "kv_dtype", "tp", "gib", "max_model_len", "concurrency", "tokens"),
        [
            ("qwen3.5-35b-a3b", "fp8", 1, 6.01, 131072, 4.35, 569878),  # A36, club-3090#652: Qwen3.6, same sizes
            ("qwen3.5-35b-a3b", "fp8", 1, 5.98, 131072, 4.33, 567978),  # club-3090#612
            ("qwen3.5-27b", "fp8", 2, 4.99, 131072, 2.31, 302921),  # talos-argocd-proxmox#1995: Qwen3.8, same sizes
        ],
    )
    def test_hybrids_to_the_token(self, model, kv_dtype, tp, gib, max_model_len, concurrency, tokens):
        """From "Available KV cache memory" and the config to the two lines that follow it in the log."""
        layout = kv_layout(find_model(model), kv_dtype, tp)
        found = layout.max_concurrency(layout.num_blocks(gib * GIB), max_model_len)
        assert round(found, 2) == concurrency
        assert int(found * max_model_len) == tokens

    def test_concurrency_is_a_guarantee_and_no_cap(self):
        """A38, vllm#8031: 4.61 requests of 8,192 tokens are 47 of 800."""
        assert sizing.requests_that_fit(4.61 * 8192, 800) == 47


CONFIGS = {
    "GPT-2": ((12, 12, 64), 36864), "GPT-2-XL": ((48, 25, 64), 307200), "OPT-125M": ((12, 12, 64), 36864),
    "OPT-13B": ((40, 40, 128), 819200), "Llama-2-7B": ((32, 32, 128), 524288),
    "Llama-2-13B": ((40, 40, 128), 819200), "Llama-2-70B": ((80, 8, 128), 327680),
    "Llama-3.2-1B": ((16, 8, 64), 32768), "Llama-3.2-3B": ((28, 8, 128), 114688),
    "Mistral-7B": ((32, 8, 128), 131072), "Falcon-7B": ((32, 1, 64), 8192), "Qwen2.5-0.5B": ((24, 2, 64), 12288),
    "Qwen2.5-1.5B": ((28, 2, 128), 28672), "Qwen2.5-3B": ((36, 2, 128), 36864),
    "Qwen2.5-7B": ((28, 4, 128), 57344), "Qwen2.5-14B": ((48, 8, 128), 196608),
    "Qwen2.5-32B": ((64, 8, 128), 262144), "Qwen2.5-72B": ((80, 8, 128), 327680),
    "Qwen3-8B": ((36, 8, 128), 147456), "Qwen3-32B": ((64, 8, 128), 262144),
}  # fmt: skip


class TestPublishedSizes:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_table(self, name):
        """B20: from the sizes, and from the catalogue's config."""
        sizes, expected = CONFIGS[name]
        assert sizing.kv_bytes_per_token(spec(*sizes)) == expected
        assert sizing.kv_bytes_per_token(find_model(name)) == expected * (
            2 if find_model(name).dtype == "float32" else 1
        )

    def test_opt_13b(self):
        """B01, arXiv:2309.06180: "800 KB" is KiB, "1.6 GB" is 1.678e9 bytes."""
        assert sizing.kv_bytes_per_token(spec(40, 40, 128)) == 819200 == 800 * 1024
        assert sizing.kv_bytes_per_request(spec(40, 40, 128), 2048) == 1677721600

    @pytest.mark.parametrize(
        ("model", "expected"), [(LLAMA_8B, (0.125, 1.95, 15.62)), (LLAMA_70B, (0.313, 4.88, 39.06))]
    )
    def test_llama31_table(self, model, expected):
        """B02, huggingface.co/blog/llama31: its GB are GiB; its 1k is 1,024, its 16k and 128k are thousands."""
        found = [sizing.kv_bytes_per_request(model, n) / GIB for n in (1024, 16000, 128000)]
        assert found == pytest.approx(expected, abs=0.006)

    def test_llama31_405b(self):
        """B03: the published row (0.984, 15.38, 123.05) is twice what it should be."""
        model = spec(126, 8, 128, 128)
        found = [sizing.kv_bytes_per_request(model, n) / GIB for n in (1024, 16000, 128000)]
        assert found == pytest.approx([0.492, 7.69, 61.52], abs=0.006)
        assert [2 * gib for gib in found] == pytest.approx([0.984, 15.38, 123.05], abs=0.012)

    def test_deepseek_table(self):
        """B04, arXiv:2505.09343: decimal kB. The paper prints 7.28x where its own numbers give 7.34x."""
        found = [sizing.kv_bytes_per_token(find_model(n)) for n in ("deepseek-v3", "qwen2.5-72b", "llama-3.1-405b")]
        assert found == [70272, 327680, 516096]
        assert [n / found[0] for n in found] == pytest.approx([1.0, 4.66, 7.34], abs=0.005)

    @pytest.mark.parametrize(("name", "expected"), [("deepseek-v2", 69120), ("deepseek-v2-lite", 31104)])
    def test_latent_attention(self, name, expected):
        """B05, B06: one latent and one rotary key, no factor 2, no heads, and not divided by TP."""
        model = find_model(name)
        assert sizing.kv_bytes_per_token(model) == expected
        assert sizing.kv_bytes_per_token(model, tp=8) == expected
        assert sizing.kv_bytes_per_token(find_model("deepseek-v3")) != 2 * 61 * 512 * 2  # the formula in LMCache#694

    def test_llama_2_13b_at_8192(self):
        """B08, scaling-book: 6.7 GB, which its table then calls GiB."""
        need = sizing.kv_bytes_per_request(spec(40, 40, 128), 8192)
        assert need == 6710886400
        assert need / GIB == 6.25

    @pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", 327680), ("fp8", 163840)])
    def test_llama_3_70b(self, dtype, expected):
        """B09, scaling-book, which prints 324 kB, 160 kB and 162e3, and 81 kB."""
        assert sizing.kv_bytes_per_token(LLAMA_70B, dtype) == expected

    def test_four_bits_without_scales(self):
        """B09: 81,920 bytes leave out the scales that a 4-bit cache needs."""
        assert dtypes.KVDtype(4).bytes_per_vector(128) * 2 * 8 * 80 == 81920
        assert sizing.kv_bytes_per_token(LLAMA_70B, "int4") == 81920 * (1 + 4 / 16)

    def test_batch_of_128(self):
        """B12, ml-engineering: 0.131 MB per token, 17.2 GB."""
        per_token = sizing.kv_bytes_per_token(LLAMA_8B)
        assert per_token / 1e6 == pytest.approx(0.131, abs=5e-4)
        assert 128 * sizing.kv_bytes_per_request(LLAMA_8B, 1024) / GB == pytest.approx(17.2, abs=0.05)

    def test_a_megabyte_per_token(self):
        """B13, llm-numbers#25: near the truth for a 13B with MHA, eight times too much for Llama-3-8B."""
        assert sizing.kv_bytes_per_token(spec(40, 40, 128)) == 819200
        assert 1e6 / sizing.kv_bytes_per_token(LLAMA_8B) == pytest.approx(8, abs=0.4)

    @pytest.mark.parametrize(("name", "derived", "expected"), [("qwen3-0.6b", 64, 114688), ("qwen3-4b", 80, 147456)])
    def test_head_dim_is_read(self, name, derived, expected):
        """B17: hidden_size / heads is not the head_dim of Qwen3."""
        model = find_model(name)
        assert (model.hidden_size // model.num_heads, model.head_dim) == (derived, 128)
        assert sizing.kv_bytes_per_token(model) == expected

    def test_a_prompt_on_eight_gpus(self):
        """B18, KVDirect#2: 640 MiB per GPU; the 2,048 blocks of 4 KB beside it are 8 MiB."""
        assert sizing.kv_bytes_per_request(LLAMA_70B, 16384, tp=8) / 2**20 == 640
        assert 2048 * 4096 / 2**20 == 8

    def test_windowed_layers_stop_growing(self):
        """B22, vllm#54704: 7 full and 35 windowed layers on four GPUs; only the full ones grow beyond the window."""
        model = spec(
            42, 4, 256, 32, sliding_window=512, layer_types=["full_attention"] * 7 + ["sliding_attention"] * 35
        )
        assert sizing.kv_bytes_per_token_and_layer(model, tp=4) == 1024
        assert sizing.kv_bytes_per_token(model, tp=4, beyond_window=True) == 7168
        assert sizing.kv_bytes_per_token(model, "fp8", tp=4, beyond_window=True) == 3584
        longer, shorter = (sizing.kv_bytes_per_request(model, n, tp=4) for n in (10000, 9000))
        assert longer - shorter == 1000 * 7168

    @pytest.mark.parametrize(
        ("max_model_len", "batched", "gain"),
        [
            (8192, 16384, 0.059), (131072, 16384, 0.086), (131072, 8192, 0.120), (131072, 2048, 0.281),
            (524288, 16384, 0.180), (1048576, 16384, 0.279), (1048576, 8192, 0.419), (1048576, 2048, 0.731),
        ],
    )  # fmt: skip
    def test_what_fp8_gains_beside_states(self, max_model_len, batched, gain):
        """B22, vllm#54705 (its table): six groups of convolutions, kept as windows of 4 tokens in blocks of 4 and in 16
        bits, set the size of a block; so fp8 puts 64 tokens of attention into it instead of 32."""
        one_block = Quantity(7 * 32 * 2**10, "B", "bytes of a block")
        convolutions = KVLayout({"sliding_attention": 4}, one_block, {"sliding_attention": 6}, sliding_window=4)

        def blocks(block_size):
            attention = {"full_attention": 1, "sliding_attention": 5}
            layers = KVLayout(dict.fromkeys(attention, block_size), one_block, attention, sliding_window=512)
            return sum(part.blocks_per_request(max_model_len, 2 * batched) for part in (layers, convolutions))

        assert blocks(32) / blocks(64) - 1 == pytest.approx(gain, abs=0.0005)


class TestPublishedSpeeds:
    @pytest.mark.parametrize(
        ("tflop_s", "tb_s", "expected"),
        [
            (989.5, 3.35, 295), (756, 2.0, 378), (989, 4.8, 206), (312, 2.0, 156), (312, 1.94, 161), (362, 0.86, 421),
            (2250, 8.0, 281), (1300, 5.3, 245), (1300, 6.0, 217),  # C01, ml-engineering
            (165, 1.008, 163), (312, 1.555, 200), (65, 0.32, 203), (125, 0.6, 208), (70, 0.6, 116),  # C02
            (1979, 3.35, 591),  # C03: the sparse figure doubles it
        ],
    )  # fmt: skip
    def test_ridge(self, tflop_s, tb_s, expected):
        assert roofline.ridge_point(tflop_s * 1e12, tb_s * 1e12) == pytest.approx(expected, abs=1)

    @pytest.mark.parametrize(
        ("measured", "dense", "expected"),
        [(271.2, 312, 0.869), (794.5, 989, 0.803), (1745.0, 2250, 0.776), (668.4, 1300, 0.514)],
    )
    def test_efficiency(self, measured, dense, expected):
        """C04: what the fastest matrix products reach of the data sheet."""
        assert measured / dense == pytest.approx(expected, abs=1e-3)
        slower = roofline.prefill_seconds(7e9, 1000, dense * 1e12, efficiency=expected)
        assert roofline.prefill_seconds(7e9, 1000, measured * 1e12) == pytest.approx(slower, rel=1e-3)

    def test_critical_batch(self):
        """C06, scaling-book: int8 weights halve it, int8 products restore it."""
        bf16 = roofline.critical_batch(197e12, 820e9)
        int8_weights = roofline.critical_batch(197e12, 820e9, bytes_per_weight=1)
        int8 = roofline.critical_batch(394e12, 820e9, bytes_per_weight=1)
        assert [bf16, int8_weights, int8] == pytest.approx([240, 120, 240], abs=3)

    @pytest.mark.parametrize(("batch", "expected_ms"), [(4, 2.57), (256, 21.05)])
    def test_step_on_16_chips(self, batch, expected_ms):
        """C07, scaling-book's pop quiz."""
        step = roofline.decode_step_seconds(
            batch, 30e9, 8192 * 100e3, 16 * 810e9, flops_per_token=60e9, flop_s=16 * 197e12
        )
        assert 1e3 * step == pytest.approx(expected_ms, abs=0.01)

    def test_throughput_saturates(self):
        """C08, scaling-book: near bandwidth / KV per sequence."""
        batches = [1, 8, 16, 32, 64, 240]
        steps = [roofline.decode_step_seconds(batch, 26e9, 6.71e9, 8 * 820e9) for batch in batches]
        assert [1e3 * s for s in steps] == pytest.approx([4.98, 12.13, 20.3, 36.65, 69.33, 249.09], rel=2e-3)
        found = [batch / s for batch, s in zip(batches, steps, strict=True)]
        assert found == pytest.approx([200.61, 659.3, 787.99, 873.21, 923.13, 963.53], rel=2e-3)
        assert found[-1] < 8 * 820e9 / 6.71e9

    def test_70b_on_eight_chips(self):
        """C10, scaling-book: it rounds to 17 ms first."""
        kv = 8192 * 160e3
        step = roofline.decode_step_seconds(32, 70e9, kv, 8 * 810e9)
        assert (70e9 + 32 * kv) / GB == pytest.approx(112, abs=0.1)
        assert 1e3 * step == pytest.approx(17.3, abs=0.05)
        assert 32 / step == pytest.approx(1851, rel=2e-3)
        assert 32 / step / 8 == pytest.approx(231, rel=5e-3)

    @pytest.mark.parametrize(("gb", "tb_s", "ms"), [(16, 0.82, 19.5), (80, 3.35, 23.9), (141, 4.8, 29.4)])
    def test_reading_the_whole_memory(self, gb, tb_s, ms):
        """C12."""
        assert 1e3 * roofline.memory_read_seconds(gb * GB, tb_s * 1e12) == pytest.approx(ms, abs=0.05)

    def test_prefill(self):
        """C13, C14."""
        prefill = roofline.prefill_seconds(70e9, 8192, 16 * 197e12, efficiency=0.4)
        assert prefill == pytest.approx(0.91, abs=0.005)
        assert roofline.prefill_servers_per_decode_server(0.91, 0.019, 32, 512) == pytest.approx(3.0, abs=0.01)

    def test_forward_pass_of_a_52b(self):
        """C16, kipply: 24 L d^2 operations per token, on an A100 rounded to 1.5 TB/s."""
        assert roofline.ridge_point(312e12, 1.5e12) == 208
        one = roofline.decode_step_seconds(1, 2 * 12 * 64 * 8192**2, 0, 1.5e12)
        assert 1e3 * one == pytest.approx(68.7, abs=0.05)
        assert 1e3 * one / 4 == pytest.approx(17.2, abs=0.05)
        assert pytest.approx(1 / 6) == 4 / 24  # K and V: 4 L d^2 of 24 L d^2

    def test_attention(self):
        """C18: 62 is unfused prefill attention. C24: decode attention has 1, times the group, for any batch."""
        assert roofline.unfused_prefill_attention_intensity(4096, 128) == pytest.approx(62, abs=0.5)
        assert roofline.decode_attention_intensity(32, 32) == 1
        assert roofline.decode_attention_intensity(32, 8) == 4
        parts = [roofline.decode_step(LLAMA_8B, batch, 4096).parts["attention"] for batch in (1, 64)]
        assert [part.intensity for part in parts] == pytest.approx([4, 4], rel=1e-3)
        latent = roofline.decode_step(find_model("deepseek-v3"), 1, 4096).parts["attention"]
        assert latent.intensity == pytest.approx(128 * (576 + 512) / 576, rel=1e-3)

    def test_forgotten_kv_reads(self):
        """C23: one read of the weights does not serve the batch; every sequence's KV is read as well."""
        kv = 4096 * 131072
        naive = roofline.decode_step_seconds(108, 16e9, 0, 3.35e12)
        step = roofline.decode_step_seconds(108, 16e9, kv, 3.35e12)
        assert 108 / naive == pytest.approx(22500, rel=0.01)
        assert 1e3 * step == pytest.approx(22.1, abs=0.05)
        assert 108 / step == pytest.approx(4890, rel=2e-3)


class TestTheDocumentsNumbers:
    """The figures that this book starts from (claims about Qwen2.5, LMCache, a laptop GPU)."""

    @pytest.mark.parametrize(
        ("name", "kib", "gib"), [("qwen2.5-1.5b", 28, 0.875), ("qwen2.5-7b", 56, 1.75), ("qwen2.5-72b", 320, 10)]
    )
    def test_qwen(self, name, kib, gib):
        assert sizing.kv_bytes_per_token(find_model(name)) == kib * 1024
        assert sizing.kv_bytes_per_request(find_model(name), 32768) == gib * GIB

    def test_7b_as_mha(self):
        assert sizing.kv_bytes_per_token(spec(28, 28, 128)) == 392 * 1024
        assert sizing.kv_bytes_per_request(spec(28, 28, 128), 32768) == 12.25 * GIB

    def test_lmcache_line(self):
        assert 4864 * sizing.kv_bytes_per_token(find_model("qwen2.5-1.5b")) / GIB == pytest.approx(0.12988, abs=5e-6)

    def test_1344_blocks(self):
        assert sizing.num_kv_blocks(21520, 1) == 1345  # one of them is the null block
        assert sizing.max_concurrency(57000, 16384) == pytest.approx(3.48, abs=0.005)
        assert pytest.approx(50.9e3, rel=1e-3) == 2.9 * GB / 57000

    def test_ridge_and_bandwidth(self):
        assert math.floor(roofline.ridge_point(989.5e12, 3.35e12)) == 295
        used = roofline.bandwidth_used(39, 16.2 * GB)
        assert used / GB == pytest.approx(632, abs=0.5)
        assert used / (896 * GB) == pytest.approx(0.705, abs=5e-4)

    def test_three_answers(self):
        """Document 001, worked example 7-2: 19, 20 or 21 requests, by the units."""
        per_token = sizing.kv_bytes_per_token(spec(32, 40, 128))
        assert per_token == 655360
        need = 4096 * per_token
        assert sizing.requests_that_fit(53.6 * GB, need) == 19
        assert sizing.requests_that_fit(53.6 * GIB, need) == 21
        assert pytest.approx(20.9, abs=0.05) == 53.6 / 2.56

    def test_exercises_7_1_and_7_2(self):
        need = sizing.kv_bytes_per_request(spec(32, 32, 128), 1024)
        assert 1000 * need == 500 * GIB == pytest.approx(536.9 * GB, rel=1e-4)
        budget = sizing.kv_budget(80 * GB, 0.9, 30 * GB)
        assert budget == pytest.approx(42 * GB)
        assert sizing.requests_that_fit(budget, 2048 * 0.5e6) == 41
        assert sizing.requests_that_fit(budget, 2048 * 2**19) == 39
        assert sizing.requests_that_fit(42 * GIB, 2048 * 2**19) == 42

    def test_70b_with_query_heads(self):
        """Document 003: 2.6 MB per token counts 64 query heads; there are 8 KV heads."""
        assert sizing.kv_bytes_per_token(spec(80, 64, 128)) / 1e6 == pytest.approx(2.6, abs=0.03)
        assert sizing.kv_bytes_per_token(LLAMA_70B) == 320 * 1024
        assert 16 * sizing.kv_bytes_per_request(LLAMA_70B, 4096) / GB == pytest.approx(21.5, abs=0.05)
        assert 16 * sizing.kv_bytes_per_request(LLAMA_70B, 8192) == 40 * GIB
