"""Replay recorded vLLM 0.30.0 scheduler traces, and compare every step with ours.

    python tests/parity/replay.py FILE[.gz] [--limit N]

One JSON object a line; the format is described in tests/parity/README.md. Exit code 0 only without a divergence.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core import Scheduler
from minivllm.request import Request, RequestStatus
from minivllm.sampling_params import SamplingParams


@dataclass
class Report:
    scenarios: int = 0
    steps: int = 0
    divergences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.scenarios} scenarios, {self.steps} steps, {len(self.divergences)} divergences"


class NotATrace(Exception):
    """The file cannot be read as recorded scenarios; says which line and why."""


def read_scenarios(path: Path) -> Iterator[dict]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    scenario = json.loads(line)
                except json.JSONDecodeError as error:
                    raise NotATrace(f"{path}, line {number}: not JSON ({error})") from None
                missing = {"config", "requests", "steps"} - set(scenario)
                if missing:
                    raise NotATrace(f"{path}, line {number}: no {', '.join(sorted(missing))}")
                yield scenario
    except (OSError, UnicodeDecodeError) as error:
        raise NotATrace(f"{path}: {error}") from None


def make_scheduler(config: dict) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_model_len=config["max_model_len"],
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            policy=config["policy"],
            enable_chunked_prefill=config["enable_chunked_prefill"],
            long_prefill_token_threshold=config["long_prefill_token_threshold"],
            scheduler_reserve_full_isl=config["scheduler_reserve_full_isl"],
        ),
        CacheConfig(
            num_blocks=config["num_blocks"],
            block_size=config["block_size"],
            enable_prefix_caching=config["enable_prefix_caching"],
            watermark=config["watermark"],
        ),
    )


def make_request(spec: dict, eos_token_id: int | None) -> Request:
    number = int(spec["id"])
    prefix = [1000 * spec["family"] + j for j in range(spec["prefix_len"])]
    rest = [100000 + 1000 * number + j for j in range(spec["prompt_len"] - spec["prefix_len"])]
    return Request(
        spec["id"],
        prefix + rest,
        SamplingParams(max_tokens=spec["max_tokens"]),
        arrival_time=float(number),
        priority=spec["priority"],
        cache_salt=spec["cache_salt"],
        eos_token_id=None if spec.get("ignore_eos", True) else eos_token_id,
        stop_token_ids=spec.get("stop_token_ids", ()),
    )


def next_token(request: Request, spec: dict) -> int:
    """Output token j of request i is 500000 + 1000 i + j, unless the scenario has a special one there."""
    j = request.num_output_tokens
    return spec.get("special_outputs", {}).get(str(j), 500000 + 1000 * int(request.request_id) + j)


def interventions(scheduler: Scheduler, scenario: dict, step: int) -> dict:
    """What a scenario does from outside before a step: aborts, then a reset of the prefix cache."""
    observed: dict = {}
    if "aborts" in scenario:
        aborted = []
        for request_id in scenario["aborts"].get(str(step), ()):
            aborted += scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
        observed["aborted"] = [request.request_id for request in aborted]
    if str(step) in scenario.get("resets", {}):
        observed["reset"] = scheduler.reset_prefix_cache(reset_running_requests=scenario["resets"][str(step)])
    return observed


def observe_schedule(scheduler: Scheduler, output) -> dict:
    kv = scheduler.kv_cache_manager
    ids = list(output.num_scheduled_tokens)
    return {
        "scheduled": output.num_scheduled_tokens,
        "preempted": sorted(request.request_id for request in output.preempted),
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "blocks": {request_id: kv.get_block_ids(request_id) for request_id in ids},
        "computed": {request_id: scheduler.requests[request_id].num_computed_tokens for request_id in ids},
        "free": [block.block_id for block in kv.block_pool.free_queue],
        "usage": round(kv.usage, 6),
    }


def observe_update(scheduler: Scheduler, finished: list[Request]) -> dict:
    kv = scheduler.kv_cache_manager
    stats = kv.take_prefix_cache_stats()
    return {
        "finished": sorted(request.request_id for request in finished),
        "free_after": [block.block_id for block in kv.block_pool.free_queue],
        "prefix": {
            "queries": stats.queries,
            "hits": stats.hits,
            "requests": stats.requests,
            "preempted_queries": stats.preempted_queries,
            "preempted_hits": stats.preempted_hits,
        },
    }


def differences(name: str, step: int, got: dict, expected: dict) -> list[str]:
    found = []
    for key, value in got.items():
        want = expected.get(key, "nothing: the trace lacks this field")
        if key == "usage" and not isinstance(want, str):
            same = abs(value - want) < 1e-6
        else:
            same = value == want and (not isinstance(value, dict) or key == "prefix" or list(value) == list(want))
        if not same:
            found.append(f"scenario {name}, step {step}, {key}: got {value}, expected {want}")
    return found


def replay_scenario(scenario: dict, check_invariants: bool = False) -> tuple[int, list[str]]:
    """Run one scenario; the number of steps, and what differs in the first step that differs."""
    name = str(scenario.get("seed", "?"))
    scheduler = make_scheduler(scenario["config"])
    specs = sorted(scenario["requests"], key=lambda spec: (spec["arrival_step"], int(spec["id"])))
    specs_by_id = {spec["id"]: spec for spec in specs}
    requests = {spec["id"]: make_request(spec, scenario.get("eos_token_id")) for spec in specs}
    arrived = 0
    for expected in scenario["steps"]:
        step = expected["step"]
        while arrived < len(specs) and specs[arrived]["arrival_step"] <= step:
            scheduler.add_request(requests[specs[arrived]["id"]])
            arrived += 1
        observed = interventions(scheduler, scenario, step)
        output = scheduler.schedule()
        observed |= observe_schedule(scheduler, output)
        sampled = [
            next_token(request, specs_by_id[request.request_id])
            if request.num_computed_tokens >= request.num_tokens
            else None
            for request in output.scheduled
        ]
        finished = scheduler.update_from_output(output, sampled)
        observed |= observe_update(scheduler, finished)
        if check_invariants:
            scheduler.kv_cache_manager.check_invariants()
        found = differences(name, step, observed, expected)
        if found:  # from here on everything differs: the first step is the one to read
            return len(scenario["steps"]), found
    totals = {
        "num_preemptions": {i: request.num_preemptions for i, request in requests.items()},
        "outputs": {i: request.num_output_tokens for i, request in requests.items()},
    }
    if "ends" in scenario:
        totals["ends"] = {i: [request.finish_reason, request.stop_reason] for i, request in requests.items()}
    found = [
        f"scenario {name}, at the end, {key}: got {value}, expected {scenario[key]}"
        for key, value in totals.items()
        if value != scenario[key]
    ]
    return len(scenario["steps"]), found


def replay(path: Path, check_invariants: bool = False, limit: int | None = None) -> Report:
    report = Report()
    for scenario in read_scenarios(path):
        if limit is not None and report.scenarios >= limit:
            break
        steps, found = replay_scenario(scenario, check_invariants)
        report.scenarios += 1
        report.steps += steps
        report.divergences += found
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--limit", type=int, help="only the first N scenarios")
    parser.add_argument("--check-invariants", action="store_true", help="after every step (slower)")
    args = parser.parse_args()
    try:
        report = replay(args.file, args.check_invariants, args.limit)
    except NotATrace as error:
        parser.error(str(error))
    if not report.scenarios:
        parser.error(f"{args.file} holds no scenarios")
    for line in report.divergences[:10]:
        print(line)
    print(report)
    return 1 if report.divergences else 0


if __name__ == "__main__":
    sys.exit(main())
