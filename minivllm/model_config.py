"""What a checkpoint's config.json says, under one set of names.

The field names differ between families (`n_embd`, `hidden_size`) and between versions of transformers
(`rope_theta` + `rope_scaling` + `torch_dtype` up to 4, `rope_parameters` + `dtype` from 5). Everything
above this module sees `ModelConfig` only. A setting that would change the arithmetic in a way that the
models here do not implement is refused by its name, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from minivllm.checks import is_finite, is_whole, require_int
from minivllm.sampling_params import SamplingParams

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LARGEST = 2**31 - 1  # of any size in a config
MAX_LAYERS = 1000


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
    architectures: tuple[str, ...] = ()

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

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """Read a Hugging Face config.json, older or transformers 5 spelling.

        Raises ValueError, naming the key, for an unsupported model type, RoPE type or option, a missing key, and a
        value that is of the wrong type or out of range.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in _READERS:
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
        vocab_size = _whole(config, "vocab_size")
        return cls(
            model_type=model_type,
            vocab_size=vocab_size,
            dtype=_dtype(config),
            eos_token_ids=_token_ids(config, "eos_token_id", vocab_size),
            architectures=_names(config, "architectures"),
            **_READERS[model_type](config),
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
    hidden_size, num_heads = _whole(config, "n_embd"), _whole(config, "n_head")
    return dict(
        hidden_size=hidden_size,
        num_hidden_layers=_whole(config, "n_layer", high=MAX_LAYERS),
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=_split_heads(hidden_size, num_heads),
        intermediate_size=_whole(config, "n_inner", default=4 * hidden_size),
        max_position_embeddings=_whole(config, "n_positions"),
        hidden_act=_text(config, "activation_function"),
        norm_eps=_epsilon(config, "layer_norm_epsilon"),
        tie_word_embeddings=_flag(config, "tie_word_embeddings", True),
        qkv_bias=True,
        o_proj_bias=True,
        mlp_bias=True,
    )


def _read_llama(config: dict[str, Any]) -> dict[str, Any]:
    config = {"hidden_act": "silu", "rms_norm_eps": 1e-6, **config}
    hidden_size, num_heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    max_position_embeddings = _whole(config, "max_position_embeddings")
    given_head_dim = config.get("head_dim") is not None
    attention_bias = _flag(config, "attention_bias", False)
    return dict(
        hidden_size=hidden_size,
        num_hidden_layers=_whole(config, "num_hidden_layers", high=MAX_LAYERS),
        num_attention_heads=num_heads,
        num_key_value_heads=_whole(config, "num_key_value_heads", default=num_heads),
        head_dim=_whole(config, "head_dim") if given_head_dim else _split_heads(hidden_size, num_heads),
        intermediate_size=_whole(config, "intermediate_size"),
        max_position_embeddings=max_position_embeddings,
        hidden_act=_text(config, "hidden_act"),
        norm_eps=_epsilon(config, "rms_norm_eps"),
        tie_word_embeddings=_flag(config, "tie_word_embeddings", False),
        rope=_read_rope(config, max_position_embeddings),
        qkv_bias=attention_bias,
        o_proj_bias=attention_bias,
        mlp_bias=_flag(config, "mlp_bias", False),
        sliding_window=_active_window(config),
    )


def _read_mistral(config: dict[str, Any]) -> dict[str, Any]:
    # Transformers' default when the key is absent; Mistral 0.3 and later write null, which means none.
    config = {"sliding_window": 4096, **config}
    return _read_llama(config) | dict(qkv_bias=False, o_proj_bias=False, mlp_bias=False)


def _read_qwen2(config: dict[str, Any]) -> dict[str, Any]:
    config = {"use_sliding_window": False, **config}
    return _read_llama(config) | dict(qkv_bias=True, o_proj_bias=False, mlp_bias=False)


def _read_qwen3(config: dict[str, Any]) -> dict[str, Any]:
    # Qwen3's head_dim is its own setting, with a default: 0.6B has 16 heads of 128 on a hidden size of 1024.
    config = {"use_sliding_window": False, "head_dim": 128, **config}
    return _read_llama(config) | dict(mlp_bias=False, qk_norm=True)


_READERS = {
    "gpt2": _read_gpt2,
    "llama": _read_llama,
    "mistral": _read_mistral,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
}
SUPPORTED_MODEL_TYPES = tuple(_READERS)


def _refuse(config: dict[str, Any], key: str, expected: str) -> ValueError:
    found = f"{key!r} is {_shorten(config[key])}" if key in config else f"{key!r} is missing"
    return ValueError(f"{found}; expected {expected}")


def _shorten(value: object, limit: int = 100) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _whole(config: dict[str, Any], key: str, default: int | None = None, low: int = 1, high: int = LARGEST) -> int:
    """A size. `default` is for a key that is missing or null; without one it must be there."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not is_whole(value) or not low <= value <= high:
        raise _refuse(config, key, f"a whole number from {low} to {high:,}")
    return value


def _epsilon(config: dict[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise _refuse(config, key, "a small number above 0, such as 1e-5")
    return value


def _flag(config: dict[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise _refuse(config, key, "true or false")
    return bool(value)


def _text(config: dict[str, Any], key: str) -> str:
    if not isinstance(config.get(key), str):
        raise _refuse(config, key, "a name")
    return config[key]


def _names(config: dict[str, Any], key: str) -> tuple[str, ...]:
    """A list of names, or none."""
    value = config.get(key)
    if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise _refuse(config, key, "a list of names")
    return tuple(value or ())


def _token_ids(config: dict[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    """The token ids of a field that may hold none, one or a list."""
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_whole(i) and 0 <= i < vocab_size for i in ids):
        raise _refuse(config, key, f"a token id from 0 to {vocab_size - 1:,} (vocab_size - 1), or a list of them")
    return tuple(ids)


def _split_heads(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ValueError(f"hidden size {hidden_size} does not divide into {num_heads} heads, and no head_dim is given")
    return hidden_size // num_heads


def _dtype(config: dict[str, Any]) -> str | None:
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {name!r} is not supported; supported: float32, bfloat16, float16")
    return name


def _active_window(config: dict[str, Any]) -> int | None:
    """The sliding window in tokens, or None if no layer uses one.

    Mistral's window, when there is one, is on every layer. Qwen's has a switch, and then a list of layer types or, in
    the older spelling, the number of first layers that attend fully.
    """
    layer_types = _names(config, "layer_types")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(
            f"layer_types {', '.join(unknown)} are not supported; only full_attention and sliding_attention are"
        )
    active = _flag(config, "use_sliding_window", True) and config.get("sliding_window") is not None
    window = _whole(config, "sliding_window") if active else None
    if window is None and "sliding_attention" in layer_types:
        raise ValueError("layer_types has sliding_attention layers, but no sliding_window is active")
    if "use_sliding_window" not in config:
        return window
    if layer_types:
        return window if "sliding_attention" in layer_types else None
    return window if _whole(config, "max_window_layers", default=28, low=0) < config["num_hidden_layers"] else None


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
    factor, rope_type = rope.get("factor"), rope.get("rope_type") or rope.get("type")
    if factor is not None and rope_type is None:
        raise ValueError(f"rope_parameters (or rope_scaling) has a factor but no rope_type: {rope}")
    thetas = (rope.get("rope_theta"), config.get("rope_theta"), 10000.0)
    theta = next(theta for theta in thetas if theta is not None)
    plain = RopeConfig(theta=theta, type=rope_type or "default")
    if plain.type == "default":
        return plain

    # Outside the dict it wins, as in transformers; absent, the model was trained at the length the config states.
    key = "original_max_position_embeddings"
    original = _whole(config, key, default=_whole(rope, key, default=max_position_embeddings))
    if factor is None and rope_type == "yarn":
        factor = max_position_embeddings / original
    needed = ("low_freq_factor", "high_freq_factor") if rope_type == "llama3" else ()
    missing = [key for key in needed if rope.get(key) is None] + (["factor"] if factor is None else [])
    if missing:
        raise ValueError(f"rope type {rope_type!r} needs {', '.join(missing)} in rope_parameters (or rope_scaling)")
    optional = (
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    )
    return replace(
        plain,
        factor=factor,
        original_max_position_embeddings=original,
        **{key: rope[key] for key in optional if rope.get(key) is not None},
    )
