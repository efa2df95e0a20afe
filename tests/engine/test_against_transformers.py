"""The engine against transformers, an implementation that shares no code with it."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.checkpoints import GPT2, LLAMA, VOCAB, build, expected_logits, rope
from helpers.engines import LogitsRecorder, make_engine, run_to_the_end

from minivllm import LLM
from minivllm.loading.weights import load_model
from minivllm.sampling_params import SamplingParams

CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "llama": lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=rope()),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA, rope_parameters=rope()),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=16, rope_parameters=rope()),
}
RUNS = {
    "paged": {"num_blocks": 64, "enable_prefix_caching": False},
    "chunked": {"num_blocks": 64, "max_num_batched_tokens": 7, "max_num_seqs": 4},
    "cached": {"num_blocks": 64},
    "preempted": {"num_blocks": 17, "max_num_seqs": 4},
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request, tmp_path_factory):
    """(transformers' model, ours): a small random checkpoint, saved by the one and loaded by the other."""
    oracle = build(CONFIGS[request.param]())
    folder = tmp_path_factory.mktemp(request.param)
    oracle.save_pretrained(folder)
    return oracle, load_model(folder)


@pytest.mark.parametrize("run", list(RUNS))
def test_logits_at_every_position(pair, run):
    oracle, loaded = pair
    engine = make_engine(loaded.model, loaded.config, block_size=4, **RUNS[run])
    recorder = LogitsRecorder(engine)
    shared = [(7 * j + 3) % VOCAB for j in range(21)]
    for i in range(4):
        prompt = shared + [(11 * i + 5 * j) % VOCAB for j in range(4 + 3 * i)]
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=12, temperature=0))
    run_to_the_end(engine)

    events = list(engine.event_log)
    assert run != "chunked" or max(max(e.scheduled.values()) for e in events) == 7
    assert run != "cached" or max(max(e.hits.values(), default=0) for e in events) == 20
    assert run != "preempted" or any(e.preempted for e in events)
    for request_id, rows in recorder.logits.items():
        expected = expected_logits(oracle, torch.tensor(recorder.requests[request_id].token_ids))
        got = torch.stack([rows[position] for position in sorted(rows)])
        # A cached prefix is not computed again, so its positions have no logits of this request.
        torch.testing.assert_close(got, expected[sorted(rows)], atol=1e-4, rtol=0)


CHATS = [
    "What is the capital of Italy?",
    "Write one sentence about the sea.",
    "List three fruits.",
    "What is 12 plus 30?",
    "Explain a hash table to a child.",
    "Who wrote Hamlet?",
    "Give me a synonym of 'fast'.",
    "Translate 'good morning' into French.",
]
TEXTS = [
    "The KV cache stores",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,",
    "Water boils at 100 degrees because",
    "In 1969, the first human being",
]


def test_smollm2_greedy_tokens():
    """16 prompts x 64 greedy tokens, equal up to the first one whose two likeliest are within 1e-3.

    Given equal tokens before it, each of ours must be the argmax of transformers' logits: one forward pass over
    prompt and output shows that for all 64 at once.
    """
    llm = LLM("smollm2-135m", max_model_len=512, max_num_batched_tokens=256, max_num_seqs=16)
    prompts = [
        llm.tokenizer.encode(llm.tokenizer.apply_chat_template([{"role": "user", "content": text}]), False)
        for text in CHATS
    ] + [llm.tokenizer.encode(text) for text in TEXTS]
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    oracle = transformers_copy(llm)

    compared = []
    for output in outputs:
        tokens = output.outputs[0].token_ids
        ids = torch.tensor(output.prompt_token_ids + tokens)
        with torch.inference_mode():
            logits = oracle(ids[None]).logits[0, len(output.prompt_token_ids) - 1 : -1]
        best = logits.topk(2, dim=-1)
        close = (best.values[:, 0] - best.values[:, 1] < 1e-3).nonzero().flatten().tolist()
        until = close[0] if close else len(tokens)
        assert tokens[:until] == best.indices[:until, 0].tolist(), output.prompt
        compared.append(until)
    print(f"{len(compared)} prompts; tokens compared: {compared}")
    assert len(compared) == 16 and sum(compared) > 0.9 * 16 * 64


def transformers_copy(llm: LLM) -> torch.nn.Module:
    """transformers' Llama with SmolLM2's weights (tests/models shows that they are the GGUF file's)."""
    c = llm.model_config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    tensors = dict(load_model("smollm2-135m").model.named_parameters())  # the engine's own are packed
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are no weights, so meta lost them
    model.tie_weights()
    return model.eval()
