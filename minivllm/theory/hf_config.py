"""Reads a config.json of Hugging Face: one reader for all families, and what each does differently.

It is the only one: the planner's `ModelSpec` and the engine's `ModelConfig` both have their sizes from here. Where a
config says nothing, transformers' default counts; keys that transformers does not read for a family are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.theory.config_fields import Config, flag, names, whole
from minivllm.theory.dtypes import full_dtype
from minivllm.theory.model_spec import (
    FULL,
    LINEAR,
    SLIDING,
    Experts,
    LatentAttention,
    LinearAttention,
    ModelSpec,
)

DEFAULT_DTYPE = "bfloat16"  # where a config names none


def _layer_types(config: Config, num_layers: int, window: int | None) -> tuple[str, ...]:
    named = names(config, "layer_types")
    if named:
        return named
    model_type = config.get("model_type")
    if config.get("linear_num_value_heads"):  # Qwen3-Next, Qwen3.5
        interval = max(1, whole(config, "full_attention_interval", default=4))
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers))
    if window is None:
        return (FULL,) * num_layers
    # How many layers from one with full attention to the next; 0: none has it.
    periods = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma4_text": 6, "cohere2": 4, "gpt_oss": 2}
    period = periods.get(str(model_type), 0)
    if model_type in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):  # the first ones are full
        first = whole(config, "max_window_layers", default=num_layers)
        return tuple(FULL if i < first else SLIDING for i in range(num_layers))
    period = whole(config, "sliding_window_pattern", "_sliding_window_pattern", default=period)
    return tuple(FULL if period and (i + 1) % period == 0 else SLIDING for i in range(num_layers))


def _window(config: Config) -> int | None:
    """Tokens that a windowed layer sees; None if the config names none, or one that is switched off."""
    if "use_sliding_window" in config and not flag(config, "use_sliding_window"):
        return None
    return whole(config, "sliding_window", default=0) or None


def _experts(config: Config, num_layers: int, intermediate_size: int) -> Experts | None:
    num_experts = whole(config, "num_experts", "n_routed_experts", "num_local_experts", default=0)
    if num_experts < 2:
        return None
    expert_size = whole(config, "moe_intermediate_size", default=intermediate_size)
    shared = whole(config, "shared_expert_intermediate_size", default=0)
    shared += whole(config, "n_shared_experts", default=0) * expert_size
    shared += intermediate_size if flag(config, "enable_moe_block") else 0  # Gemma-4: a plain MLP beside the experts
    dense = whole(config, "first_k_dense_replace", default=0)
    step = max(1, whole(config, "decoder_sparse_step", "moe_layer_freq", default=1))
    only_mlp = config.get("mlp_only_layers") or []
    if not isinstance(only_mlp, list):
        raise ValueError(f"mlp_only_layers is {repr(only_mlp)[:80]}, expected a list of layer numbers")
    with_experts = [i for i in range(dense, num_layers) if (i + 1) % step == 0 and i not in only_mlp]
    per_token = whole(config, "num_experts_per_tok", "experts_per_token", "top_k_experts", default=2)
    if not 1 <= per_token <= num_experts:
        raise ValueError(f"num_experts_per_tok is {per_token}, expected 1 to {num_experts}, the number of experts")
    has_gate = str(config.get("model_type")) in _SHARED_GATE and shared > 0
    return Experts(num_experts, per_token, expert_size, shared, len(with_experts), has_gate)


def _latent(config: Config) -> LatentAttention | None:
    rank = whole(config, "kv_lora_rank", default=0)
    if not rank:
        return None
    return LatentAttention(
        kv_lora_rank=rank,
        qk_rope_head_dim=whole(config, "qk_rope_head_dim", default=64),
        qk_nope_head_dim=whole(config, "qk_nope_head_dim", default=128),
        v_head_dim=whole(config, "v_head_dim", default=128),
        q_lora_rank=whole(config, "q_lora_rank", default=0) or None,
    )


def _linear(config: Config) -> LinearAttention | None:
    heads = whole(config, "linear_num_value_heads", default=0)
    if not heads:
        return None
    return LinearAttention(
        num_key_heads=whole(config, "linear_num_key_heads"),
        num_value_heads=heads,
        key_head_dim=whole(config, "linear_key_head_dim"),
        value_head_dim=whole(config, "linear_value_head_dim"),
        conv_kernel=whole(config, "linear_conv_kernel_dim"),
        state_dtype=full_dtype(str(config["mamba_ssm_dtype"])) if config.get("mamba_ssm_dtype") else None,
    )


def _quantization(config: Config) -> str | None:
    """What the checkpoint's matrices are stored in, if its config says that they are quantised."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method", "unknown"))
    if method in ("fp8", "mxfp4"):
        return method
    bits = found.get("bits", found.get("w_bit"))
    if bits in (4, 8) and method in ("gptq", "awq", "gptq_marlin", "awq_marlin", "auto-round", "autoround"):
        return f"int{bits}"
    return f"unknown ({method})"


