"""What a config.json says about a model's sizes: enough to count its parameters, its operations and its cache.

Unlike `minivllm.model_config`, which describes models that this engine runs, this reads any decoder: mixtures of
experts, latent attention, sliding windows, linear attention. Names of the fields are Hugging Face's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.checks import require_int
from minivllm.theory.quantity import Quantity

DTYPES = ("float32", "float16", "bfloat16")
_SHORT = {
    "float": "float32", "fp32": "float32", "f32": "float32", "half": "float16", "fp16": "float16", "f16": "float16",
    "bf16": "bfloat16", "fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8", "fp8_e5m2": "fp8", "int8_per_token_head": "int8",
}  # fmt: skip
LARGEST, MAX_LAYERS = 2**31 - 1, 1000
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def full_dtype(name: str) -> str:
    """bf16, BF16 and torch.bfloat16 are bfloat16; a name that is not known here stays as it is."""
    if not isinstance(name, str):
        raise ValueError(f"a dtype is given by name, such as 'bfloat16'; this is {name!r}")
    name = name.lower().removeprefix("torch.")
    return _SHORT.get(name, name)


@dataclass(frozen=True)
class LatentAttention:
    """MLA (DeepSeek-V2, arXiv:2405.04434): all heads share one compressed vector and one rotary key per token."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None

    @property
    def cached_per_token(self) -> int:
        """Elements that a layer caches per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class LinearAttention:
    """The state that a linear-attention layer keeps per request, whatever its length (Gated DeltaNet)."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    state_dtype: str | None  # of the recurrent matrices; None, as that of the convolution's inputs: the model's

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim

    @property
    def recurrent_elements(self) -> int:
        return self.num_value_heads * self.key_head_dim * self.value_head_dim

    @property
    def conv_elements(self) -> int:
        return (self.conv_kernel - 1) * self.conv_channels


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `experts_per_token` of `num_experts` run for each token, and the shared ones for all."""

    num_experts: int
    experts_per_token: int
    expert_size: int  # intermediate size of one expert
    shared_size: int  # of all shared experts together, 0 for none
    num_layers: int  # layers that have experts; the others have a plain MLP
    shared_gate: bool = False  # one more row in the router, which weighs the shared experts


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a decoder-only model. Counts are whole; `head_dim` is the config's where it names one."""

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    dtype: str  # of activations, and of what is not quantised
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    full_kv_heads: int | None = None  # of layers with full attention, where they differ from the others (Gemma-4)
    full_head_dim: int | None = None
    full_key_is_value: bool = False  # those layers have no projection for values: the key's makes both
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    experts: Experts | None = None
    gated_mlp: bool = True
    learned_positions: int = 0
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False  # the query projection is twice as wide: its second half gates attention's output
    norms_per_layer: int = 2
    norm_bias: bool = False
    attention_sinks: bool = False
    quantization: str | None = None  # dtype of the quantised weights, as `sizing` names it
    kv_quantization: str | None = None  # dtype of the cache, where the checkpoint has scales for it
    is_known: bool = True  # False: counted as if it were a Llama, since its model_type is not one of those known here
    published_parameters: int | None = None
    published_active_parameters: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            require_int(name, getattr(self, name), 1)
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name}: torch_dtype {self.dtype!r} is unknown; known: {', '.join(DTYPES)}")
        if self.latent is None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.name}: num_attention_heads ({self.num_heads}) is not a multiple of num_key_value_heads "
                f"({self.num_kv_heads})"
            )
        if len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"{self.name}: layer_types names {len(self.layer_types)} layers, num_hidden_layers {self.num_layers}"
            )
        unknown = set(self.layer_types) - {FULL, SLIDING, LINEAR}
        if unknown:
            raise ValueError(
                f"{self.name}: layer_types has {', '.join(map(repr, sorted(unknown)))}; known: {FULL}, {SLIDING}, "
                f"{LINEAR}"
            )
        if SLIDING in self.layer_types and not self.sliding_window:
            raise ValueError(f"{self.name}: layer_types has {SLIDING}, but the config names no sliding_window")
        if LINEAR in self.layer_types and self.linear is None:
            raise ValueError(f"{self.name}: layer_types has {LINEAR}, but the config names no linear_* sizes")
        if self.linear is not None and self.linear.state_dtype not in (None, *DTYPES):
            raise ValueError(
                f"{self.name}: mamba_ssm_dtype {self.linear.state_dtype!r} is unknown; known: {', '.join(DTYPES)}"
            )

    # --- Reading ---

    @classmethod
    def from_file(cls, path: str | Path) -> ModelSpec:
        """Read a config.json, or the one in a folder. ValueError if it cannot be read or lacks a size."""
        path = Path(path)
        try:
            path = path / "config.json" if path.is_dir() else path
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"{path} holds a {type(config).__name__}, expected an object with the model's sizes")
        try:
            return cls.from_hf(config, name=path.absolute().parent.name or path.name)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str = "") -> ModelSpec:
        """Read the content of a Hugging Face config.json. ValueError if a size is missing or makes no sense."""
        if not isinstance(config, Mapping):
            raise ValueError(f"a config is a mapping, as in config.json; this is {type(config).__name__}")
        text = config.get("text_config")
        if isinstance(text, Mapping):  # a vision-language model: its decoder
            outer = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config")
            inner = {key: value for key, value in text.items() if value is not None or key not in outer}
            config = {**{key: config[key] for key in outer if key in config}, **inner}
        return cls(**_read(config, name or str(config.get("_name_or_path") or config.get("model_type") or "model")))

    def heads_of(self, kind: str) -> tuple[int, int]:
        """(KV heads, head_dim) of the layers of that kind."""
        if kind == FULL:
            return self.full_kv_heads or self.num_kv_heads, self.full_head_dim or self.head_dim
        return self.num_kv_heads, self.head_dim

    @property
    def has_two_shapes(self) -> bool:
        """Whether layers with full attention have other KV heads than the windowed ones beside them (Gemma-4)."""
        return {FULL, SLIDING} <= set(self.layer_types) and self.heads_of(FULL) != self.heads_of(SLIDING)

    # --- Counting ---

    @property
    def parameters(self) -> Quantity:
        """All parameters of the decoder, by part."""
        head = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        head += self.vocab_size if self.head_bias else 0
        return Quantity(
            self.embedding_parameters + self.attention_parameters + self.mlp_parameters + self._norms + head,
            "",
            "parameters",
            "embedding + attention + MLP + norms + output_head",
            {
                "embedding": self.embedding_parameters,
                "attention": self.attention_parameters,
                "MLP": self.mlp_parameters,
                "norms": self._norms,
                "output_head": head,
            },
        )

    @property
    def active_parameters(self) -> Quantity:
        """Those of one token's forward pass: of the experts, only the ones that it is sent to.

        The embedding counts in full, as in most model cards; OpenAI's leaves it out (gpt-oss-20b: 3.6 of 4.2 billion).
        """
        idle = 0
        if self.experts is not None:
            unused = self.experts.num_experts - self.experts.experts_per_token
            idle = self.experts.num_layers * unused * self.one_mlp(self.experts.expert_size)
        return Quantity(
            self.parameters - idle,
            "",
            "active parameters",
            "parameters - idle_experts",
            {"parameters": self.parameters, "idle_experts": idle},
        )

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab_size + self.learned_positions) * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """The matrix that makes logits, whether or not it is also the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def attention_parameters(self) -> int:
        """The projections around attention, all layers."""
        num_linear = self.layer_types.count(LINEAR)
        total = sum(self.layer_types.count(kind) * self._one_attention(kind) for kind in (FULL, SLIDING))
        if self.linear is not None:
            values = self.linear.num_value_heads * self.linear.value_head_dim
            one = self.hidden_size * (self.linear.conv_channels + 2 * values + 2 * self.linear.num_value_heads)
            one += self.linear.conv_kernel * self.linear.conv_channels
            total += num_linear * (one + 2 * self.linear.num_value_heads + self.linear.value_head_dim)  # decay, norm
        return total

    @property
    def mlp_parameters(self) -> int:
        """The MLPs of all layers, with all experts and their routers."""
        if self.experts is None:
            return self.num_layers * self.one_mlp(self.intermediate_size)
        experts = self.experts
        one = experts.num_experts * self.one_mlp(experts.expert_size)
        one += self.hidden_size * experts.num_experts + (experts.num_experts if self.mlp_bias else 0)  # the router
        one += self.one_mlp(experts.shared_size) if experts.shared_size else 0
        one += self.hidden_size if experts.shared_gate else 0
        return experts.num_layers * one + (self.num_layers - experts.num_layers) * self.one_mlp(self.intermediate_size)

    def _one_attention(self, kind: str) -> int:
        hidden = self.hidden_size
        if self.latent is not None:
            latent = self.latent
            query = self.num_heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
            rank = latent.q_lora_rank
            total = hidden * query if rank is None else rank * (hidden + query) + rank
            total += hidden * latent.cached_per_token + latent.kv_lora_rank
            total += latent.kv_lora_rank * self.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
            return total + self.num_heads * latent.v_head_dim * hidden
        kv_heads, head_dim = self.heads_of(kind)
        q_size = self.num_heads * head_dim
        kv_size = kv_heads * head_dim * (1 if self.full_key_is_value and kind == FULL else 2)
        total = hidden * (q_size + kv_size) + q_size * hidden
        total += (q_size + kv_size) if self.qkv_bias else 0
        total += hidden if self.o_bias else 0
        total += 2 * head_dim if self.qk_norm else 0
        total += hidden * q_size if self.output_gate else 0
        return total + (self.num_heads if self.attention_sinks else 0)

    def one_mlp(self, size: int) -> int:
        """Parameters of one MLP, or one expert, with that intermediate size."""
        matrices = 3 if self.gated_mlp else 2
        biases = (matrices - 1) * size + self.hidden_size if self.mlp_bias else 0
        return matrices * self.hidden_size * size + biases

    @property
    def _norms(self) -> int:
        return (self.norms_per_layer * self.num_layers + 1) * self.hidden_size * (2 if self.norm_bias else 1)

    def describe_layers(self) -> str:
        """E.g. "28 full", "10 full, 50 sliding (1,024)"."""
        names = {FULL: "full", SLIDING: f"sliding ({self.sliding_window or 0:,})", LINEAR: "linear"}
        counts = Counter(self.layer_types)
        return ", ".join(f"{counts[kind]} {names[kind]}" for kind in names if counts[kind])


# --- One reader for all, and what the families do differently ----------------------------------------------------


def _whole(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of `keys` that the config has. A key with null counts as absent, as in transformers."""
    for key in keys:
        if config.get(key) is not None:
            require_int(key, config[key], 0)
            most = MAX_LAYERS if "layer" in key else LARGEST
            if config[key] > most:
                raise ValueError(f"{key} is more than {most:,}, which no model has")
            return int(config[key])
    if default is None:
        raise ValueError(f"the config has no {' or '.join(keys)}; if its model type has a default, write it in")
    return default


