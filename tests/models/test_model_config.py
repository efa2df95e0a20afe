"""Reading config.json: both spellings, defaults as transformers has them, and what is refused by name."""

import subprocess
import sys

import pytest

from minivllm.model_config import GenerationConfig, ModelConfig, RopeConfig
from minivllm.models.layers import rope_frequencies

LLAMA = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
)
MISTRAL = LLAMA | dict(model_type="mistral")
QWEN2 = LLAMA | dict(model_type="qwen2")
QWEN3 = LLAMA | dict(model_type="qwen3")
GPT2 = dict(model_type="gpt2", vocab_size=1000, n_embd=64, n_layer=2, n_head=4, n_positions=512)


def read(base: dict, **changes) -> ModelConfig:
    return ModelConfig.from_hf(base | changes)


def test_imports_without_torch_and_numpy():
    code = "import sys; sys.modules.update(torch=None, numpy=None); import minivllm.model_config, minivllm.models"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_gpt2_as_published():
    """The config.json of the hub's gpt2, in what matters."""
    config = ModelConfig.from_hf(
        dict(
            model_type="gpt2",
            activation_function="gelu_new",
            architectures=["GPT2LMHeadModel"],
            bos_token_id=50256,
            eos_token_id=50256,
            layer_norm_epsilon=1e-05,
            n_ctx=1024,
            n_embd=768,
            n_head=12,
            n_layer=12,
            n_positions=1024,
            vocab_size=50257,
        )
    )
    assert config == ModelConfig(
        "gpt2", 50257, 768, 12, 12, 12, 64, 3072, 1024, "gelu_new", 1e-5, True,
        qkv_bias=True, o_proj_bias=True, mlp_bias=True, eos_token_ids=(50256,),
    )  # fmt: skip
    assert config.max_model_len == 1024 and config.rope is None


def test_qwen25_as_published():
    """The config.json of the hub's Qwen/Qwen2.5-0.5B: the window is named and switched off."""
    config = read(
        QWEN2,
        max_window_layers=24,
        sliding_window=32768,
        use_sliding_window=False,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        max_position_embeddings=32768,
    )
    assert (config.qkv_bias, config.o_proj_bias, config.mlp_bias, config.qk_norm) == (True, False, False, False)
    assert config.rope == RopeConfig(theta=1000000.0)
    assert config.sliding_window is None and config.max_model_len == 32768
    assert config.dtype == "bfloat16" and config.tie_word_embeddings


def test_defaults():
    config = read(LLAMA, num_key_value_heads=None)
    assert config.num_key_value_heads == 4
    assert config.head_dim == 16
    assert (config.norm_eps, config.hidden_act, config.tie_word_embeddings) == (1e-6, "silu", False)
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.dtype is None and config.eos_token_ids == ()
    assert read(GPT2, n_inner=None).intermediate_size == 256
    assert read(GPT2, n_inner=100, reorder_and_upcast_attn=True).intermediate_size == 100


def test_head_dim_is_never_guessed_when_given():
    assert read(LLAMA, head_dim=128).head_dim == 128
    assert read(QWEN3).head_dim == 128
    assert read(QWEN3, head_dim=80).head_dim == 80
    with pytest.raises(ValueError, match="hidden size 64 does not divide into 3 heads, and no head_dim is given"):
        read(LLAMA, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(ValueError, match="head_dim must be even; it is 7"):
        read(LLAMA, head_dim=7)


def test_biases_by_family():
    assert read(LLAMA, attention_bias=True, mlp_bias=True).o_proj_bias
    config = read(QWEN3, attention_bias=True)
    assert (config.qkv_bias, config.o_proj_bias, config.qk_norm) == (True, True, True)
    assert not read(MISTRAL, sliding_window=None, attention_bias=True).qkv_bias  # as in transformers


@pytest.mark.parametrize(
    "new, old",
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
        (
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 512},
            {
                "rope_theta": 5e5,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
            },
        ),
        (
            {"full_attention": {"rope_type": "default", "rope_theta": 5e5}},
            {"rope_theta": 5e5},
        ),
    ],
)
def test_both_spellings_of_rope(new, old):
    assert read(LLAMA, rope_parameters=new, dtype="float16") == read(LLAMA, **old, torch_dtype="float16")


