"""Write a model of ours in the files that other engines load: the same float32 weights for everybody."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from safetensors.torch import save_file

from minivllm.loading.weights import LoadedModel
from minivllm.model_config import ModelConfig


def hf_config(config: ModelConfig) -> dict:
    """A config.json that transformers and vLLM read."""
    if config.model_type == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": config.vocab_size,
            "n_positions": config.max_position_embeddings,
            "n_embd": config.hidden_size,
            "n_layer": config.num_hidden_layers,
            "n_head": config.num_attention_heads,
            "activation_function": config.hidden_act,
            "layer_norm_epsilon": config.norm_eps,
            "dtype": "float32",
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": "float32",
    }


def write_hf(loaded: LoadedModel, folder: Path) -> Path:
    """config.json and model.safetensors in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(loaded.config)))
    tensors = {name: tensor.contiguous() for name, tensor in dict(loaded.model.named_parameters()).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_f32_gguf(source: Path, target: Path) -> Path:
    """A copy of a GGUF file with every tensor in float32: llama.cpp's own loader, at the precision of the others."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind, *sub = field.types
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub[-1] if sub else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