def _kv_quantization(config: Config) -> str | None:
    """fp8 if the checkpoint brings scales for its cache: vLLM's "auto" then caches in fp8 (attention.py)."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    named = str(found.get("kv_cache_quant_algo") or "").lower()
    return "fp8" if found.get("kv_cache_scheme") or named == "fp8" else None


def _num_kv_heads(config: Config, num_heads: int) -> int:
    by_default = config.get("model_type") in ("falcon", "gpt_bigcode")
    if (by_default or "multi_query" in config) and not config.get("new_decoder_architecture"):
        return 1 if config.get("multi_query", True) else num_heads
    if config.get("multi_query_attention"):  # ChatGLM
        return whole(config, "multi_query_group_num")
    return whole(config, "num_key_value_heads", "num_kv_heads", "num_attention_groups", default=num_heads)


def _head_dim(config: Config, hidden: int, num_heads: int, latent: LatentAttention | None) -> int:
    given = whole(config, "head_dim", "kv_channels", default=-1)
    if given >= 0:
        return given
    if hidden % num_heads and latent is None:
        raise ValueError(f"hidden size {hidden} does not divide into {num_heads} heads, and no head_dim is given")
    return max(1, hidden // num_heads)


# What changes the size of some layers' caches, in ways that are not modelled here. Better no number than a wrong one.
_NOT_MODELLED = {
    "hidden_size_per_layer_input": "an embedding for each layer (Gemma-4 E2B and E4B)",
    "swa_num_key_value_heads": "windowed layers with KV heads of their own",
    "hybrid_layer_pattern": "layers of two kinds",
    "hybrid_override_pattern": "layers of state-space models (Nemotron-H)",
    "attn_layer_period": "layers of state-space models (Jamba)",
    "attn_type_list": "layers of linear attention (MiniMax)",
    "linear_attn_config": "layers of linear attention (Kimi)",
    "block_configs": "a width of its own for each layer (Nemotron-NAS)",
    "attention_chunk_size": "attention within chunks (Llama 4)",
    "num_kv_shared_layers": "layers that share a cache (Gemma-3n, Gemma-4 E2B and E4B)",
    "index_topk": "sparse attention with an index of its own (DeepSeek-V3.2)",
    "cross_attention_layers": "cross-attention",
}


def _check_modelled(config: Config) -> None:
    for key, what in _NOT_MODELLED.items():
        if config.get(key):
            raise ValueError(f"the config has {key}: {what}, which this calculator does not model")


def _rope_factor(config: Config) -> float:
    """By how much vLLM lengthens max_position_embeddings: only linear and dynamic scaling leave that to the server
    (config/model.py, _get_and_verify_max_len); with the others, YaRN too, the config's number is the length."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")  # transformers 5 has it so
    if not isinstance(scaling, Mapping) or "gemma3" in str(config.get("model_type")):
        return 1
    factor = scaling.get("factor")
    is_left = scaling.get("rope_type", scaling.get("type")) in ("linear", "dynamic")
    return factor if is_left and isinstance(factor, int | float) and 1 <= factor <= 1000 else 1


# What a config.json leaves to the defaults of transformers. A null in a config is no default: Mistral 0.3 and later
# write "sliding_window": null, which means none.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen2_moe": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"use_sliding_window": False, "max_window_layers": 28, "head_dim": 128},
    "qwen3_moe": {"use_sliding_window": False},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
                    "max_position_embeddings": 131072},
}  # fmt: skip

# What transformers does not read for a family, so that it says nothing where a config has it nevertheless.
_NOT_READ = {
    "gpt2": ("intermediate_size", "num_key_value_heads", "head_dim", "kv_channels", "model_max_length",
             "sliding_window", "layer_types", "use_qk_norm", "attn_output_gate", "rope_parameters", "rope_scaling"),
    "mistral": ("layer_types",),
}  # fmt: skip

# Families whose shared expert has a gate of its own.
_SHARED_GATE = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")

