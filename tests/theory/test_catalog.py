"""Every row has a source, adds up, and is found by the names that people type."""

import json
import os
from pathlib import Path

import pytest
import torch

from minivllm.theory import ModelSpec, catalog, find_device, find_model, list_devices, list_models, roofline
from minivllm.theory.sizing import kv_bytes_per_token

MODELS, DEVICES = list_models(), list_devices()


def test_how_many():
    assert len(MODELS) >= 40 and len(DEVICES) >= 18
    assert len({model.name for model in MODELS}) == len(MODELS)
    assert len({device.name for device in DEVICES}) == len(DEVICES)
    for names in ([model.name for model in MODELS], [n for d in DEVICES for n in (d.name, *d.aliases)]):
        assert len({catalog.plain_name(name) for name in names}) == len(names)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
class TestModel:
    def test_parameters_counted_are_parameters_published(self, model):
        """Within 1 %: 0.23 % at most, for a total that its paper rounds; the others agree to the last one or nearly."""
        assert model.is_known
        assert model.parameters == pytest.approx(model.published_parameters, rel=0.003)

    def test_active_parameters(self, model):
        if model.experts is None:
            assert model.active_parameters == model.parameters and model.published_active_parameters is None
        else:  # published figures are rounded, and some leave the embedding out
            without = model.active_parameters - model.embedding_parameters
            published = model.published_active_parameters
            assert min(abs(n / published - 1) for n in (model.active_parameters, without)) < 0.03

    def test_sources(self, model):
        assert all(source.startswith("https://") for source in catalog.model_source(model.name))

    def test_it_is_found(self, model):
        assert find_model(model.name.upper()) == model


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
class TestDevice:
    def test_units(self, device):
        """A figure in the wrong unit, or with sparsity, would fall out of these."""
        assert 50 < device.memory_bandwidth_gb_s < 20_000
        assert all(0.5 < rate < 40_000 for rate in device.dense_tflop_s.values())
        if device.memory_reported_gib is not None:
            assert 0.88 < device.memory_reported_gib / device.memory_label_gb < 1.02
        if device.dense_tflop_s:
            assert 10 < roofline.ridge_point(device.flop_s(), device.bandwidth) < 600

    def test_rates_grow_with_fewer_bits(self, device):
        rates = device.dense_tflop_s
        if {"float16", "bfloat16"} <= rates.keys():
            assert rates["float16"] == rates["bfloat16"]
        for wider, narrower in (("float32", "float16"), ("bfloat16", "fp8"), ("fp8", "fp4"), ("float16", "int8")):
            if wider in rates and narrower in rates:
                assert rates[wider] <= rates[narrower]

    def test_sources(self, device):
        assert device.source.startswith("https://")
        assert bool(device.reported_source) == (device.memory_reported_gib is not None)

    def test_it_is_found(self, device):
        assert all(find_device(name.upper()) == device for name in (device.name, *device.aliases))


@pytest.mark.parametrize(
    ("name", "closest"),
    [("qwen2.5-7", "qwen2.5-7b"), ("llama-3-9b", "llama-3-8b"), ("gpt", "gpt2"), ("opt-14b", "opt-13b")],
)
def test_closest_models(name, closest):
    with pytest.raises(ValueError, match=f"unknown model '{name}'; closest: .*{closest}"):
        find_model(name)


def test_hub_ids_and_other_spellings():
    assert find_model("llama3-8b") == find_model("llama-3-8b")
    assert find_model("GPT-2") == find_model("gpt2")
    assert find_model("Qwen/Qwen2.5-7B") == find_model("QWEN2.5_7b ") == find_model("qwen2.5-7b")


def test_unknown_names():
    with pytest.raises(ValueError, match=r"unknown device 'h900-sxm'; closest: .*h100-sxm"):
        find_device("h900-sxm")
    with pytest.raises(ValueError, match="unknown model ''; known names: python -m minivllm catalog"):
        find_model("")
    with pytest.raises(ValueError, match="unknown device 'zzzz'; known names: "):
        find_device("zzzz")


def test_rates():
    assert find_device("v100-32gb").flop_s("bfloat16") == find_device("v100-32gb").flop_s("float16")
    with pytest.raises(ValueError, match=r"NVIDIA A100.* has no rate for 'fp8'; known: "):
        find_device("a100-80gb-sxm").flop_s("fp8")