def test_rope_details():
    llama3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    rope = read(LLAMA, rope_parameters=llama3 | {"original_max_position_embeddings": 512}).rope
    assert (rope.type, rope.factor, rope.original_max_position_embeddings) == ("llama3", 8.0, 512)
    assert read(LLAMA, rope_parameters=llama3).rope.original_max_position_embeddings == 2048
    # Beside the dict it wins over the one inside, and yarn may leave the factor to be derived, as in transformers.
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    assert read(LLAMA, rope_parameters=yarn, original_max_position_embeddings=512).rope.factor == 4.0


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "su", "mrope", "proportional"])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_other_rope_types_are_refused_by_name(rope_type, key):
    with pytest.raises(ValueError, match=f"rope type '{rope_type}' is not supported; supported: default, linear, "):
        read(LLAMA, **{key: {"type": rope_type, "factor": 2.0}})


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(rope_scaling={"type": "linear"}), "rope type 'linear' needs factor"),
        (dict(rope_parameters={"rope_type": "llama3"}), "'llama3' needs low_freq_factor, high_freq_factor, factor"),
        (dict(rope_scaling={"factor": 2.0}), "a factor but no rope_type"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported"),
        (dict(rope_parameters={"partial_rotary_factor": 0.25}), "partial_rotary_factor=0.25"),
        (dict(rope_scaling={"type": "default", "mrope_section": [1, 2]}), "mrope_section"),
        (
            dict(rope_parameters={"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}),
            r"differ by layer type \(full_attention, sliding_attention\)",
        ),
        (dict(rope_theta="big"), "rope theta 'big' is not a positive number"),
        (dict(rope_scaling="yarn"), "is not an object: 'yarn'"),
        (dict(rope_scaling={"type": "linear", "factor": "2"}), "rope factor '2' is not a positive number"),
        (dict(model_type="gemma2"), "model_type 'gemma2' .* is not supported; supported: gpt2, llama, mistral, qwen2"),
        (dict(model_type=None), "model_type None"),
        (dict(quantization_config={"quant_method": "awq"}), "quantised checkpoints .*'awq'"),
        (dict(dtype="float8_e4m3fn"), "dtype 'float8_e4m3fn' is unknown; known: float32, float16"),
        (dict(num_key_value_heads=3), r"num_attention_heads \(4\) is not a multiple of num_key_value_heads \(3\)"),
        (dict(hidden_size=None), "'hidden_size' is None; expected a whole number from 1 to 2,147,483,647"),
        (dict(vocab_size="many"), "'vocab_size' is 'many'; expected a whole number from 1 to"),
        (dict(layer_types=["linear_attention"] * 4), "layer_types linear_attention are not supported"),
        (dict(layer_types=["sliding_attention"] * 4), "the config names no sliding_window"),
        (dict(model_type=[]), r"model_type \[\] .* is not supported; supported: gpt2, llama"),
        (dict(quantization_config="x"), r"\(quantization_config, method 'x'\) are not supported; use the model's"),
        (dict(vocab_size=10**13), "'vocab_size' is 10000000000000; expected a whole number from 1 to 2,147,483,647"),
        (dict(num_hidden_layers=True), "'num_hidden_layers' is True; expected a whole number from 1 to 1,000"),
        (dict(num_hidden_layers=10**6), "'num_hidden_layers' is 1000000; expected a whole number from 1 to 1,000"),
        (dict(head_dim=-2), "'head_dim' is -2; expected a whole number"),
        (dict(num_key_value_heads="2"), "'num_key_value_heads' is '2'; expected a whole number"),
        (dict(sliding_window="x"), "'sliding_window' is 'x'; expected a whole number"),
        (dict(rms_norm_eps=None), "'rms_norm_eps' is None; expected a small number above 0"),
        (dict(rms_norm_eps="x"), "'rms_norm_eps' is 'x'; expected a small number above 0"),
        (dict(rms_norm_eps=-1e-6), "'rms_norm_eps' is -1e-06; expected a small number above 0"),
        (dict(rms_norm_eps=10**400), "'rms_norm_eps' is 10{99}.*; expected a small number above 0"),
        (dict(rms_norm_eps=float("nan")), "'rms_norm_eps' is nan; expected a small number above 0"),
        (dict(hidden_act=None), "'hidden_act' is None; expected a name"),
        (dict(tie_word_embeddings="false"), "'tie_word_embeddings' is 'false'; expected true or false"),
        (dict(layer_types=5), "'layer_types' is 5; expected a list of names"),
        (dict(layer_types=[["x"]]), r"'layer_types' is \[\['x'\]\]; expected a list of names"),
        (dict(original_max_position_embeddings="x", rope_parameters={"type": "yarn"}), "'original_max_.*' is 'x'"),
        (dict(rope_theta=True), "rope theta True is not a positive number"),
    ],
)
def test_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        read(LLAMA, **changes)


def test_missing_key():
    with pytest.raises(ValueError, match="'n_layer' is missing; expected a whole number from 1 to 1,000"):
        ModelConfig.from_hf({k: v for k, v in GPT2.items() if k != "n_layer"})


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(n_positions=10**13), "'n_positions' is 10000000000000; expected a whole number"),
        (dict(n_layer=True), "'n_layer' is True; expected a whole number"),
        (dict(n_inner="x"), "'n_inner' is 'x'; expected a whole number"),
        (dict(n_inner=-5), "'n_inner' is -5; expected a whole number"),
        (dict(activation_function=[]), r"'activation_function' is \[\]; expected a name"),
        (dict(layer_norm_epsilon=None), "'layer_norm_epsilon' is None; expected a small number above 0"),
        (dict(n_embd=[0] * 1000), r"'n_embd' is \[0, 0, .*\.\.\.; expected a whole number"),  # cut to a line
    ],
)
def test_gpt2_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        read(GPT2, **changes)