# What a family has that its config does not say, or says under another name.
_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "gated_mlp": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "norm_bias": True,
        "tie_word_embeddings": True,
    },
    "opt": {
        "gated_mlp": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "norm_bias": True,
        "tie_word_embeddings": True,
    },
    "gpt_bigcode": {
        "gated_mlp": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "norm_bias": True,
        "tie_word_embeddings": True,
    },
    "falcon": {"gated_mlp": False, "norm_bias": True, "norms_per_layer": 1, "tie_word_embeddings": True},
    "llama": {},
    "mistral": {"qkv_bias": False, "o_bias": False, "mlp_bias": False},
    "ministral": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True, "o_bias": False, "mlp_bias": False},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "mlp_bias": False},
    "qwen3_moe": {"qk_norm": True},
    "qwen3_next": {"qk_norm": True, "output_gate": True},
    "qwen3_5_text": {"qk_norm": True},
    "qwen3_5_moe_text": {"qk_norm": True},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"norms_per_layer": 4, "tie_word_embeddings": True},
    "gemma3_text": {"norms_per_layer": 4, "qk_norm": True, "tie_word_embeddings": True},
    "gemma3": {"norms_per_layer": 4, "qk_norm": True, "tie_word_embeddings": True},
    "gemma4_text": {"norms_per_layer": 4, "qk_norm": True, "tie_word_embeddings": True},
    "phi": {
        "gated_mlp": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "head_bias": True, "norm_bias": True,
        "norms_per_layer": 1,
    },
    "phi3": {},
    "cohere": {"norms_per_layer": 1, "tie_word_embeddings": True},
    "cohere2": {"norms_per_layer": 1, "tie_word_embeddings": True},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "gpt_oss": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "attention_sinks": True},
}  # fmt: skip


def read_spec(config: Config, name: str = "") -> ModelSpec:
    """What the config of a decoder says; of a vision-language model's, what its decoder's does.

    ValueError, naming the key, if a size is missing or makes no sense.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"a config is a mapping, as in config.json; this is {type(config).__name__}")
    text = config.get("text_config")
    if isinstance(text, Mapping):
        outer = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config")
        inner = {key: value for key, value in text.items() if value is not None or key not in outer}
        config = {**{key: config[key] for key in outer if key in config}, **inner}
    return read_decoder(config, name or str(config.get("_name_or_path") or config.get("model_type") or "model"))


def read_decoder(config: Config, name: str) -> ModelSpec:
    """What the config of a decoder says; ValueError, naming the key, if a size is missing or makes no sense."""
    model_type = str(config.get("model_type", ""))
    family = _FAMILIES.get(model_type, {})
    if flag(config, "enable_moe_block"):  # three norms more around the experts
        family = {**family, "norms_per_layer": 7}
    config = _as_transformers_reads(config)
    _check_modelled(config)
    hidden = whole(config, "hidden_size", "n_embd", "d_model")
    num_layers = whole(config, "num_hidden_layers", "n_layer", "num_layers")
    num_heads = whole(config, "num_attention_heads", "n_head")
    if not num_heads:
        raise ValueError("num_attention_heads is 0")
    positions = read_positions(config)
    intermediate = whole(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden)
    latent = _latent(config)
    window = _window(config)
    layer_types = _layer_types(config, num_layers, window)
    learned = {"gpt2": positions, "gpt_bigcode": positions, "opt": positions + 2}  # OPT's table starts at position 2
    spec = {
        "qkv_bias": flag(config, "attention_bias"),
        "o_bias": flag(config, "attention_bias"),
        "mlp_bias": flag(config, "mlp_bias"),
        "qk_norm": flag(config, "use_qk_norm"),
        "output_gate": flag(config, "attn_output_gate"),
    }
    return ModelSpec(**spec | family | {
        "name": name,
        "model_type": model_type,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", family.get("tie_word_embeddings", False)),
        "vocab_size": whole(config, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": _num_kv_heads(config, num_heads),
        "head_dim": _head_dim(config, hidden, num_heads, latent),
        "intermediate_size": intermediate,
        "max_position_embeddings": int(positions * _rope_factor(config)),
        "dtype": named_dtype(config) or DEFAULT_DTYPE,
        "quantization": _quantization(config),
        "kv_quantization": _kv_quantization(config),
        "layer_types": layer_types,
        "sliding_window": window,
        "full_kv_heads": whole(config, "num_global_key_value_heads", default=0) or None,
        "full_head_dim": whole(config, "global_head_dim", default=0) or None,
        "full_key_is_value": flag(config, "attention_k_eq_v"),
        "latent": latent,
        "linear": _linear(config),
        "experts": _experts(config, num_layers, intermediate),
        "learned_positions": learned.get(model_type, 0),
        "is_known": model_type in _FAMILIES,
    })  # fmt: skip


def read_positions(config: Config) -> int:
    """Positions that the config names, before any scaling."""
    config = _as_transformers_reads(config)
    # model_max_length: Command-R, whose max_position_embeddings is that of its first training
    keys = ("model_max_length", "max_position_embeddings", "n_positions", "seq_length")
    positions = whole(config, *keys, default=2048)
    if not positions:
        raise ValueError("max_position_embeddings is 0")
    return positions


def named_dtype(config: Config) -> str | None:
    """The name in full of the dtype that the config names; None if it names none."""
    name = full_dtype(str(config.get("dtype") or config.get("torch_dtype") or "auto"))
    return None if name == "auto" else name


def _as_transformers_reads(config: Config) -> Config:
    """With the family's defaults, and without what is not read for it."""
    model_type = str(config.get("model_type", ""))
    unread = _NOT_READ.get(model_type, ())
    return _DEFAULTS.get(model_type, {}) | {key: value for key, value in config.items() if key not in unread}
