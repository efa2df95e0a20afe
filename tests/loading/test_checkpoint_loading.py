"""Every layout in which a checkpoint comes, and every way in which it can be wrong."""

import json
import os
import pickle
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from helpers.checkpoints import GPT2, LLAMA, build, edit_config, expected_logits, our_logits, rope, token_ids
from helpers.vocabularies import byte_level
from safetensors.torch import load_file, save_file

from minivllm.loading import weights
from minivllm.loading.weights import load_model
from minivllm.model_config import ModelConfig, RopeConfig
from minivllm.models.gpt2 import GPT2 as OurGPT2
from minivllm.models.llama import Llama

CONFIGS = {
    "gpt2": transformers.GPT2Config(**GPT2),
    "qwen2": transformers.Qwen2Config(**LLAMA, rope_parameters=rope(), tie_word_embeddings=True),
    "llama": transformers.LlamaConfig(**LLAMA, rope_parameters=rope()),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> (folder with one model.safetensors, logits of `token_ids()`)."""
    made = {}
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(name)
        model = build(config)
        model.save_pretrained(folder)
        made[name] = (folder, expected_logits(model, token_ids()))
    return made


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy that a test may spoil: `checkpoint(name) -> (folder, expected logits)`."""

    def copy(name):
        folder, logits = saved[name]
        return shutil.copytree(folder, tmp_path / name), logits

    return copy


def check(folder, logits):
    loaded = load_model(folder)
    torch.testing.assert_close(our_logits(loaded.model, token_ids()), logits, atol=1e-4, rtol=0)
    return loaded


def rewrite(folder, change):
    """Apply `change` to the tensors of a folder's model.safetensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# --- Layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_sharded_safetensors(name, tmp_path):
    model = build(CONFIGS[name])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(tmp_path, expected_logits(model, token_ids()))


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("buffers", [False, True])
def test_gpt2_spellings(prefix, buffers, checkpoint):
    """Older GPT-2 files have no `transformer.` prefix and carry the causal mask as `attn.bias`."""
    folder, logits = checkpoint("gpt2")

    def respell(tensors):
        plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        if buffers:
            for layer in range(2):
                plain[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
                plain[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        tensors.clear()
        tensors.update({prefix + name: tensor for name, tensor in plain.items()})

    rewrite(folder, respell)
    assert any(name.startswith("transformer.") for name in load_file(folder / "model.safetensors")) == bool(prefix)
    check(folder, logits)


def test_llama_with_rotary_buffers_and_tied_copy(checkpoint):
    folder, logits = checkpoint("qwen2")

    def add(tensors):
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(folder, add)
    loaded = check(folder, logits)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


def test_what_comes_with_the_model(checkpoint):
    folder, _ = checkpoint("llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2], "temperature": 0.6, "top_p": 0.9}')
    loaded = load_model(str(folder))
    assert isinstance(loaded.model, Llama) and not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.name == str(folder)
    assert loaded.tokenizer is None
    assert loaded.config.rope.theta == 777.0
    assert loaded.generation_config.eos_token_ids == (7, 2)
    assert (loaded.generation_config.temperature, loaded.generation_config.top_k) == (0.6, None)


def test_dtype(checkpoint):
    folder, logits = checkpoint("llama")
    for dtype in ("bfloat16", torch.bfloat16):
        model = load_model(folder, dtype=dtype).model
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    rewrite(folder, lambda tensors: tensors.update({name: tensor.half() for name, tensor in tensors.items()}))
    edit_config(folder, dtype="float16")
    model = load_model(folder).model  # on the CPU "auto" is float32, whatever the file has
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(our_logits(model, token_ids()), logits, atol=0.05, rtol=0)
    config = load_model(folder).config
    assert weights._choose_dtype("auto", config, torch.device("cuda")) == torch.float16
    with pytest.raises(ValueError, match="dtype 'int8' is not supported; supported: auto, float32, float16, bfloat16"):
        load_model(folder, dtype="int8")
    for dtype in ([], None, 5, torch.int8):
        refused(folder, f"dtype {re.escape(repr(dtype))} is not supported; supported: auto, float32", dtype=dtype)


def test_unusable_device(checkpoint):
    folder, _ = checkpoint("gpt2")
    for device in ("banana", "meta", 0, None, [], torch.device("meta")):
        refused(folder, f"device {re.escape(repr(device))} cannot be used here; usable: 'cpu'", device=device)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device 'cuda' cannot be used here.*; usable: 'cpu'"):
            load_model(folder, device="cuda")


def test_random_weights_from_a_config():
    config = ModelConfig("llama", 50, 32, 2, 4, 2, 8, 64, 128, "silu", 1e-6, True, RopeConfig(), eos_token_ids=(3,))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = load_model(config), load_model(config, seed=0), load_model(config, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    logits = our_logits(one.model, torch.arange(9))
    assert torch.equal(logits, our_logits(same.model, torch.arange(9)))
    assert not torch.equal(logits, our_logits(other.model, torch.arange(9)))
    assert one.tokenizer is None and one.generation_config.eos_token_ids == (3,)
    assert not any(p.requires_grad for p in one.model.parameters()) and not one.model.training


def test_tiny():
    """The embedded model, against transformers reading the same folder."""
    loaded = load_model("tiny")
    assert isinstance(loaded.model, OurGPT2) and loaded.name == "tiny"
    text = "The ship left the harbour at 10:45."
    ids = loaded.tokenizer.encode(text)
    assert ids == transformers.AutoTokenizer.from_pretrained(weights.TINY_FOLDER).encode(text)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(weights.TINY_FOLDER).eval()
    ids = torch.tensor(ids)
    torch.testing.assert_close(our_logits(loaded.model, ids), expected_logits(oracle, ids), atol=1e-4, rtol=0)
    assert loaded.tokenizer.eos_token_id in loaded.generation_config.eos_token_ids


@pytest.mark.parametrize("name", CONFIGS)
def test_no_random_numbers_for_weights_that_are_loaded(name, saved, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were filled with random numbers first")

    for method in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, method, refuse)
    check(*saved[name])


# --- What is refused ------------------------------------------------------------------------------------------------


def refused(model, message, **options):
    with pytest.raises(ValueError, match=message):
        load_model(model, **options)


def test_unknown_names(tmp_path):
    accepted = "A model is one of tiny, smollm2-135m, a local folder with config.json and weights, or a hub id such as"
    refused("tinny", f"unknown model 'tinny'.* Did you mean 'tiny'\\? {accepted}")
    refused("SmolLM2-135", "Did you mean 'smollm2-135m'")
    refused("./no/such/folder", f"unknown model './no/such/folder': no such folder. {accepted}")
    refused(tmp_path / "nothing", "no such folder")
    refused(tmp_path, rf"{tmp_path} has no config\.json")


@pytest.mark.parametrize("model", [None, 5, b"tiny", ["tiny"], 1.5])
def test_a_model_that_is_no_name(model):
    refused(model, rf"model is {re.escape(repr(model))}, expected a name or a folder\. A model is one of tiny, ")


@pytest.mark.parametrize(
    "model, message",
    [
        ("", r"model is an empty name; the current folder is '\.'\. A model is one of tiny"),
        ("  ", "model is an empty name"),
        ("x" * 5000, "unknown model 'x{100}': File name too long. A model is one of tiny"),
        ("~nosuchuser/foo", "unknown model '~nosuchuser/foo': .*home directory.* A model is one of tiny"),
        ("a\0b", "unknown model"),
    ],
)
def test_names_that_no_folder_can_have(model, message):
    refused(model, message)


def test_tiny_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(weights, "TINY_FOLDER", tmp_path / "tiny")
    refused("tiny", f"tiny comes with a checkout of this repository, in {tmp_path}/tiny, and .* git restore data")


def test_a_file_is_not_a_folder(checkpoint):
    folder, _ = checkpoint("gpt2")
    refused(folder / "model.safetensors", "no such folder")


def test_hub_without_network(monkeypatch, tmp_path):
    """A hub id without a network, and without a cached copy, says so and what works instead."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    def unreachable(hub_id, **options):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    refused(
        "Qwen/Qwen2.5-0.5B",
        "'Qwen/Qwen2.5-0.5B' is neither a local folder nor in the hub's cache, and the hub "
        "cannot be reached. Without a network, use one of tiny, smollm2-135m or a folder",
    )

    def not_found(hub_id, **options):
        response = type("Response", (), dict(headers={}, request=None, status_code=404))()
        raise RepositoryNotFoundError("404", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", not_found)
    refused("gpt3", "unknown model 'gpt3': no such folder, and no such hub model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("gpt2", "pip install huggingface_hub")


def test_hub_download(saved, monkeypatch, tmp_path):
    """Weights come as safetensors; of a repository that has none, nothing is downloaded but configs."""
    import huggingface_hub

    asked = []

    def download(hub_id, allow_patterns):
        asked.append((hub_id, allow_patterns))
        return str(saved["gpt2"][0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for hub_id in ("gpt2", "HuggingFaceTB/SmolLM2-135M"):
        assert load_model(hub_id).name == hub_id
        assert asked == [(hub_id, ["*.json", "*.jinja", "model*.safetensors"])]
        asked.clear()
    (folder := tmp_path / "bin").mkdir()
    monkeypatch.setitem(saved, "gpt2", (folder, None))
    refused("gpt2", "has no config")
    (folder / "config.json").write_text("{}")
    refused(
        "openai/gpt2", "bin has no weights: .* are not opened here; .* converts them: python -c .* openai/gpt2 gpt2$"
    )
    assert [patterns for _, patterns in asked] == [["*.json", "*.jinja", "model*.safetensors"]] * 2


def test_damaged_json(checkpoint):
    folder, _ = checkpoint("llama")
    config = folder / "config.json"
    config.write_text(config.read_text()[:-20])
    refused(folder, r"config\.json is not valid JSON")
    config.write_text("[1]")
    refused(folder, r"config\.json holds a JSON list, not an object\. Correct it, or get it again")
    config.write_text("[" * 10**5)
    refused(folder, r"config\.json is nested too deeply to be read")
    config.write_bytes(b'{"a": "\xe9"}')
    refused(folder, r"config\.json cannot be read as UTF-8 text")


def test_values_are_refused_with_their_file(checkpoint):
    folder, _ = checkpoint("llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": 99}')
    refused(
        folder, rf"^{folder}/generation_config\.json: 'eos_token_id' is 99; expected a token id from 0 to 98 .*get it"
    )
    (folder / "generation_config.json").write_text('{"top_p": "x"}')
    refused(folder, rf"^{folder}/generation_config\.json: top_p must be .*, got 'x'")
    (folder / "generation_config.json").unlink()
    for changes, message in (
        (dict(eos_token_id=-1), "'eos_token_id' is -1; expected a token id from 0 to 98"),
        (dict(hidden_act="mish"), "activation 'mish' is not supported"),
        (dict(rms_norm_eps=None), "'rms_norm_eps' is None; expected a small number above 0"),
    ):
        edit_config(folder, **{"eos_token_id": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6, **changes})
        refused(folder, rf"^{folder}/config\.json: {message}.* Correct the file, or ")


def test_an_end_token_of_the_tokenizer_beyond_the_vocabulary_is_never_generated(checkpoint):
    folder, _ = checkpoint("llama")
    tokenizer = byte_level()
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer._backend.id_to_token(300)}))
    loaded = load_model(folder)
    assert loaded.tokenizer.eos_token_id == 300 and loaded.generation_config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(n_positions=2**31 - 1),
            r"needs 256\.0 GiB for its weights in float32, and cpu has .* GiB \(largest: wpe",
        ),
        (
            dict(vocab_size=2**31 - 1),
            r"needs 256\.0 GiB .*largest: wte\.weight \[2147483647, 32\].*or use another model",
        ),
        (dict(n_embd=2**31 - 4), "the sizes are too large for any machine"),
    ],
)
def test_sizes_beyond_this_machine(changes, message, checkpoint, monkeypatch):
    folder, _ = checkpoint("gpt2")
    monkeypatch.setattr(weights, "total_memory", lambda device: 64 * 2**30)
    edit_config(folder, **changes)
    refused(folder, rf"^{folder}/config\.json: .*{message}")


