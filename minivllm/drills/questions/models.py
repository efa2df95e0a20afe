"""What questions of several topics say about models."""

from minivllm.theory.model_spec import ModelSpec

GQA = ("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-72b", "llama-3.1-8b", "llama-3.1-70b", "mistral-7b-v0.3", "qwen3-8b")
MHA = ("llama-2-7b", "llama-2-13b", "opt-13b")


def shape(spec: ModelSpec) -> str:
    heads = f"{spec.num_heads} query heads, {spec.num_kv_heads} KV heads of dimension {spec.head_dim}"
    return f"{spec.name}: {spec.num_layers} layers, {heads}, hidden size {spec.hidden_size:,}"


def as_if_mha(spec: ModelSpec, value: float) -> float:
    return value * spec.num_heads / spec.num_kv_heads
