"""Replay recorded vLLM 0.30.0 scheduler traces, and compare every step with ours.

    python tests/parity/replay.py FILE[.gz] [--limit N]

One JSON object a line; the format is described in tests/parity/README.md. Exit code 0 without a divergence, 1 with
some, 2 if the file cannot be read as recorded scenarios.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.executors import TokenExecutor

from minivllm.core import Scheduler, SchedulerOutput
from minivllm.engine.args import EngineArgs, build_engine
from minivllm.engine.core import EngineCore
from minivllm.executor.base import ModelOutput
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


# Field -> the JSON types it may have.
SCENARIO = {"config": (dict,), "requests": (list,), "steps": (list,), "num_preemptions": (dict,), "outputs": (dict,)}
SCENARIO_OPTIONAL = {"aborts": (dict,), "resets": (dict,), "ends": (dict,), "eos_token_id": (int, type(None))}
CONFIG = {
    "max_model_len": (int,),
    "max_num_seqs": (int,),
    "max_num_batched_tokens": (int,),
    "policy": (str,),
    "enable_chunked_prefill": (bool,),
    "long_prefill_token_threshold": (int,),
    "scheduler_reserve_full_isl": (bool,),
    "num_blocks": (int,),
    "block_size": (int,),
    "enable_prefix_caching": (bool,),
    "watermark": (int, float),
}
REQUEST = {
    "id": (str,),
    "arrival_step": (int,),
    "family": (int,),
    "prefix_len": (int,),
    "prompt_len": (int,),
    "max_tokens": (int,),
    "priority": (int,),
    "cache_salt": (str, type(None)),
}
REQUEST_OPTIONAL = {"ignore_eos": (bool,), "stop_token_ids": (list,), "special_outputs": (dict,)}
STEP = {
    "step": (int,),
    "scheduled": (dict,),
    "preempted": (list,),
    "running": (list,),
    "waiting": (list,),
    "blocks": (dict,),
    "computed": (dict,),
    "free": (list,),
    "usage": (int, float),
    "finished": (list,),
    "free_after": (list,),
    "prefix": (dict,),
}


def check_fields(where: str, value: object, required: dict, optional: dict | None = None) -> None:
    if not isinstance(value, dict):
        raise NotATrace(f"{where}: {value!r:.60} is not a JSON object")
    missing = sorted(set(required) - set(value))
    if missing:
        raise NotATrace(f"{where}: no {', '.join(missing)}")
    for key, types in {**required, **(optional or {})}.items():
        if key in value and type(value[key]) not in types:  # not isinstance: true is no int here
            expected = " or ".join(t.__name__ for t in types)
            raise NotATrace(f"{where}: {key!r} is {value[key]!r:.60}, expected {expected}")


def check_scenario(where: str, scenario: object) -> None:
    """Raises NotATrace unless the scenario has the fields of the format, in their types."""
    check_fields(where, scenario, SCENARIO, SCENARIO_OPTIONAL)
    check_fields(f"{where}, config", scenario["config"], CONFIG)
    seen = set()
    for spec in scenario["requests"]:
        check_fields(f"{where}, requests", spec, REQUEST, REQUEST_OPTIONAL)
        if not (spec["id"].isascii() and spec["id"].isdigit()):
            raise NotATrace(f"{where}, requests: 'id' is {spec['id']!r:.60}, expected digits")
        if spec["id"] in seen:
            raise NotATrace(f"{where}, requests: id {spec['id']!r:.60} is there twice")
        seen.add(spec["id"])
    for index, step in enumerate(scenario["steps"]):
        check_fields(f"{where}, steps[{index}]", step, STEP)


def read_scenarios(path: Path) -> Iterator[dict]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    scenario = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise NotATrace(f"{path}, line {number}: not JSON ({error})") from None
                check_scenario(f"{path}, line {number}", scenario)
                yield scenario
    except (EOFError, zlib.error) as error:
        raise NotATrace(f"{path} is cut off or damaged ({error}): git restore tests/parity, or copy it again") from None
    except (OSError, UnicodeDecodeError) as error:
        raise NotATrace(f"{path}: {error}") from None


class RecordedTokens(TokenExecutor):
    """The tokens of a scenario: what the engine runs instead of a model. Looks at the scheduler as it does."""

    def __init__(self, specs: dict[str, dict]) -> None:
        super().__init__(lambda request_id, j: next_token(specs[request_id], j))
        self.scheduler: Scheduler | None = None
        self.observed: dict = {}

    def execute(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        self.observed = observe_schedule(self.scheduler, scheduler_output)
        return super().execute(scheduler_output)


def make_core(config: dict, executor: RecordedTokens) -> EngineCore:
    args = EngineArgs(
        max_model_len=config["max_model_len"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        scheduling_policy=config["policy"],
        enable_chunked_prefill=config["enable_chunked_prefill"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        scheduler_reserve_full_isl=config["scheduler_reserve_full_isl"],
        num_gpu_blocks_override=config["num_blocks"],
        block_size=config["block_size"],
        enable_prefix_caching=config["enable_prefix_caching"],
        watermark=config["watermark"],
    )
    core = build_engine(args, executor=executor, vocab_size=1).engine_core
    executor.scheduler = core.scheduler
    return core


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


def next_token(spec: dict, j: int) -> int:
    """Output token j of request i is 500000 + 1000 i + j, unless the scenario has a special one there."""
    return spec.get("special_outputs", {}).get(str(j), 500000 + 1000 * int(spec["id"]) + j)


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


def observe_schedule(scheduler: Scheduler, output: SchedulerOutput) -> dict:
    kv = scheduler.kv_cache_manager
    ids = list(output.num_scheduled_tokens)
    return {
        "scheduled": output.num_scheduled_tokens,
        "preempted": sorted(output.preempted_req_ids),
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
    specs = sorted(scenario["requests"], key=lambda spec: (spec["arrival_step"], int(spec["id"])))
    specs_by_id = {spec["id"]: spec for spec in specs}
    try:
        executor = RecordedTokens(specs_by_id)
        core = make_core(scenario["config"], executor)
        requests = {spec["id"]: make_request(spec, scenario.get("eos_token_id")) for spec in specs}
    except ValueError as error:
        raise NotATrace(f"scenario {name}: {str(error).replace('num_gpu_blocks_override', 'num_blocks')}") from None
    scheduler = core.scheduler
    arrived = 0
    for expected in scenario["steps"]:
        step = expected["step"]
        while arrived < len(specs) and specs[arrived]["arrival_step"] <= step:
            request = requests[specs[arrived]["id"]]
            try:
                core.add_request(request)
            except ValueError as error:  # vLLM took it
                return len(scenario["steps"]), [f"scenario {name}, step {step}, {request.request_id} refused: {error}"]
            arrived += 1
        observed = interventions(scheduler, scenario, step)
        finished = core.step().finished
        observed |= executor.observed
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


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--limit", type=at_least_one, metavar="N", help="only the first N scenarios")
    parser.add_argument("--check-invariants", action="store_true", help="after every step (slower)")
    args = parser.parse_args()
    try:
        report = replay(args.file, args.check_invariants, args.limit)
    except NotATrace as error:
        parser.error(f"{error} (the format: tests/parity/README.md)")
    if not report.scenarios:
        parser.error(f"{args.file} holds no scenarios")
    for line in report.divergences[:10]:
        print(line)
    print(report)
    return 1 if report.divergences else 0


if __name__ == "__main__":
    sys.exit(main())
