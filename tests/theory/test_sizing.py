"""Sizes: linear where they should be, monotone, never more than the memory, and exact on known models."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.theory import GB, GIB, ModelSpec, find_model, list_models, sizing
from minivllm.theory.sizing import KV_DTYPES, WEIGHT_BITS

MODELS = list_models()
models = st.sampled_from(MODELS)
dtypes = st.sampled_from(sorted(KV_DTYPES))
tokens = st.integers(1, 200_000)


class TestKVCache:
    @given(models, dtypes, tokens, tokens)
    def test_requests_grow_with_their_tokens(self, model, dtype, a, b):
        need = [sizing.kv_bytes_per_request(model, n, dtype) for n in sorted((a, b))]
        assert need[0] <= need[1]

    @given(models, dtypes, tokens)
    def test_linear_without_windows(self, model, dtype, n):
        need = sizing.kv_bytes_per_request(model, n, dtype)
        state = model.layer_types.count("linear_attention") * sizing.state_bytes_per_layer(model)
        if "sliding_attention" not in model.layer_types:
            assert need == n * sizing.kv_bytes_per_token(model, dtype) + state
        else:
            assert need <= n * sizing.kv_bytes_per_token(model, dtype) + state

    @given(models, tokens, st.data())
    def test_tp_loses_no_token(self, model, n, data):
        """All ranks together hold at least what one GPU would."""
        tp = data.draw(st.sampled_from(list(sizing.possible_tp(model))))
        alone, shared = sizing.kv_bytes_per_token(model), sizing.kv_bytes_per_token(model, tp=tp)
        assert alone / tp <= shared <= alone
        if model.latent is not None:
            assert shared == alone
        elif tp <= min(heads for heads, _ in map(model.heads_of, set(model.layer_types))):
            assert shared * tp == alone
        elif not model.has_two_shapes:
            assert shared * model.num_kv_heads == alone  # one head each, replicated

    @given(models, st.integers(1, 8))
    def test_pp_shares_the_layers(self, model, pp):
        alone, shared = sizing.kv_bytes_per_token(model), sizing.kv_bytes_per_token(model, pp=pp)
        assert alone / pp <= shared <= alone

    @given(models, st.floats(1, 1e12), st.sampled_from([1, 16, 256]))
    def test_blocks_never_exceed_the_budget(self, model, budget, block_size):
        per_token = sizing.kv_bytes_per_token(model)
        blocks = sizing.num_kv_blocks(budget, per_token, block_size)
        assert blocks * block_size * per_token <= budget < (blocks + 1) * block_size * per_token

    def test_pipeline_stages(self):
        """As vLLM shares them out; the stage with most cache counts, and not the first one."""
        sizes = {
            pp: [len(stage) for stage in sizing.pipeline_stages(find_model("gemma-3-27b"), pp)] for pp in (3, 4, 8)
        }
        assert sizes == {3: [21, 21, 20], 4: [15, 16, 16, 15], 8: [7, 8, 8, 8, 8, 8, 8, 7]}
        gemma = find_model("gemma-3-27b")
        one = sizing.kv_bytes_per_token_and_layer(gemma)
        needs = [
            (stage.count("full_attention") * 131072 + stage.count("sliding_attention") * 1024) * one
            for stage in sizing.pipeline_stages(gemma, 8)
        ]
        assert sizing.kv_bytes_per_request(gemma, 131072, pp=8) == max(needs) > needs[0]

    def test_scales(self):
        """Bytes of a head's key: 128 elements."""
        found = {name: dtype.bytes_per_vector(128) for name, dtype in KV_DTYPES.items()}
        assert found == {
            "float32": 512, "float16": 256, "bfloat16": 256, "fp8": 128, "int8": 132, "int4": 80, "q8_0": 136,
            "q4_0": 72,
        }  # fmt: skip

    def test_windows(self):
        """Gemma-3: 5 of 6 layers stop at 1,024 tokens."""
        gemma = find_model("gemma-3-27b")
        assert (gemma.layer_types.count("full_attention"), gemma.layer_types.count("sliding_attention")) == (10, 52)
        one = sizing.kv_bytes_per_token_and_layer(gemma)
        assert sizing.kv_bytes_per_request(gemma, 32768) == (10 * 32768 + 52 * 1024) * one

    def test_layers_of_two_shapes(self):
        """Gemma-4-31B: 10 full layers of 4 heads of 512, 50 windowed ones of 16 heads of 256."""
        gemma = find_model("gemma-4-31b")
        full, windowed = 2 * 4 * 512 * 2, 2 * 16 * 256 * 2
        assert sizing.kv_bytes_per_token(gemma) == 10 * full + 50 * windowed == 901_120
        assert sizing.kv_bytes_per_token(gemma, beyond_window=True) == 10 * full
        assert sizing.kv_bytes_per_token(gemma, tp=8) == 10 * full / 4 + 50 * windowed / 8
        assert sizing.kv_bytes_per_request(gemma, 10_000) == 10 * full * 10_000 + 50 * windowed * 1024
        first, second = sizing.pipeline_stages(gemma, 2)
        assert first.count("full_attention") == second.count("full_attention") == 5
        assert sizing.kv_bytes_per_token(gemma, pp=2) == 5 * full + 25 * windowed
        with pytest.raises(ValueError, match="layers of two shapes: say which, full_attention or sliding_attention"):
            sizing.kv_bytes_per_token_and_layer(gemma)

    def test_linear_attention_is_a_fixed_part(self):
        """Qwen3-Next: 3 of 4 layers keep a matrix per head instead of tokens."""
        model = ModelSpec.from_hf(QWEN3_NEXT)
        assert model.describe_layers() == "12 full, 36 linear"
        conv = 2 * 3 * (2 * 16 * 128 + 32 * 128)
        state = 36 * (2 * 32 * 128 * 128 + conv)
        assert sizing.kv_bytes_per_request(model, 1000) == state + 1000 * sizing.kv_bytes_per_token(model)
        assert sizing.kv_bytes_per_token(model) == 2 * 12 * 2 * 256 * 2
        wider = ModelSpec.from_hf(QWEN3_NEXT | {"mamba_ssm_dtype": "float32"})
        assert sizing.state_bytes_per_layer(wider) == 4 * 32 * 128 * 128 + conv
        with pytest.raises(ValueError, match="mamba_ssm_dtype 'int9' is unknown; known: float32"):
            ModelSpec.from_hf(QWEN3_NEXT | {"mamba_ssm_dtype": "int9"})


QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}


class TestWeights:
    @given(models, st.sampled_from(sorted(WEIGHT_BITS)), st.data())
    def test_shares_add_up(self, model, dtype, data):
        tp = data.draw(st.sampled_from(list(sizing.possible_tp(model))))
        assert tp * sizing.weight_bytes(model, dtype, tp) == pytest.approx(sizing.weight_bytes(model, dtype))

    @given(models)
    def test_fewer_bits_are_smaller(self, model):
        by_bits = sorted(WEIGHT_BITS.keys() - set(sizing.EXPERTS_ONLY), key=WEIGHT_BITS.get)
        sizes = [sizing.weight_bytes(model, dtype) for dtype in by_bits]
        assert sizes == sorted(sizes)

    def test_known_sizes(self):
        assert sizing.weight_bytes(find_model("qwen2.5-7b")) / GB == pytest.approx(15.23, abs=0.005)
        assert sizing.weight_bytes(find_model("llama-3.1-8b")) / GIB == pytest.approx(14.96, abs=0.005)
        four_bits = sizing.weight_bytes(find_model("qwen2.5-7b"), "int4")
        assert four_bits / GB == pytest.approx(5.57, abs=0.05)  # the GPTQ-Int4 checkpoint on the hub

    def test_quantised_checkpoints_say_so(self):
        """gpt-oss-120b comes in MXFP4 (65.2 GB of files), DeepSeek-V3 in fp8 (688 GB with its extra layer)."""
        assert sizing.weight_bytes(find_model("gpt-oss-120b")) / GB == pytest.approx(65.25, rel=0.002)
        assert sizing.weight_bytes(find_model("deepseek-v3")) / GB == pytest.approx(673, rel=0.01)
        config = QWEN3_NEXT | {"quantization_config": {"quant_method": "awq", "bits": 4}}
        assert ModelSpec.from_hf(config).quantization == "int4"
        strange = ModelSpec.from_hf(QWEN3_NEXT | {"quantization_config": {"quant_method": "new"}})
        with pytest.raises(ValueError, match=r"not known here \(new\): give the --weight-dtype that comes closest"):
            sizing.weight_bytes(strange)
        assert sizing.weight_bytes(strange, "fp8") < sizing.weight_bytes(strange, "bfloat16")

    def test_files(self, tmp_path):
        """Of several files only those that are the model's, and only if they are all there."""
        first, second = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
        first.write_bytes(bytes(1000000))
        (tmp_path / "consolidated.safetensors").write_bytes(
            bytes(1500000)
        )  # the same once more, as in Mistral's folders
        assert sizing.checkpoint_bytes(tmp_path) is None
        second.write_bytes(bytes(500000))
        assert sizing.checkpoint_bytes(tmp_path) == sizing.checkpoint_bytes(tmp_path / "config.json") == 1_500_000
        index = {"weight_map": {"a": first.name, "b": second.name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        (tmp_path / "model-00003-of-00003.safetensors").write_bytes(bytes(70000))
        assert sizing.checkpoint_bytes(tmp_path) == 1_500_000
        second.unlink()
        second.symlink_to(tmp_path / "gone")
        assert sizing.checkpoint_bytes(tmp_path) is None

    @pytest.mark.parametrize(
        ("files", "size"),
        [
            ({}, None),
            ({"model.safetensors": bytes(90000), "training_args.bin": bytes(50000)}, 90_000),
            ({"pytorch_model.bin": bytes(90000), "optimizer.bin": bytes(50000)}, 90_000),
            ({"adapter_model.safetensors": bytes(90000)}, None),
            ({"a.gguf": bytes(90000)}, 90_000),
            ({"a-q4.gguf": bytes(90000), "a-q8.gguf": bytes(170000)}, None),
            ({"model.safetensors": b"version https://git-lfs.github.com/spec/v1 ..."}, None),
            ({"model.safetensors": bytes(100)}, None),  # what is left of a file
            (
                {"model-00001-of-00002.safetensors": bytes(50000), "model-00003-of-00003.safetensors": bytes(50000)},
                None,
            ),
            ({"a-00001-of-00003.gguf": bytes(90000)}, None),
            ({"mmproj-a.gguf": bytes(90000)}, None),
            ({"model.safetensors.index.json": b'{"weight_map": {"a": 5}}'}, None),
            ({"model.safetensors.index.json": b'{"weight_map": {}}'}, None),
            ({"model.safetensors.index.json": b"[" * 100_000}, None),
            ({"model.safetensors.index.json": b"{", "model-00001-of-00001.safetensors": bytes(90000)}, None),
        ],
    )
    def test_which_files(self, tmp_path, files, size):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        assert sizing.checkpoint_bytes(tmp_path) == size


class TestBudget:
    @given(st.floats(1e9, 1e12), st.floats(0.01, 1), st.floats(0, 1e12), st.floats(0, 1e10), st.floats(0, 1e10))
    def test_nothing_is_counted_twice(self, memory, share, weights, activations, other):
        left = memory * share - weights - activations - other
        if left > 0:
            assert sizing.kv_budget(memory, share, weights, activations, other) == pytest.approx(left)
        else:
            with pytest.raises(ValueError, match="nothing is left for the KV cache"):
                sizing.kv_budget(memory, share, weights, activations, other)

    def test_two_gpus_give_more_than_twice_the_tokens(self):
        """The weights are shared out, so a larger part of each GPU is left."""
        model = find_model("qwen2.5-7b")
        alone, each = (
            sizing.num_kv_blocks(
                sizing.kv_budget(24 * GB, 0.92, sizing.weight_bytes(model, tp=tp)),
                sizing.kv_bytes_per_token(model, tp=tp),
            )
            for tp in (1, 2)
        )
        assert each > 2 * alone

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((0, 0.9, 1), "memory is 0 bytes, expected a positive number"),
            ((float("nan"), 0.9, 1), "memory is nan"),
            ((float("inf"), 0.9, 1), "memory is inf"),
            ((GB, 0, 1), "gpu_memory_utilization is 0, expected more than 0 and at most 1"),
            ((GB, 1.5, 1), "gpu_memory_utilization is 1.5"),
            ((GB, 0.9, -1), "must be 0 or more bytes"),
            ((16 * GB, 0.92, 15.2 * GB), r"0.92 of 14.90 GiB is 13.71 GiB, weights take 14.16.*Use more GPUs"),
        ],
    )
    def test_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            sizing.kv_budget(*arguments)


