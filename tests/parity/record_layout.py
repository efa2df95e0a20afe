"""Record what the real vLLM 0.30.0 makes of a KV budget: blocks, concurrency, the longest request.

    python tests/parity/record_layout.py MODEL_FOLDER OUT.jsonl.gz [--scenarios 300]

Run it where vLLM 0.30.0 is installed, as for record.py. Layers are drawn at random: one kind, or full attention beside
windows or states, in stages. Nothing is allocated: vLLM plans with `get_kv_cache_configs`, as at its start.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from tqdm import tqdm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

HEAD_SIZE = 64
DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.uint8}


def random_scenario(seed: int) -> dict:
    rng = random.Random(seed)
    kinds = rng.choice([["full"], ["sliding"], ["full", "sliding"], ["full", "sliding"], ["full", "linear"]])
    period = rng.randrange(2, 7)
    num_layers = rng.randrange(4, 70)
    layers = [kinds[0] if len(kinds) == 1 or (i + 1) % period == 0 else kinds[1] for i in range(num_layers)]
    pp = rng.choice([1, 1, 1, 2, 3])
    scenario = {
        "seed": seed,
        "layers": layers,
        "pp": pp if num_layers >= pp else 1,
        "num_kv_heads": rng.choice([1, 2, 4, 8, 16]),
        "kv_dtype": rng.choice(["bfloat16", "bfloat16", "fp8"]),
        "sliding_window": rng.choice([128, 512, 1000, 1024, 4096]),
        "block_size": rng.choice([16, 16, 32, 64]),
        "state_elements": rng.choice([30_000, 180_000, 500_000]),  # float32
        "max_model_len": rng.choice([100, 2048, 10_000, 32_768, 131_072]),
        "max_num_batched_tokens": rng.choice([256, 2048, 8192]),
        "async_scheduling": rng.random() < 0.5,
        "budget_bytes": int(10 ** rng.uniform(8, 10.8)),
    }
    # Layers with full attention may have heads of their own, as in Gemma-4.
    own = rng.choice([None, (1, 64), (2, 128), (4, 128), (4, 64), (8, 192)]) if len(set(layers)) > 1 else None
    own = None if "linear" in layers else own
    return scenario | {"full_heads": own}


def stages(layers: list[str], pp: int) -> list[list[int]]:
    """Numbers of the layers of each stage: what is left over goes to the last but one and up."""
    sizes = [len(layers) // pp] * pp
    for i in range(2, len(layers) % pp + 2):
        sizes[-i] += 1
    starts = [sum(sizes[:i]) for i in range(pp)]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def spec_of(kind: str, scenario: dict, block_size: int) -> FullAttentionSpec | SlidingWindowSpec | MambaSpec:
    common = {
        "block_size": block_size,
        "num_kv_heads": scenario["num_kv_heads"],
        "head_size": HEAD_SIZE,
        "dtype": DTYPES[scenario["kv_dtype"]],
    }
    if kind == "full" and scenario["full_heads"] is not None:
        common |= dict(zip(("num_kv_heads", "head_size"), scenario["full_heads"], strict=True))
    if kind == "full":
        return FullAttentionSpec(**common)
    if kind == "sliding":
        return SlidingWindowSpec(**common, sliding_window=scenario["sliding_window"])
    page = FullAttentionSpec(**common).page_size_bytes
    return MambaSpec(
        block_size=block_size,
        shapes=((scenario["state_elements"],),),
        dtypes=(torch.float32,),
        page_size_padded=page,
        mamba_cache_mode="align",
    )


def record(model: str, scenario: dict) -> dict:
    block_size = scenario["block_size"]
    if "linear" in scenario["layers"]:  # as platforms/interface.py does before the specs are made
        token = FullAttentionSpec(
            block_size=1,
            num_kv_heads=scenario["num_kv_heads"],
            head_size=HEAD_SIZE,
            dtype=DTYPES[scenario["kv_dtype"]],
        ).page_size_bytes
        block_size *= max(1, -(-4 * scenario["state_elements"] // (block_size * token)))
    cache_config = CacheConfig(block_size=block_size)
    cache_config.kv_cache_layout = "LBHNC"  # which the engine would choose for mixed layers
    cache_config.mamba_cache_mode = "align"
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=scenario["max_model_len"]
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=scenario["max_model_len"],
            is_encoder_decoder=False,
            max_num_batched_tokens=scenario["max_num_batched_tokens"],
            max_num_seqs=128,
            async_scheduling=scenario["async_scheduling"],
        ),
        cache_config=cache_config,
        device_config=DeviceConfig("cpu"),
    )
    workers = [
        {f"model.layers.{i}.attn": spec_of(scenario["layers"][i], scenario, block_size) for i in stage}
        for stage in stages(scenario["layers"], scenario["pp"])
    ]
    result = scenario | {
        "block_size_used": block_size,
        "tokens_in_flight": vllm_config.max_in_flight_tokens,
    }
    budgets = [scenario["budget_bytes"]] * len(workers)
    try:
        configs = get_kv_cache_configs(vllm_config, workers, budgets)
    except ValueError as error:
        if "to serve at least one request" not in str(error).lower():
            raise
        length = str(error).partition("estimated maximum model length is ")[2].split(".")[0]
        return result | {"refused": True, "longest": int(length or 0)}
    tokens, concurrency = get_kv_cache_capacity(vllm_config, configs[0])
    return result | {
        "refused": False,
        "num_blocks": configs[0].num_blocks,
        "num_groups": len(configs[0].kv_cache_groups),
        "max_concurrency": concurrency,
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder with the config.json of some small decoder")
    parser.add_argument("out")
    parser.add_argument("--scenarios", type=int, default=300)
    args = parser.parse_args()
    rows = [record(args.model, random_scenario(seed)) for seed in tqdm(range(args.scenarios))]
    with gzip.open(args.out, "wt", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    print(f"{len(rows)} scenarios, {sum(row['refused'] for row in rows)} refused")


if __name__ == "__main__":
    main()