def test_memory_that_the_allocator_does_not_get(checkpoint, monkeypatch):
    folder, _ = checkpoint("gpt2")
    monkeypatch.setattr(weights, "total_memory", lambda device: None)
    edit_config(folder, vocab_size=2**31 - 1, n_embd=2**16)
    refused(
        folder,
        r"not enough free memory on cpu for wte\.weight \(524,288\.0 GiB\): close other programs\..*another model",
    )


def test_a_random_model_beyond_this_machine(monkeypatch):
    monkeypatch.setattr(weights, "total_memory", lambda device: 64 * 2**30)
    config = ModelConfig("gpt2", 2**31 - 1, 32, 2, 4, 4, 8, 64, 128, "gelu", 1e-6, True)
    refused(config, "needs 256.0 GiB for its weights in float32, and cpu has 64.0 GiB")


def test_unknown_architecture(checkpoint):
    folder, _ = checkpoint("llama")
    edit_config(folder, model_type="phi3", architectures=["Phi3ForCausalLM"])
    refused(folder, r"model_type 'phi3' \(architectures: \['Phi3ForCausalLM'\]\) is not supported; supported: gpt2, ")


def test_unknown_rope_type(checkpoint):
    folder, _ = checkpoint("llama")
    edit_config(folder, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})
    refused(folder, "rope type 'longrope' is not supported; supported: default, linear, llama3, yarn")