def _layer_types(config: Mapping[str, Any], num_layers: int, window: int | None) -> tuple[str, ...]:
    named = config.get("layer_types")
    if named is not None:
        if not isinstance(named, list | tuple) or not all(isinstance(kind, str) for kind in named):
            raise ValueError(f"layer_types is {repr(named)[:80]}, expected a list with a name for each layer")
        return tuple(named)
    model_type = config.get("model_type")
    if config.get("linear_num_value_heads"):  # Qwen3-Next, Qwen3.5
        interval = max(1, _whole(config, "full_attention_interval", default=4))
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers))
    if window is None:
        return (FULL,) * num_layers
    # How many layers from one with full attention to the next; 0: none has it.
    periods = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma4_text": 6, "cohere2": 4, "gpt_oss": 2}
    period = periods.get(str(model_type), 0)
    if model_type in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):  # the first ones are full
        first = _whole(config, "max_window_layers", default=num_layers)
        return tuple(FULL if i < first else SLIDING for i in range(num_layers))
    period = _whole(config, "sliding_window_pattern", "_sliding_window_pattern", default=period)
    return tuple(FULL if period and (i + 1) % period == 0 else SLIDING for i in range(num_layers))


def _window(config: Mapping[str, Any]) -> int | None:
    """Tokens that a windowed layer sees; None if the config names none, or one that is switched off."""
    if "use_sliding_window" in config and not config["use_sliding_window"]:
        return None
    window = _whole(config, "sliding_window", default=0)
    return window or None


