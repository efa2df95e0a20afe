"""Planner and engine read the same sizes from the same config.json, whatever it leaves out."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.model_config import SUPPORTED_MODEL_TYPES, ModelConfig
from minivllm.theory import ModelSpec, catalog
from minivllm.theory.model_spec import FULL, SLIDING

PUBLISHED = [
    row["config"] for row in catalog._rows("models.json") if row["config"]["model_type"] in SUPPORTED_MODEL_TYPES
]


LINEAR = {"type": "linear", "factor": 2.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def check_agreement(hf: dict) -> None:
    """Every field of the engine's spec, but for what it treats otherwise on purpose: windows, and YaRN's length."""
    engine = ModelConfig.from_hf(hf)
    planner = ModelSpec.from_hf(hf, name=hf["model_type"])
    assert engine.sliding_window == (planner.sliding_window if SLIDING in planner.layer_types else None)
    if engine.sliding_window is None and (engine.rope is None or engine.rope.type != "yarn"):
        assert engine.max_model_len == planner.max_position_embeddings
    # Windowed layers are computed as full ones, and a request ends where the window does.
    planner = replace(planner, layer_types=(FULL,) * planner.num_layers, sliding_window=None)
    assert engine.spec == replace(planner, max_position_embeddings=engine.max_model_len)
    assert engine.spec.parameters == planner.parameters


@pytest.mark.parametrize(
    "hf", PUBLISHED, ids=lambda hf: f"{hf['model_type']}-{hf.get('hidden_size', hf.get('n_embd'))}"
)
def test_published(hf):
    check_agreement(hf)


def test_every_family_is_among_them():
    assert {hf["model_type"] for hf in PUBLISHED} == set(SUPPORTED_MODEL_TYPES)


def maybe(values: st.SearchStrategy) -> st.SearchStrategy:
    """A key may be there, null, or absent."""
    return st.one_of(st.just("absent"), st.none(), values)


@st.composite
def configs(draw) -> dict:
    model_type = draw(st.sampled_from(SUPPORTED_MODEL_TYPES))
    kv_heads, group, head_dim = draw(st.integers(1, 8)), draw(st.integers(1, 8)), 2 * draw(st.integers(1, 64))
    heads, layers = kv_heads * group, draw(st.integers(1, 60))
    sizes = st.integers(1, 2**20)
    flags, dtypes = st.booleans(), st.sampled_from(["float32", "float16", "bfloat16", "torch.float16"])
    if model_type == "gpt2":
        config = dict(n_embd=heads * head_dim, n_layer=layers, n_head=heads, n_positions=draw(sizes))
        optional = dict(n_inner=sizes, activation_function=st.just("gelu"))
    else:
        kinds = st.sampled_from([FULL, SLIDING])
        config = dict(
            hidden_size=heads * head_dim,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=draw(st.sampled_from([None, kv_heads, heads])),
            intermediate_size=draw(sizes),
            max_position_embeddings=draw(sizes),
        )
        optional = dict(
            head_dim=st.integers(1, 64).map(lambda half: 2 * half),
            attention_bias=flags,
            mlp_bias=flags,
            sliding_window=sizes,
            use_sliding_window=flags,
            max_window_layers=st.integers(0, 60),
            layer_types=st.lists(kinds, min_size=layers, max_size=layers),
            rope_theta=st.just(5e5),
            rope_scaling=st.sampled_from([LINEAR, YARN]),
            rope_parameters=st.sampled_from([LINEAR | {"factor": 3.5}, {"rope_type": "default", "rope_theta": 7.0}]),
        )
    optional |= dict(tie_word_embeddings=flags, dtype=dtypes, torch_dtype=dtypes, eos_token_id=st.just(0))
    for key, values in optional.items():
        value = draw(maybe(values))
        if value != "absent" and not (key == "activation_function" and value is None):
            config[key] = value
    return {"model_type": model_type, "vocab_size": draw(sizes), **config}


@settings(deadline=None, max_examples=300)
@given(configs())
def test_random(hf):
    try:
        planner = ModelSpec.from_hf(hf)
    except ValueError as error:  # then the engine says the same
        with pytest.raises(ValueError, match="layer_types has sliding_attention"):
            ModelConfig.from_hf(hf)
        assert "layer_types has sliding_attention" in str(error)
        return
    assert planner.is_known
    check_agreement(hf)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 8}, "mistral with a mixture of experts is not supported"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"attn_output_gate": True}, "a gate on attention's output"),
        ({"global_head_dim": 512}, "layers of two shapes"),
    ],
)
def test_what_only_the_planner_reads(changes, message):
    hf = next(hf for hf in PUBLISHED if hf["model_type"] == "mistral") | changes
    assert ModelSpec.from_hf(hf)
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(hf)