def test_unknown_activation(checkpoint):
    folder, _ = checkpoint("llama")
    edit_config(folder, hidden_act="mish")
    refused(folder, "activation 'mish' is not supported; supported: gelu, ")


def test_no_weights(checkpoint):
    folder, _ = checkpoint("llama")
    (folder / "model.safetensors").unlink()
    refused(folder, "has no weights: expected model.safetensors, or shards with their index")


@pytest.mark.parametrize("cut", [5, 200, -8])
def test_damaged_safetensors(cut, checkpoint):
    folder, _ = checkpoint("llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    refused(folder, r"model\.safetensors is damaged or not a safetensors file")


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (self.marker, "w"))


@pytest.mark.parametrize("plain_pickle", [True, False])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "shard of an index", "model.safetensors"])
def test_no_pickle_is_ever_opened(name, plain_pickle, checkpoint, tmp_path, monkeypatch):
    folder, _ = checkpoint("llama")
    (folder / "model.safetensors").unlink()
    file = "model-1.bin" if name == "shard of an index" else name
    if name == "shard of an index":
        index = {"weight_map": {"model.norm.weight": file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    marker, path = tmp_path / "it-ran", folder / file
    if plain_pickle:
        path.write_bytes(pickle.dumps({"x": Payload(str(marker))}, protocol=2))
    else:
        torch.save({"x": Payload(str(marker))}, path)

    def opened(*args, **kwargs):
        raise AssertionError("a pickle was opened")

    for module, function in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, function, opened)
    refused(folder, "pickles, which can run code" if file == "pytorch_model.bin" else "damaged or not a safetensors")
    assert not marker.exists()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_command_that_converts_a_pickle(name, checkpoint):
    """The error for a folder with a pytorch_model.bin gives a command that makes the folder loadable."""
    folder, logits = checkpoint(name)
    folder = folder.rename(folder.with_name("with 'quotes' and spaces"))
    (folder / "model.safetensors").unlink()
    torch.save(build(CONFIGS[name]).state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no weights: .* pickles, .* converts them: python -c ") as error:
        load_model(folder)
    python, option, code, *arguments = shlex.split(str(error.value).partition("converts them: ")[2])
    assert (python, option) == ("python", "-c")
    with pytest.MonkeyPatch.context() as patch:  # in this process, where transformers is imported already
        patch.setattr(sys, "argv", ["-c", *arguments])
        exec(code, {})
    check(folder, logits)


def test_index_that_names_missing_or_outside_files(checkpoint):
    folder, _ = checkpoint("llama")
    whole = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    outside = whole.rename(folder.parent / "outside.safetensors")
    for file in ("model-00001-of-00002.safetensors", "../outside.safetensors", str(outside), 7):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
        refused(folder, f"index.json names files that are not beside it: {file}")
    for nothing in ("{}", '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": "abc"}'):
        index.write_text(nothing)
        refused(
            folder, r"index.json names files that are not beside it: none at all .*; expected 'weight_map': \{tensor"
        )


def test_wrong_shape(checkpoint):
    folder, _ = checkpoint("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name][:70].clone()}))
    refused(
        folder,
        rf"does not fit its config\.json: {name} in model\.safetensors is float32 of shape \[70, 48\], "
        r"expected shape \[80, 48\]",
    )


def test_config_of_another_size(checkpoint):
    """All that does not fit is told at once."""
    folder, _ = checkpoint("llama")
    edit_config(folder, num_key_value_heads=3, num_hidden_layers=3)
    with pytest.raises(ValueError) as error:
        load_model(folder)
    message = str(error.value)
    assert "model.layers.0.self_attn.k_proj.weight in model.safetensors is float32 of shape [16, 48]" in message
    assert "9 missing: model.layers.2.input_layernorm.weight, " in message and message.endswith(", ...")


def test_missing_and_unexpected(checkpoint):
    folder, _ = checkpoint("llama")

    def spoil(tensors):
        tensors["score.weight"] = tensors.pop("lm_head.weight")

    rewrite(folder, spoil)
    refused(folder, "1 missing: lm_head.weight; 1 unexpected: score.weight")


def test_integer_tensor(checkpoint):
    folder, _ = checkpoint("llama")
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    refused(folder, r"model\.norm\.weight in model\.safetensors is int8 of shape \[48\], expected float32, bfloat16 or")


def test_twice(checkpoint):
    folder, _ = checkpoint("gpt2")
    rewrite(folder, lambda tensors: tensors.update({"ln_f.bias": torch.zeros(32)}))
    refused(folder, r"ln_f\.bias is there twice")


def test_tied_head_that_differs(checkpoint):
    folder, _ = checkpoint("qwen2")
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(99, 48)}))
    refused(folder, "lm_head.weight differs from the token embedding, though tie_word_embeddings says they are one")
    edit_config(folder, tie_word_embeddings=False)
    load_model(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite(value, dtype, checkpoint):
    folder, _ = checkpoint("llama")

    def spoil(tensors):
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)
        tensors["model.layers.1.mlp.down_proj.weight"][40, 70] = value

    rewrite(folder, spoil)
    refused(
        folder, r"^model\.layers\.1\.mlp\.down_proj\.weight in model\.safetensors holds NaN or infinite values\. Down"
    )