def _experts(config: Mapping[str, Any], num_layers: int, intermediate_size: int) -> Experts | None:
    num_experts = _whole(config, "num_experts", "n_routed_experts", "num_local_experts", default=0)
    if num_experts < 2:
        return None
    expert_size = _whole(config, "moe_intermediate_size", default=intermediate_size)
    shared = _whole(config, "shared_expert_intermediate_size", default=0)
    shared += _whole(config, "n_shared_experts", default=0) * expert_size
    shared += intermediate_size if config.get("enable_moe_block") else 0  # Gemma-4: a plain MLP beside the experts
    dense = _whole(config, "first_k_dense_replace", default=0)
    step = max(1, _whole(config, "decoder_sparse_step", "moe_layer_freq", default=1))
    only_mlp = config.get("mlp_only_layers") or []
    if not isinstance(only_mlp, list):
        raise ValueError(f"mlp_only_layers is {repr(only_mlp)[:80]}, expected a list of layer numbers")
    with_experts = [i for i in range(dense, num_layers) if (i + 1) % step == 0 and i not in only_mlp]
    per_token = _whole(config, "num_experts_per_tok", "experts_per_token", "top_k_experts", default=2)
    if not 1 <= per_token <= num_experts:
        raise ValueError(f"num_experts_per_tok is {per_token}, expected 1 to {num_experts}, the number of experts")
    has_gate = str(config.get("model_type")) in _SHARED_GATE and shared > 0
    return Experts(num_experts, per_token, expert_size, shared, len(with_experts), has_gate)


