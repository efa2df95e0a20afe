"""The planner's blocks against those of the real vLLM 0.30.0, recorded by record_layout.py."""

import gzip
import json
from pathlib import Path

import pytest

from minivllm.theory import ModelSpec
from minivllm.theory.kv_layout import kv_layout

FILE = Path(__file__).parent / "vllm030_layouts.jsonl.gz"
KINDS = {"full": "full_attention", "sliding": "sliding_attention", "linear": "linear_attention"}
with gzip.open(FILE, "rt", encoding="utf-8") as lines:
    ROWS = [json.loads(line) for line in lines]


def model(row):
    """A model with the row's layers; its states have no convolution."""
    return ModelSpec.from_hf(
        {
            "hidden_size": 1024,
            "num_hidden_layers": len(row["layers"]),
            "num_attention_heads": 16,
            "num_key_value_heads": row["num_kv_heads"],
            "head_dim": 64,
            "vocab_size": 10,
            "num_global_key_value_heads": (row["full_heads"] or [None, None])[0],
            "global_head_dim": (row["full_heads"] or [None, None])[1],
            "layer_types": [KINDS[kind] for kind in row["layers"]],
            "sliding_window": row["sliding_window"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
            "linear_key_head_dim": 1,
            "linear_value_head_dim": row["state_elements"],
            "linear_conv_kernel_dim": 1,
            "mamba_ssm_dtype": "float32",
        }
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["seed"])
def test_same_plan(row):
    length, in_flight = row["max_model_len"], row["tokens_in_flight"]
    layout = kv_layout(model(row), row["kv_dtype"], pp=row["pp"], block_size=row["block_size"])
    num_blocks = layout.num_blocks(row["budget_bytes"])
    assert layout.block_size == row["block_size_used"]
    assert len(set(layout.block_sizes.values())) == 1 or row["full_heads"]
    assert (layout.blocks_per_request(length, in_flight) > num_blocks - 1) == row["refused"]
    if not row["refused"]:
        concurrency = layout.max_concurrency(num_blocks, length, in_flight)
        found = num_blocks, sum(layout.num_groups.values()), concurrency, int(concurrency * length)
        assert found == (row["num_blocks"], row["num_groups"], row["max_concurrency"], row["tokens"])
    elif row["pp"] == 1:
        assert layout.longest_request(num_blocks - 1, length, in_flight) == row["longest"]
    else:  # vLLM names what would fit on the first stage that is short, ours what fits on all
        assert layout.longest_request(num_blocks - 1, length, in_flight) <= row["longest"]


def test_the_file_has_every_kind():
    assert len(ROWS) == 300 and sum(row["refused"] for row in ROWS) > 30
    assert sum(row["full_heads"] is not None for row in ROWS) > 50
    assert {frozenset(row["layers"]) for row in ROWS} == {
        frozenset(kinds) for kinds in (["full"], ["sliding"], ["full", "sliding"], ["full", "linear"])
    }