@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma-4-26b-a4b"])
def test_gemma_4_counted_by_transformers(name):
    """An independent count; ours leaves out the router's scales of the mixture."""
    transformers = pytest.importorskip("transformers")
    row = next(row for row in catalog._rows("models.json") if row["name"] == name)
    own_default = {"hidden_size_per_layer_input": 0}  # a table per layer, which only the small models have
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**row["config"], **own_default))
    found = sum(parameter.numel() for parameter in model.parameters())
    spec = find_model(name)
    scales = 0 if spec.experts is None else spec.num_layers * (spec.hidden_size + spec.experts.num_experts)
    assert spec.parameters + scales == found


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


class TestFromConfig:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hidden_size": None}, "the config has no hidden_size or n_embd or d_model"),
            ({"num_hidden_layers": "two"}, "'num_hidden_layers' is 'two'; expected a whole number from 0 to 1,000"),
            ({"num_attention_heads": 0}, "num_attention_heads is 0"),
            ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple of num_key_value_heads \(3\)"),
            ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers 2"),
            ({"layer_types": ["full_attention", "mamba"]}, "layer_types has 'mamba'; known: full_attention"),
            ({"layer_types": "full_attention"}, "'layer_types' is 'full_attention'; expected a list of names"),
            ({"layer_types": ["sliding_attention"] * 2}, "the config names no sliding_window"),
            ({"layer_types": ["linear_attention"] * 2}, r"the config names no linear_\* sizes"),
            ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5, expected 1 to 4"),
            ({"hidden_size": -64}, "'hidden_size' is -64; expected a whole number"),
            *(
                ({key: value}, f"the config has {key}: .*, which this calculator does not model")
                for key, value in (
                    ("hidden_size_per_layer_input", 256),
                    ("hybrid_override_pattern", "M-M*"),
                    ("attn_type_list", [0, 1]),
                    ("linear_attn_config", {"full_attn_layers": [1]}),
                    ("block_configs", [{}]),
                    ("index_topk", 2048),
                    ("attention_chunk_size", 8192),
                    ("num_kv_shared_layers", 15),
                    ("swa_num_key_value_heads", 8),
                )
            ),
        ],
    )
    def test_refused(self, change, message):
        with pytest.raises(ValueError, match=message):
            ModelSpec.from_hf(CONFIG | change)

    def test_defaults(self):
        spec = ModelSpec.from_hf(CONFIG)
        assert (spec.num_kv_heads, spec.head_dim, spec.dtype) == (4, 16, "bfloat16")

    def test_an_unknown_type_is_counted_like_llama(self):
        spec = ModelSpec.from_hf(CONFIG | {"model_type": "brand-new"})
        assert not spec.is_known
        assert spec.parameters == ModelSpec.from_hf(CONFIG).parameters

    def test_the_decoder_of_a_vision_model(self):
        spec = ModelSpec.from_hf({"model_type": "llava", "torch_dtype": "float16", "text_config": CONFIG})
        assert (spec.num_layers, spec.dtype) == (2, "float16")

    def test_what_the_outer_config_says(self):
        """A multimodal checkpoint says outside how its decoder is stored."""
        outer = {"model_type": "mistral3", "dtype": "float16", "quantization_config": {"quant_method": "fp8"}}
        spec = ModelSpec.from_hf(outer | {"text_config": CONFIG})
        assert (spec.dtype, spec.quantization) == ("float16", "fp8")
        nulls = {"torch_dtype": None, "dtype": None, "quantization_config": None}
        inner = {key: value for key, value in CONFIG.items() if key != "torch_dtype"} | nulls
        assert ModelSpec.from_hf(outer | {"text_config": inner}) == spec

    @pytest.mark.parametrize(
        ("keys", "num_kv_heads"),
        [
            ({"multi_query": True}, 1),  # Falcon-7B as it was first published
            ({"multi_query": False}, 4),
            ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
            ({"multi_query_attention": True, "multi_query_group_num": 2}, 2),  # ChatGLM
            ({"num_attention_groups": 1}, 1),  # Step-3
        ],
    )
    def test_other_names_of_kv_heads(self, keys, num_kv_heads):
        assert ModelSpec.from_hf(CONFIG | {"model_type": "other"} | keys).num_kv_heads == num_kv_heads

    @pytest.mark.parametrize(
        ("scaling", "tokens"),
        [
            ({"type": "linear", "factor": 4.0}, 16384),
            ({"rope_type": "dynamic", "factor": 2.0}, 8192),
            # With these vLLM 0.30.0 takes max_position_embeddings as the length that scaling reaches.
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 4096),
            ({"rope_type": "llama3", "factor": 8.0}, 4096),
            ({"rope_type": "linear", "factor": None}, 4096),
            (None, 4096),
        ],
    )
    def test_scaled_positions(self, scaling, tokens):
        config = CONFIG | {"max_position_embeddings": 4096, "rope_scaling": scaling}
        assert ModelSpec.from_hf(config).max_position_embeddings == tokens

    @pytest.mark.parametrize(
        ("quantization", "kv_bytes"),
        [
            ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1),
            ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, 1),
            ({"quant_method": "modelopt", "kv_cache_quant_algo": None}, 2),
            ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, 2),
        ],
    )
    def test_checkpoints_with_scales_for_their_cache(self, quantization, kv_bytes):
        spec = ModelSpec.from_hf(CONFIG | {"quantization_config": quantization})
        assert kv_bytes_per_token(spec) == 2 * 2 * 4 * 16 * kv_bytes
        assert kv_bytes_per_token(spec, "bfloat16") == 2 * 2 * 4 * 16 * 2

    def test_what_is_no_config(self):
        with pytest.raises(ValueError, match="a config is a mapping"):
            ModelSpec.from_hf(None)

    def test_null_is_absent(self):
        spec = ModelSpec.from_hf(
            CONFIG | {"linear_num_value_heads": None, "sliding_window": 8, "use_sliding_window": None}
        )
        assert spec.describe_layers() == "2 full"

    def test_defaults_of_transformers(self):
        """gemma-3-4b-it's config.json names no heads."""
        sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
        spec = ModelSpec.from_hf({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **sizes}})
        known = find_model("gemma-3-4b")
        assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (
            known.num_heads,
            known.num_kv_heads,
            known.head_dim,
        )
        assert spec.parameters == known.parameters

    @pytest.mark.parametrize(
        ("change", "layers"),
        [
            ({"model_type": "mistral"}, "2 sliding (4,096)"),
            ({"model_type": "mistral", "sliding_window": None}, "2 full"),
            ({"model_type": "qwen2", "sliding_window": 8}, "2 full"),
            ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, "2 full"),  # the first 28 are
            (
                {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
                "1 full, 1 sliding (8)",
            ),
        ],
    )
    def test_windows_by_default(self, change, layers):
        """As transformers has it where a config says nothing."""
        assert ModelSpec.from_hf(CONFIG | change).describe_layers() == layers

    def test_qwen3_has_a_head_dim_of_its_own(self):
        assert ModelSpec.from_hf(CONFIG | {"model_type": "qwen3"}).head_dim == 128

    def test_window_switched_off(self):
        config = CONFIG | {"sliding_window": 8, "use_sliding_window": False}
        assert ModelSpec.from_hf(config).describe_layers() == "2 full"
        assert ModelSpec.from_hf(CONFIG | {"sliding_window": 8}).describe_layers() == "2 sliding (8)"

    def test_files(self, tmp_path):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(CONFIG))
        assert ModelSpec.from_file(path) == ModelSpec.from_file(str(tmp_path))
        path.write_text("{")
        with pytest.raises(ValueError, match="is not JSON"):
            ModelSpec.from_file(path)
        path.write_text("[1]")
        with pytest.raises(ValueError, match="holds a list, expected an object"):
            ModelSpec.from_file(path)
        with pytest.raises(ValueError, match="cannot be read: No such file"):
            ModelSpec.from_file(tmp_path / "gone.json")

    def test_what_never_ends_is_not_read(self, tmp_path):
        """A device, a pipe that nobody writes to, a file of gigabytes: refused at once, with one line."""
        pipe, huge = tmp_path / "pipe", tmp_path / "huge.json"
        os.mkfifo(pipe)
        with huge.open("wb") as file:
            file.truncate(50 * 10**9)  # of which the disk holds nothing
        for path, message in (
            ("/dev/zero", "/dev/zero is not a regular file"),
            (pipe, "pipe is not a regular file"),
            (huge, "huge.json is larger than 10 MB, the most that is read of such a file. Correct it, or get it again"),
        ):
            with pytest.raises(ValueError, match=f"{message}$"):
                ModelSpec.from_file(path)
        (tmp_path / "text.json").write_bytes(b"\xff")
        with pytest.raises(ValueError, match="cannot be read as UTF-8 text"):
            ModelSpec.from_file(tmp_path / "text.json")

    def test_tiny(self):
        """The embedded model's own config, against its checkpoint."""
        folder = Path(__file__).parents[2] / "data" / "tiny"
        assert ModelSpec.from_file(folder).parameters == 1_061_120