BAD_EOS = [99999, 1000, -1, 2.5, "x", {}, True, [1, [2]], [1, None]]


@pytest.mark.parametrize("eos", BAD_EOS, ids=str)
def test_end_tokens_outside_the_vocabulary(eos):
    message = "'eos_token_id' is .*; expected a token id from 0 to 999 .*, or a list of them"
    with pytest.raises(ValueError, match=message):
        read(LLAMA, eos_token_id=eos)
    with pytest.raises(ValueError, match=message):
        GenerationConfig.from_hf({"eos_token_id": eos}, vocab_size=1000)
    assert read(LLAMA, eos_token_id=[0, 999]).eos_token_ids == (0, 999)


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(temperature="x"), "temperature must be a finite number in .*, got 'x'"),
        (dict(top_k=2.5), "top_k must be a whole number of at least -1 .*, got 2.5"),
        (dict(top_p=[]), r"top_p must be a finite number in .*, got \[\]"),
        (dict(min_p=7), "min_p must be a finite number in .*, got 7"),
        (dict(repetition_penalty=0), "repetition_penalty must be .*, got 0"),
        (dict(max_new_tokens="many"), "max_new_tokens must be a whole number of at least 1, got 'many'"),
    ],
)
def test_generation_values_that_cannot_be_meant(values, message):
    with pytest.raises(ValueError, match=message):
        GenerationConfig.from_hf(values)


def test_a_config_made_by_hand_is_checked_too():
    with pytest.raises(ValueError, match="num_key_value_heads must be a whole number of at least 1, got 0"):
        ModelConfig("gpt2", 50, 32, 2, 4, 0, 8, 64, 128, "gelu", 1e-6, True)


