"""GGUF files made by hand: what a damaged or hostile one can hold ends in a ValueError that names the file."""

import json
import struct

import pytest
import torch
from helpers.vocabularies import byte_level

from minivllm.loading.gguf_file import GGUFFile

UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 6, 7, 8, 9, 10


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(item) -> bytes:
    """Type and value of a metadata field."""
    if isinstance(item, bytes):
        return item
    if isinstance(item, bool):
        return struct.pack("<I?", BOOL, item)
    if isinstance(item, int):
        return struct.pack("<Iq", UINT64 + 1, item)
    if isinstance(item, float):
        return struct.pack("<If", FLOAT32, item)
    if isinstance(item, str):
        return struct.pack("<I", STRING) + string(item)
    entries = [value(entry) for entry in item]
    kind = entries[0][:4] if entries else struct.pack("<I", UINT32)
    return struct.pack("<I", ARRAY) + kind + struct.pack("<Q", len(entries)) + b"".join(e[4:] for e in entries)


def fields() -> dict:
    vocabulary = byte_level()._backend
    merges = json.loads(vocabulary.to_str())["model"]["merges"]
    tokens = [vocabulary.id_to_token(i) for i in range(vocabulary.get_vocab_size())]
    return {
        "general.architecture": "llama",
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 16,
        "llama.block_count": 1,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.rope.dimension_count": 4,
        "llama.context_length": 64,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


def tensor(name="output_norm.weight", shape=(8,), kind=0, offset=0) -> bytes:
    dimensions = b"".join(struct.pack("<Q", size) for size in shape)
    return string(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, offset)


def write(path, metadata, tensors=None, data=bytes(4096)):
    tensors = [tensor()] if tensors is None else tensors
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(string(key) + value(item) for key, item in metadata.items()) + b"".join(tensors)
    path.write_bytes(header + data)
    return path


def read(path):
    file = GGUFFile(path)
    return file.hf_config(), file.tokenizer(), dict(file.hf_tensors())


def test_a_sound_file(tmp_path):
    config, tokenizer, tensors = read(write(tmp_path / "x.gguf", fields()))
    assert config["hidden_size"] == 8 and config["eos_token_id"] == 1
    assert tokenizer.eos_token_id == 1 and tokenizer.decode(tokenizer.encode("the fox")) == "the fox"
    assert torch.equal(tensors["model.norm.weight"], torch.zeros(8))


@pytest.mark.parametrize("key", [key for key in fields() if key != "tokenizer.chat_template"])
def test_each_field_missing_or_of_another_type(key, tmp_path):
    metadata = fields()
    path = tmp_path / "x.gguf"
    for wrong in (None, "x", [], ["x"], [[1]], b"\x63\0\0\0", -5, float("nan")):
        changed = {k: v for k, v in metadata.items() if k != key} | ({} if wrong is None else {key: wrong})
        write(path, changed)
        try:
            config = read(path)[0]
        except ValueError as error:
            assert str(error).startswith(str(path))
        else:  # a number where a number is expected: the config's own check refuses it
            assert isinstance(wrong, (int, float)) or key in ("tokenizer.ggml.merges", "tokenizer.ggml.token_type")
            assert config
    write(path, {k: v for k, v in metadata.items() if k != key})
    with pytest.raises(ValueError, match=rf"^{path}.*({key}|architecture None)"):
        read(path)


@pytest.mark.parametrize("alignment", [0, -32, "32", 1.5, [32], True])
def test_alignment(alignment, tmp_path):
    path = write(tmp_path / "x.gguf", fields() | {"general.alignment": alignment})
    with pytest.raises(ValueError, match=rf"^{path} is damaged .*general\.alignment is .*, expected a number of bytes"):
        GGUFFile(path)


def test_arrays_in_arrays(tmp_path):
    nested = struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 5000 + struct.pack("<IQ", UINT32, 0)
    path = write(tmp_path / "x.gguf", fields() | {"x": nested})
    with pytest.raises(ValueError, match=rf"^{path} is damaged .*holds arrays in arrays, more than 4 deep"):
        GGUFFile(path)


@pytest.mark.parametrize(
    "bad",
    [
        tensor(kind=99),
        tensor(shape=()),
        tensor(shape=(0,)),
        tensor(shape=(2**62, 2**62)),
        tensor(offset=2**63),
        tensor(name="no weight at all"),
        tensor(name="blk.0.attn_q.weight", shape=(8, 7)),
        tensor(name="blk.0.attn_q.weight", shape=(8,)),
        tensor(shape=(7,), kind=8),
    ],
    ids=["type", "scalar", "empty", "huge", "offset", "name", "rows", "vector", "part of a block"],
)
def test_tensors_that_cannot_be(bad, tmp_path):
    path = write(tmp_path / "x.gguf", fields(), [bad])
    try:
        tensors = read(path)[2]
    except ValueError as error:
        assert str(error).startswith(str(path))
    else:
        assert tensors["model.norm.weight"].shape in ((0,), ())  # of the wrong shape: told when it is copied


@pytest.mark.parametrize("count", [2**63, 2**64 - 1, 10**7])
def test_counts_beyond_the_file(count, tmp_path):
    for position in (8, 16, 24):  # tensors, fields, length of the first name
        path = write(tmp_path / "x.gguf", fields())
        data = bytearray(path.read_bytes())
        data[position : position + 8] = struct.pack("<Q", count)
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"^{path} is damaged or not a GGUF file"):
            GGUFFile(path)
