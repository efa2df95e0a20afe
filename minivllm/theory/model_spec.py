"""A model's sizes: enough to count its parameters, its operations and its cache.

Unlike `minivllm.model_config`, which describes models that this engine runs, this describes any decoder: mixtures of
experts, latent attention, sliding windows, linear attention. `minivllm.theory.hf_config` reads it from a config.json.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.checks import require_int
from minivllm.files import read_text
from minivllm.theory.dtypes import DTYPES
from minivllm.theory.dtypes import full_dtype as full_dtype
from minivllm.theory.quantity import Quantity

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


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
        path = path / "config.json" if path.is_dir() else path
        text = read_text(path)
        try:
            config = json.loads(text)
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
        from minivllm.theory.hf_config import read_spec  # here, since the reader makes a ModelSpec

        return read_spec(config, name)

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