@pytest.mark.parametrize(
    "key, value",
    [("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True), ("add_cross_attention", True)],
)
def test_gpt2_options_that_change_the_maths(key, value):
    assert read(GPT2, **{key: not value})
    with pytest.raises(ValueError, match=f"{key}={value} is not supported"):
        read(GPT2, **{key: value})


def test_max_model_len():
    def length(base, **changes):
        return read(base, **changes).max_model_len

    assert length(LLAMA) == 2048
    assert length(LLAMA, rope_parameters={"rope_type": "linear", "factor": 4.0}) == 8192
    # yarn counts from the original length, whether or not max_position_embeddings is already the stretched one
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert length(LLAMA, rope_parameters=yarn) == length(LLAMA, rope_parameters=yarn, max_position_embeddings=8192)
    assert length(LLAMA, rope_parameters=yarn) == 8192
    llama3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    assert length(LLAMA, rope_parameters=llama3 | {"original_max_position_embeddings": 256}) == 2048


def test_sliding_window_limits_max_model_len():
    def length(base, **changes):
        return read(base, **changes).max_model_len

    assert length(MISTRAL, sliding_window=512) == 512
    assert length(MISTRAL, sliding_window=4096) == 2048
    assert length(MISTRAL, sliding_window=None) == 2048
    assert length(MISTRAL, max_position_embeddings=32768) == 4096  # absent: transformers' default is a window of 4096
    assert length(MISTRAL, sliding_window=512, layer_types=["full_attention"] * 4) == 512  # as in transformers
    for qwen in (QWEN2, QWEN3):
        assert length(qwen, sliding_window=512) == 2048  # use_sliding_window is off unless it is on
        assert length(qwen, sliding_window=512, use_sliding_window=False) == 2048
        assert length(qwen, sliding_window=512, use_sliding_window=True, max_window_layers=3) == 512
        assert length(qwen, sliding_window=512, use_sliding_window=True, max_window_layers=4) == 2048
        mixed = ["full_attention", "sliding_attention"] * 2
        assert length(qwen, sliding_window=512, use_sliding_window=True, layer_types=mixed) == 512
        assert length(qwen, sliding_window=512, use_sliding_window=True, layer_types=["full_attention"] * 4) == 2048
    assert length(LLAMA, sliding_window=512) == 512


def test_generation_config():
    values = dict(eos_token_id=[7, 8], temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, do_sample=True)
    config = GenerationConfig.from_hf(values, (3,), 9)
    assert config == GenerationConfig((9, 7, 8), 0.7, 20, 0.8, None, 1.05, None)
    assert GenerationConfig.from_hf({}) == GenerationConfig()


def test_which_end_tokens_count():
    def eos(values, *others, **options):
        return GenerationConfig.from_hf(values, *others, **options).eos_token_ids

    assert eos({"eos_token_id": 7}, (3, 4)) == (7,)  # config.json's only where generation_config.json has none
    assert eos({}, (3, 4)) == eos({"eos_token_id": None}, (3, 4)) == eos({"eos_token_id": []}, (3, 4)) == (3, 4)
    assert eos({"eos_token_id": [7, 8]}, (3,), 8) == (8, 7)  # the tokenizer's is the first
    assert eos({}, (3, 4), 4) == (4, 3) and eos({}, (), 0) == (0,)
    assert eos({}, (3,), 50, vocab_size=50) == (3,)


@pytest.mark.parametrize("theta", [0, 0.0, -1])
def test_a_theta_of_0_is_not_the_default(theta):
    for where in (
        {"rope_theta": theta},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": theta}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": theta}},
    ):
        with pytest.raises(ValueError, match=f"rope theta {theta} is not a positive number"):
            read(LLAMA, **where)
    assert read(LLAMA, rope_theta=None).rope.theta == 10000.0


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize(
    "key", ["rope_theta", "factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale"]
)
def test_extreme_rope_values_are_refused_or_give_frequencies(key, rope_type):
    """Nothing but a ValueError, and no NaN."""
    plain = dict(rope_theta=1e4, factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0)
    for value in (0, 1e-320, 1e-9, 1, 1.0000000000000002, 1e9, 1e300, 1.7e308, 10**400):
        try:
            config = read(LLAMA, rope_parameters={"rope_type": rope_type, **plain, key: value})
        except ValueError as error:
            assert "rope" in str(error)
            continue
        assert config.max_model_len >= 0  # a model without room is refused when it is loaded
        frequencies, factor = rope_frequencies(config.rope, config.head_dim)
        if key not in ("low_freq_factor", "high_freq_factor"):
            assert not frequencies.isnan().any() and factor > 0
    with pytest.raises(ValueError, match=r"'yarn' needs a theta above 1 \(1\), and a beta_fast"):
        read(LLAMA, rope_theta=1, rope_scaling={"rope_type": "yarn", "factor": 2.0})
