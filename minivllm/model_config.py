"""What a checkpoint's config.json says, under one set of names.

The field names differ between families (`n_embd`, `hidden_size`) and between versions of transformers
(`rope_theta` + `rope_scaling` + `torch_dtype` up to 4, `rope_parameters` + `dtype` from 5). Everything
above this module sees `ModelConfig` only. Sizes are read by `minivllm.theory.hf_config`, for the planner and for
the engine alike; here is read what arithmetic needs beside them. A setting that would change the arithmetic in a way
that the models here do not implement is refused by its name, never ignored.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from minivllm.checks import is_finite, is_whole, require_int
from minivllm.sampling_params import SamplingParams
from minivllm.theory.config_fields import LARGEST, names, refuse, text, whole
from minivllm.theory.hf_config import DEFAULT_DTYPE, named_dtype, read_decoder, read_positions
from minivllm.theory.model_spec import FULL, SLIDING, ModelSpec

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base `theta` and how its frequencies are stretched.

    `factor` is used by linear, llama3 and yarn; `original_max_position_embeddings` (tokens) by llama3 and
    yarn; the two `*_freq_factor` by llama3; the rest by yarn. Meanings as in transformers' `rope_parameters`.
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise ValueError(f"rope type {self.type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        for name, value in vars(self).items():
            if name in ("type", "truncate") or value is None:
                continue
            smallest = 1e-9 if name in ("theta", "factor") else 0
            if not is_finite(value) or value < smallest:
                raise ValueError(f"rope {name} {value!r:.100} is not a positive number")
        if self.factor > 1e9:
            raise ValueError(f"rope factor {self.factor!r} is more than 1e9")
        # Frequencies are logarithms to the base theta, of numbers with these two below.
        if self.type == "yarn" and (
            self.theta <= 1 or not 1e-9 <= self.beta_slow <= 1e9 or not 1e-9 <= self.beta_fast <= 1e9
        ):
            raise ValueError(
                f"rope type 'yarn' needs a theta above 1 ({self.theta!r}), and a beta_fast ({self.beta_fast!r}) and "
                f"beta_slow ({self.beta_slow!r}) from 1e-9 to 1e9"
            )


SUPPORTED_MODEL_TYPES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
# What a config.json must name.
_GPT2_SIZES = ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")
_LLAMA_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    hidden_act: str
    norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig | None = None  # None: learned positions (GPT-2)
    qkv_bias: bool = False
    o_proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # tokens; None also when the config names a window that is switched off
    dtype: str | None = None  # the checkpoint's: "float32", "bfloat16" or "float16"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _SIZES:
            require_int(name, getattr(self, name), 1)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.rope is not None and self.head_dim % 2:
            raise ValueError(f"RoPE rotates pairs, so head_dim must be even; it is {self.head_dim}")

    @property
    def max_model_len(self) -> int:
        """The most tokens (prompt and output together) that a sequence may have.

        As vLLM derives it: `max_position_embeddings`, times the factor of linear RoPE; for yarn the *original*
        length times the factor (configs disagree on whether `max_position_embeddings` is already stretched);
        for llama3 as it stands. A sliding window caps it, because up to the window's length windowed and full
        attention are the same, and full attention is what this engine has.
        """
        length = self.max_position_embeddings
        if self.rope is not None and self.rope.type == "linear":
            length = int(length * self.rope.factor)
        elif self.rope is not None and self.rope.type == "yarn":
            length = int(self.rope.original_max_position_embeddings * self.rope.factor)
        return length if self.sliding_window is None else min(length, self.sliding_window)

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """These sizes for the formulas of `minivllm.theory`, as this engine runs the model: full attention everywhere,
        and no request longer than `max_model_len`."""
        is_gpt2 = self.model_type == "gpt2"
        return ModelSpec(
            name=self.model_type,
            model_type=self.model_type,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            max_position_embeddings=self.max_model_len,
            dtype=self.dtype or DEFAULT_DTYPE,
            tie_word_embeddings=self.tie_word_embeddings,
            layer_types=(FULL,) * self.num_hidden_layers,
            gated_mlp=not is_gpt2,
            learned_positions=self.max_position_embeddings if is_gpt2 else 0,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_proj_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.qk_norm,
            norm_bias=is_gpt2,
        )

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """Read a Hugging Face config.json, older or transformers 5 spelling.

        Raises ValueError, naming the key, for an unsupported model type, RoPE type or option, a missing key, and a
        value that is of the wrong type or out of range.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in SUPPORTED_MODEL_TYPES:
            raise ValueError(
                f"model_type {model_type!r} (architectures: {config.get('architectures')}) is not supported; "
                f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        quantization = config.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
            raise ValueError(
                f"quantised checkpoints (quantization_config, method {method!r}) are not supported; "
                "use the model's float32, bfloat16 or float16 weights"
            )
        is_gpt2 = model_type == "gpt2"
        for key in _GPT2_SIZES if is_gpt2 else _LLAMA_SIZES:  # the planner may take a default, a model may not
            whole(config, key, low=1)
        unknown = sorted(set(names(config, "layer_types")) - {FULL, SLIDING})
        if unknown:
            raise ValueError(f"layer_types {', '.join(unknown)} are not supported; only {FULL} and {SLIDING} are")
        spec = read_decoder(config, model_type)
        _refuse_other_layers(spec)
        positions = read_positions(config)
        return cls(
            model_type=model_type,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate_size=spec.intermediate_size,
            max_position_embeddings=positions,
            tie_word_embeddings=spec.tie_word_embeddings,
            qkv_bias=spec.qkv_bias,
            o_proj_bias=spec.o_bias,
            mlp_bias=spec.mlp_bias,
            qk_norm=spec.qk_norm,
            sliding_window=spec.sliding_window if SLIDING in spec.layer_types else None,
            dtype=named_dtype(config),
            eos_token_ids=_token_ids(config, "eos_token_id", spec.vocab_size),
            **(_read_gpt2(config) if is_gpt2 else _read_llama(config, positions)),
        )


@dataclass(frozen=True)
class GenerationConfig:
    """When a model stops, and the sampling values that its authors recommend (None: they name none)."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @classmethod
    def from_hf(
        cls,
        generation_config: dict[str, Any],
        config_eos: tuple[int, ...] = (),
        tokenizer_eos: int | None = None,
        vocab_size: int = LARGEST,
    ) -> GenerationConfig:
        """Read a generation_config.json ({} if there is none).

        The end tokens are, as in vLLM and transformers, those of the generation_config.json where it has any, else
        config.json's (`config_eos`), and the tokenizer's own. That comes first: it is the one that ends a request
        without a stop_reason. (A tokenizer may know tokens beyond the vocabulary, which the model never generates.)

        Raises ValueError, naming the key, for an end token outside the vocabulary, and for values that `SamplingParams`
        refuses.
        """
        eos = _token_ids(generation_config, "eos_token_id", vocab_size) or config_eos
        if tokenizer_eos is not None and tokenizer_eos < vocab_size:
            eos = (tokenizer_eos, *eos)
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        values = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
        SamplingParams(**values)
        max_new_tokens = generation_config.get("max_new_tokens")
        if max_new_tokens is not None:
            require_int("max_new_tokens", max_new_tokens, 1)
        return cls(tuple(dict.fromkeys(eos)), **values, max_new_tokens=max_new_tokens)


def _read_gpt2(config: dict[str, Any]) -> dict[str, Any]:
    for key, supported in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.get(key, supported) != supported:
            raise ValueError(f"{key}={config[key]} is not supported; only {key}={supported} is")
    config = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, **config}
    return dict(hidden_act=text(config, "activation_function"), norm_eps=_epsilon(config, "layer_norm_epsilon"))


def _read_llama(config: dict[str, Any], positions: int) -> dict[str, Any]:
    """Of Llama and those that differ from it only in what the spec says: Mistral, Qwen2, Qwen3."""
    config = {"hidden_act": "silu", "rms_norm_eps": 1e-6, **config}
    return dict(
        hidden_act=text(config, "hidden_act"),
        norm_eps=_epsilon(config, "rms_norm_eps"),
        rope=_read_rope(config, positions),
    )


def _refuse_other_layers(spec: ModelSpec) -> None:
    """ValueError if the config names layers that the models here do not have."""
    for what, found in (
        ("a mixture of experts", spec.experts),
        ("latent attention (kv_lora_rank)", spec.latent),
        ("linear attention", spec.linear),
        ("a gate on attention's output", spec.output_gate),
        ("layers of two shapes", spec.full_kv_heads or spec.full_head_dim),
    ):
        if found:
            raise ValueError(f"{spec.model_type} with {what} is not supported")


def _epsilon(config: dict[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise refuse(config, key, "a small number above 0, such as 1e-5")
    return value


def _flag(config: dict[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise refuse(config, key, "true or false")
    return bool(value)


def _token_ids(config: dict[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    """The token ids of a field that may hold none, one or a list."""
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_whole(i) and 0 <= i < vocab_size for i in ids):
        raise refuse(config, key, f"a token id from 0 to {vocab_size - 1:,} (vocab_size - 1), or a list of them")
    return tuple(ids)


def _read_rope(config: dict[str, Any], max_position_embeddings: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Precedence as in transformers 5: a non-empty `rope_scaling` over `rope_parameters`, a theta inside either
    over `rope_theta` beside it.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters (or rope_scaling) is not an object: {rope!r}")
    if any(isinstance(value, dict) for value in rope.values()):
        per_layer_type = list(rope.values())
        if any(value != per_layer_type[0] for value in per_layer_type):
            raise ValueError(f"rope_parameters that differ by layer type ({', '.join(rope)}) are not supported")
        rope = per_layer_type[0]
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor={partial} is not supported; only whole heads are rotated")
    if rope.get("mrope_section"):
        raise ValueError("mrope_section (multimodal RoPE) is not supported")
    rope_type = rope.get("rope_type") or rope.get("type")
    if rope.get("factor") is not None and rope_type is None:
        raise ValueError(f"rope_parameters (or rope_scaling) has a factor but no rope_type: {rope}")
    thetas = (rope.get("rope_theta"), config.get("rope_theta"), 10000.0)
    theta = next(theta for theta in thetas if theta is not None)
    plain = RopeConfig(theta=theta, type=rope_type or "default")
    if plain.type == "default":
        return plain

    # Outside the dict it wins, as in transformers; absent, the model was trained at the length the config states.
    key = "original_max_position_embeddings"
    original = whole(config, key, default=whole(rope, key, default=max_position_embeddings))
    names = (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    )
    given = {key: rope[key] for key in names if rope.get(key) is not None}
    if rope_type == "yarn":
        given.setdefault("factor", max_position_embeddings / original)
    needed = ("low_freq_factor", "high_freq_factor", "factor") if rope_type == "llama3" else ("factor",)
    missing = [key for key in needed if key not in given]
    if missing:
        raise ValueError(f"rope type {rope_type!r} needs {', '.join(missing)} in rope_parameters (or rope_scaling)")
    return replace(plain, original_max_position_embeddings=original, **given)