def _latent(config: Mapping[str, Any]) -> LatentAttention | None:
    rank = _whole(config, "kv_lora_rank", default=0)
    if not rank:
        return None
    return LatentAttention(
        kv_lora_rank=rank,
        qk_rope_head_dim=_whole(config, "qk_rope_head_dim", default=64),
        qk_nope_head_dim=_whole(config, "qk_nope_head_dim", default=128),
        v_head_dim=_whole(config, "v_head_dim", default=128),
        q_lora_rank=_whole(config, "q_lora_rank", default=0) or None,
    )


def _linear(config: Mapping[str, Any]) -> LinearAttention | None:
    heads = _whole(config, "linear_num_value_heads", default=0)
    if not heads:
        return None
    return LinearAttention(
        num_key_heads=_whole(config, "linear_num_key_heads"),
        num_value_heads=heads,
        key_head_dim=_whole(config, "linear_key_head_dim"),
        value_head_dim=_whole(config, "linear_value_head_dim"),
        conv_kernel=_whole(config, "linear_conv_kernel_dim"),
        state_dtype=full_dtype(str(config["mamba_ssm_dtype"])) if config.get("mamba_ssm_dtype") else None,
    )


def _quantization(config: Mapping[str, Any]) -> str | None:
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


def _kv_quantization(config: Mapping[str, Any]) -> str | None:
    """fp8 if the checkpoint brings scales for its cache: vLLM's "auto" then caches in fp8 (attention.py)."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    named = str(found.get("kv_cache_quant_algo") or "").lower()
    return "fp8" if found.get("kv_cache_scheme") or named == "fp8" else None


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    by_default = config.get("model_type") in ("falcon", "gpt_bigcode")
    if (by_default or "multi_query" in config) and not config.get("new_decoder_architecture"):
        return 1 if config.get("multi_query", True) else num_heads
    if config.get("multi_query_attention"):  # ChatGLM
        return _whole(config, "multi_query_group_num")
    return _whole(config, "num_key_value_heads", "num_kv_heads", "num_attention_groups", default=num_heads)


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


def _check_modelled(config: Mapping[str, Any]) -> None:
    for key, what in _NOT_MODELLED.items():
        if config.get(key):
            raise ValueError(f"the config has {key}: {what}, which this calculator does not model")


def _rope_factor(config: Mapping[str, Any]) -> float:
    """By how much vLLM lengthens max_position_embeddings: only linear and dynamic scaling leave that to the server
    (config/model.py, _get_and_verify_max_len); with the others, YaRN too, the config's number is the length."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, Mapping) or "gemma3" in str(config.get("model_type")):
        return 1
    factor = scaling.get("factor")
    is_left = scaling.get("rope_type", scaling.get("type")) in ("linear", "dynamic")
    return factor if is_left and isinstance(factor, int | float) and 1 <= factor <= 1000 else 1


