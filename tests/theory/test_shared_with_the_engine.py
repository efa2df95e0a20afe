"""Formulas of which the engine has no copy, and the files that planner and loader both look for."""

import json
import os

import pytest
import torch

from minivllm.checkpoint_files import checkpoint_bytes, weight_files
from minivllm.config import CacheConfig
from minivllm.executor import memory
from minivllm.files import read_json
from minivllm.model_config import ModelConfig, RopeConfig
from minivllm.theory import list_models, sizing
from minivllm.theory.dtypes import DTYPES, KV_DTYPES, WEIGHT_BITS
from minivllm.theory.kv_layout import kv_layout
from minivllm.units import cdiv

SMALL = ModelConfig("llama", 99, 48, 3, 6, 2, 8, 80, 256, "silu", 1e-6, True, rope=RopeConfig())


def test_dtypes_are_torchs():
    assert {name: getattr(torch, name).itemsize for name in DTYPES} == DTYPES
    for name, size in DTYPES.items():
        assert KV_DTYPES[name].bits == WEIGHT_BITS[name] == 8 * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_bytes_of_a_block(dtype, block_size):
    ours = sizing.kv_bytes_per_block(SMALL.spec, block_size, dtype)
    assert ours == 2 * 3 * 2 * 8 * DTYPES[dtype] * block_size
    assert ours == memory.kv_bytes_per_block(SMALL, block_size, getattr(torch, dtype))


def test_bytes_of_a_block_are_vllms_where_all_layers_are_alike():
    for spec in list_models():
        if len(set(spec.layer_types)) == 1:
            assert sizing.kv_bytes_per_block(spec) == kv_layout(spec).block_bytes


def test_concurrency_is_one_formula():
    pool = CacheConfig(num_blocks=1001, block_size=16)
    found = sizing.concurrency(pool.num_blocks, cdiv(100, pool.block_size))
    assert found == pool.max_concurrency(100) == kv_layout(SMALL.spec).max_concurrency(1001, 100)
    assert found == sizing.max_concurrency(sizing.num_kv_tokens(1001), 100)


class TestFiles:
    def test_one_file_or_shards(self, tmp_path):
        with pytest.raises(ValueError, match="has no weights: expected model"):
            weight_files(tmp_path)
        shards = [tmp_path / f"part{i}" for i in (1, 2)]
        for shard in shards:
            shard.write_bytes(bytes(20_000))
        index = {"weight_map": {"a": "part1", "b": "part2", "c": "part1"}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        assert weight_files(tmp_path) == shards
        assert checkpoint_bytes(tmp_path) == 40_000
        (tmp_path / "model.safetensors").write_bytes(bytes(30_000))
        assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
        assert checkpoint_bytes(tmp_path) == 30_000

    @pytest.mark.parametrize(
        "content", ['{"weight_map": {"a": "gone"}}', '{"weight_map": {"a": "../b"}}', "{}", "[]", "{"]
    )
    def test_a_damaged_index(self, tmp_path, content):
        path = tmp_path / "model.safetensors.index.json"
        path.write_text(content)
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
            weight_files(tmp_path)
        assert checkpoint_bytes(tmp_path) is None

    def test_a_pipe_is_no_json(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        assert read_json(tmp_path / "pipe") is None