def test_large_weights_are_no_infinite_ones(checkpoint):
    """Their sum is infinite, they are not; float16 does not hold them."""
    folder, _ = checkpoint("llama")
    rewrite(folder, lambda tensors: tensors["model.norm.weight"].fill_(3e38))
    load_model(folder)
    refused(
        folder, r"model\.norm\.weight in model\.safetensors has values beyond float16: load float32", dtype="float16"
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.uint8, torch.bool])
def test_other_dtypes_of_weights(dtype, checkpoint):
    folder, _ = checkpoint("llama")
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48).to(dtype)}))
    name = str(dtype).removeprefix("torch.")
    refused(
        folder, rf"{name} of shape \[48\], expected float32, bfloat16 or float16 \(quantised .* float64: save it as"
    )


def test_a_model_without_room_for_an_answer(checkpoint):
    folder, _ = checkpoint("gpt2")
    edit_config(folder, n_positions=1)
    refused(folder, rf"^{folder}/config\.json: the longest sequence is 1 tokens, .*; a prompt and its first .* need 2")
    refused(ModelConfig("gpt2", 50, 32, 2, 4, 4, 8, 64, 1, "gelu", 1e-6, True), "the longest sequence is 1 tokens")
    folder, _ = checkpoint("llama")
    edit_config(folder, sliding_window=1)
    refused(folder, "the longest sequence is 1 tokens")


