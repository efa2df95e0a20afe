"""Every architecture and RoPE type gives transformers' logits, at every position of a sequence."""

from dataclasses import replace

import pytest
import torch
import transformers
from helpers.checkpoints import (
    GPT2,
    LLAMA,
    STRETCHED,
    build,
    expected_logits,
    our_logits,
    rope,
    spell_like_transformers_4,
    token_ids,
)

from minivllm.loading.weights import _copy_weights, _empty_model, load_model
from minivllm.model_config import ModelConfig
from minivllm.models.layers import causal_attend

CONFIGS = {
    "gpt2": transformers.GPT2Config(**GPT2),
    "gpt2-untied-gelu-inner": transformers.GPT2Config(
        **GPT2, tie_word_embeddings=False, activation_function="gelu", n_inner=72
    ),
    "llama": transformers.LlamaConfig(**LLAMA, rope_parameters=rope()),
    "llama-biases-head-dim-tied": transformers.LlamaConfig(
        **LLAMA, rope_parameters=rope(), attention_bias=True, mlp_bias=True, head_dim=12, tie_word_embeddings=True
    ),
    "mistral": transformers.MistralConfig(**LLAMA, rope_parameters=rope(), sliding_window=None),
    "qwen2": transformers.Qwen2Config(**LLAMA, rope_parameters=rope(), tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**LLAMA, rope_parameters=rope(), head_dim=16),
    "qwen3-biases": transformers.Qwen3Config(**LLAMA, rope_parameters=rope(), head_dim=16, attention_bias=True),
    "linear": transformers.LlamaConfig(**LLAMA, rope_parameters=STRETCHED["linear"]),
    "llama3": transformers.LlamaConfig(**LLAMA, rope_parameters=STRETCHED["llama3"]),
    "yarn": transformers.Qwen2Config(**LLAMA, rope_parameters=STRETCHED["yarn"]),
    "yarn-all-options": transformers.LlamaConfig(
        **LLAMA,
        rope_parameters=STRETCHED["yarn"]
        | dict(beta_fast=8.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=0.4, truncate=False),
    ),
    "yarn-attention-factor": transformers.LlamaConfig(
        **LLAMA, rope_parameters=STRETCHED["yarn"] | dict(attention_factor=1.3)
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name, tmp_path):
    oracle = build(CONFIGS[name])
    oracle.save_pretrained(tmp_path)
    ids = token_ids()
    expected = expected_logits(oracle, ids)
    loaded = load_model(tmp_path)
    torch.testing.assert_close(our_logits(loaded.model, ids), expected, atol=1e-4, rtol=0)

    if loaded.config.rope is not None:
        spell_like_transformers_4(tmp_path)
        older = load_model(tmp_path)
        assert older.config == loaded.config
        torch.testing.assert_close(our_logits(older.model, ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "linear", "llama3", "yarn", "qwen3"])
def test_logits_would_show_a_wrong_rope(name):
    """The comparison above is worth something: any other theta, or no stretching, is far outside its tolerance."""
    oracle = build(CONFIGS[name])
    ids = token_ids()
    expected = expected_logits(oracle, ids)
    right = ModelConfig.from_hf(oracle.config.to_dict())
    wrong_ropes = [replace(right.rope, theta=10000.0)]
    if right.rope.type != "default":
        wrong_ropes.append(replace(right.rope, type="default"))
    for wrong in wrong_ropes:
        model = _empty_model(replace(right, rope=wrong), torch.float32, torch.device("cpu"))
        _copy_weights(model, (("", key, tensor) for key, tensor in oracle.state_dict().items()))
        assert (our_logits(model, ids) - expected).abs().max() > 0.01


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_bfloat16(name, tmp_path):
    """In bfloat16 both sides round at the same places, so they agree far better than bfloat16 agrees with float32."""
    build(CONFIGS[name]).to(torch.bfloat16).save_pretrained(tmp_path)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    ids = token_ids()
    loaded = load_model(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    expected = expected_logits(oracle, ids)
    error = (our_logits(loaded.model, ids) - expected).abs().max()
    assert error < 0.02 * expected.abs().max()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_positions_are_the_callers(name, tmp_path):
    oracle = build(CONFIGS[name])
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    ids, positions = token_ids(20), torch.arange(3, 63, 3)
    with torch.no_grad():
        # The mask of ones keeps transformers from reading the gaps as the seams of packed sequences.
        expected = oracle(ids[None], position_ids=positions[None], attention_mask=torch.ones(1, 20)).logits[0]
    got = model.compute_logits(model(ids, positions, causal_attend))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert (our_logits(model, ids) - expected).abs().max() > 0.01


def test_rope_frequencies_survive_a_change_of_dtype():
    model = load_model(ModelConfig.from_hf(CONFIGS["llama"].to_dict())).model.to(torch.bfloat16)
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