# What a config.json leaves to the defaults of transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
                    "max_position_embeddings": 131072},
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
    "mistral": {},
    "ministral": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
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


def _read(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    model_type = str(config.get("model_type", ""))
    family = _FAMILIES.get(model_type, {})
    if config.get("enable_moe_block"):  # three norms more around the experts
        family = {**family, "norms_per_layer": 7}
    config = {**_DEFAULTS.get(model_type, {}), **config}
    _check_modelled(config)
    hidden = _whole(config, "hidden_size", "n_embd", "d_model")
    num_layers = _whole(config, "num_hidden_layers", "n_layer", "num_layers")
    num_heads = _whole(config, "num_attention_heads", "n_head")
    if not num_heads:
        raise ValueError("num_attention_heads is 0")
    # model_max_length: Command-R, whose max_position_embeddings is that of its first training
    positions = _whole(config, "model_max_length", "max_position_embeddings", "n_positions", "seq_length", default=2048)
    if not positions:
        raise ValueError("max_position_embeddings is 0")
    intermediate = _whole(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden)
    latent = _latent(config)
    window = _window(config)
    layer_types = _layer_types(config, num_layers, window)
    learned = {"gpt2": positions, "gpt_bigcode": positions, "opt": positions + 2}.get(
        model_type, 0
    )  # OPT's table starts at position 2
    dtype = full_dtype(str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"))
    dtype = "bfloat16" if dtype == "auto" else dtype
    spec = {
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": bool(config.get("attention_bias", False)),
        "o_bias": bool(config.get("attention_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "qk_norm": bool(config.get("use_qk_norm", False)),
        "output_gate": bool(config.get("attn_output_gate", False)),
    }
    if "tie_word_embeddings" in family and config.get("tie_word_embeddings") is not None:
        spec["tie_word_embeddings"] = bool(config["tie_word_embeddings"])
        family = {key: value for key, value in family.items() if key != "tie_word_embeddings"}
    return spec | family | {
        "name": name,
        "model_type": model_type,
        "vocab_size": _whole(config, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": _num_kv_heads(config, num_heads),
        "head_dim": _whole(config, "head_dim", "kv_channels", default=max(1, hidden // num_heads)),
        "intermediate_size": intermediate,
        "max_position_embeddings": int(positions * _rope_factor(config)),
        "dtype": dtype,
        "quantization": _quantization(config),
        "kv_quantization": _kv_quantization(config),
        "layer_types": layer_types,
        "sliding_window": window,
        "full_kv_heads": _whole(config, "num_global_key_value_heads", default=0) or None,
        "full_head_dim": _whole(config, "global_head_dim", default=0) or None,
        "full_key_is_value": bool(config.get("attention_k_eq_v", False)),
        "latent": latent,
        "linear": _linear(config),
        "experts": _experts(config, num_layers, intermediate),
        "learned_positions": learned,
        "is_known": model_type in _FAMILIES,
    }  # fmt: skip