def test_end_tokens(checkpoint):
    """generation_config.json's where it has any, else config.json's; the tokenizer's own first."""
    folder, _ = checkpoint("llama")
    tokenizer = byte_level()
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer._backend.id_to_token(7)}))
    generation_config = folder / "generation_config.json"
    for text, expected in (
        (None, (7, 5)),
        ("{}", (7, 5)),
        ('{"eos_token_id": null}', (7, 5)),
        ('{"eos_token_id": []}', (7, 5)),
        ('{"eos_token_id": 9}', (7, 9)),
        ('{"eos_token_id": [9, 7, 8]}', (7, 9, 8)),
    ):
        edit_config(folder, eos_token_id=5)
        generation_config.unlink(missing_ok=True)
        if text is not None:
            generation_config.write_text(text)
        assert load_model(folder).generation_config.eos_token_ids == expected, text
    (folder / "tokenizer.json").unlink()
    assert load_model(folder).generation_config.eos_token_ids == (9, 7, 8)


# --- Files that are more, or something else, than a file of a model --------------------------------------------------


def test_files_beyond_their_limit(checkpoint):
    folder, _ = checkpoint("llama")
    for name, size, limit in (
        ("tokenizer.json", 100 * 10**6 + 1, 100),
        ("tokenizer_config.json", 10**7 + 1, 10),
        ("generation_config.json", 10**7 + 1, 10),
        ("config.json", 10**7 + 1, 10),
    ):
        byte_level()._backend.save(str(folder / "tokenizer.json"))
        kept = (folder / name).read_bytes() if (folder / name).exists() else None
        with (folder / name).open("wb") as file:
            file.truncate(size)  # takes no disk
        refused(
            folder, rf"^{folder}/{name} is larger than {limit} MB, the most that is read of such a file\. Correct it"
        )
        (folder / name).unlink() if kept is None else (folder / name).write_bytes(kept)
    (folder / "model.safetensors").unlink()
    with (folder / "model.safetensors.index.json").open("wb") as file:
        file.truncate(100 * 10**6 + 1)
    refused(folder, r"index\.json is larger than 100 MB")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "/proc/self/mem"])