class TestRefusals:
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda m: sizing.kv_bytes_per_token(m, "int3"), "KV dtype 'int3' is unknown; known: auto, float32"),
            (lambda m: sizing.weight_bytes(m, "int3"), "weight dtype 'int3' is unknown"),
            (lambda m: sizing.kv_bytes_per_token(m, tp=3), "28 attention heads, which 3 GPUs cannot share evenly"),
            (lambda m: sizing.kv_bytes_per_token(m, tp=0), "tp must be a whole number of at least 1"),
            (lambda m: sizing.kv_bytes_per_token(m, pp=29), "28 layers, too few for pp = 29 stages"),
            (lambda m: sizing.kv_bytes_per_token(m, tp=14), "tp must divide them or be a multiple of them, and 14 is"),
            (lambda m: sizing.kv_bytes_per_request(m, -1), "num_tokens must be a whole number of at least 0"),
            (lambda m: sizing.kv_bytes_per_request(m, 1.5), "num_tokens must be a whole number"),
            (lambda m: sizing.max_concurrency(100, 0), "max_model_len must be a whole number"),
            (lambda m: sizing.requests_that_fit(100, 0), "a request takes 0 bytes"),
            (lambda m: sizing.num_kv_blocks(100, 1, 0), "block_size must be a whole number"),
            (lambda m: sizing.num_kv_blocks(-5, 10), "the budget is -5 bytes, expected 0 or more"),
            (lambda m: sizing.requests_that_fit(-1, 5), "the budget is -1 bytes, expected 0 or more"),
            (lambda m: sizing.kv_bytes_per_token(m, 2), "a dtype is given by name, such as 'bfloat16'; this is 2"),
            (lambda m: find_model(None), "a name is a text; this is None"),
        ],
    )
    def test_one_line_with_the_number(self, call, message):
        with pytest.raises(ValueError, match=message):
            call(find_model("qwen2.5-7b"))