def test_files_that_are_no_files(kind, name, checkpoint):
    """Nothing is read without end, and nothing but a ValueError comes out. A file that is optional may be missing."""
    folder, logits = checkpoint("llama")
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else kind)
    if kind != "/proc/self/mem" and name in ("generation_config.json", "tokenizer.json"):
        check(folder, logits)
    else:
        refused(folder, f"{folder}(/{re.escape(name)}| has no (config.json|weights))")


@pytest.mark.parametrize(
    "shard", ["x" * 5000, "a\0b", "\ud800", "e\x1b[31mvil", "../" * 2000, "."], ids=lambda shard: ascii(shard[:9])
)
def test_names_of_shards_that_no_file_has(shard, checkpoint):
    folder, _ = checkpoint("llama")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(ValueError, match="names files that are not beside it") as error:
        load_model(folder)
    assert str(error.value).isprintable() and len(str(error.value)) < 1000
    str(error.value).encode()


def test_far_too_many_shards(checkpoint):
    folder, _ = checkpoint("llama")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {str(i): f"{i}.safetensors" for i in range(300_000)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    start = time.process_time()
    refused(folder, r"index\.json names 300,000 files, the most is 10,000\. Get it again")
    assert time.process_time() - start < 5


def test_messages_can_be_printed(checkpoint):
    """Names that come from files do not reach a terminal as they are."""
    folder, _ = checkpoint("llama")
    evil = "\x1b[2J\u202e\n\x07"
    rewrite(folder, lambda tensors: tensors.update({evil: torch.ones(1)}))
    for spoil, message in (
        (lambda: None, r"1 unexpected: \\x1b\[2J\\u202e\\n\\x07$"),
        (lambda: edit_config(folder, model_type=evil), r"\\x1b\[2J"),
        (lambda: edit_config(folder, model_type="llama", layer_types=[evil]), r"\\x1b\[2J"),
        (lambda: edit_config(folder, layer_types=["\ud800"]), r"\\ud800"),
        (lambda: folder.rename(folder.parent / evil), r"\\x1b\[2J"),
    ):
        spoil()
        with pytest.raises(ValueError, match=message) as error:
            load_model(folder if folder.exists() else folder.parent / evil)
        assert str(error.value).isprintable()


def test_a_number_of_5000_digits_names_its_file(checkpoint):
    folder, _ = checkpoint("llama")
    for name in ("generation_config.json", "config.json"):
        (folder / name).write_text('{"vocab_size": %s}' % ("9" * 5000))
        refused(folder, rf"^{folder}/{name} holds a number of more than 4,300 digits\. Correct it, or get it again")


def test_a_name_as_a_path_and_names_misspelt(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    assert load_model(Path("tiny")).name == "tiny"

    def unreachable(hub_id, **options):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    for name in ("tyni", "Tyni"):
        refused(name, r"the hub cannot be reached\. Did you mean 'tiny'\?")
    with pytest.raises(ValueError) as error:
        load_model("gpt2")
    assert "Did you mean" not in str(error.value)
    # A local folder wins over the hub, and over `tiny` only as a Path.
    (tmp_path / "tiny").mkdir()
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    refused("gpt2", "gpt2 has no config.json")
    refused(Path("tiny"), "tiny has no config.json")
    load_model("tiny")


def test_biases_that_the_config_does_not_promise(checkpoint):
    folder, _ = checkpoint("qwen2")
    edit_config(folder, model_type="llama")
    refused(folder, r"6 unexpected: model\.layers\.0\.self_attn\.k_proj\.bias")
