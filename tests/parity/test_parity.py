"""Every recorded vLLM 0.30.0 step matches, block id for block id; and the comparison can fail."""

from __future__ import annotations

import copy
import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from replay import NotATrace, main, read_scenarios, replay, replay_scenario

HERE = Path(__file__).parent
TRACES = HERE / "vllm030_examples.jsonl.gz"
ENDS = HERE / "vllm030_ends.jsonl.gz"


def test_all_recorded_scenarios_match_with_invariants_after_every_step():
    report = replay(TRACES, check_invariants=True)
    assert str(report) == "60 scenarios, 6966 steps, 0 divergences", report.divergences[:3]


def test_ends_aborts_and_resets_match():
    report = replay(ENDS, check_invariants=True)
    assert str(report) == "120 scenarios, 6406 steps, 0 divergences", report.divergences[:3]


def test_the_second_file_holds_what_the_first_lacks():
    ends, resets, aborted = Counter(), Counter(), 0
    for scenario in read_scenarios(ENDS):
        specs = {spec["id"]: spec for spec in scenario["requests"]}
        for request_id, (reason, stop_reason) in scenario["ends"].items():
            by_length = scenario["outputs"][request_id] < specs[request_id]["max_tokens"]
            ends[reason, stop_reason is not None, reason == "length" and by_length] += 1
        for step in scenario["steps"]:
            aborted += len(step["aborted"])
            if "reset" in step:
                resets[step["reset"]] += 1
    assert ends["stop", False, False] > 20  # EOS
    assert ends["stop", True, False] > 20  # a stop token
    assert ends["length", False, True] > 20  # max_model_len
    assert aborted > 50 and resets[True] > 20 and resets[False] > 20


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("scheduled", lambda v: {k: n + 1 for k, n in v.items()}),
        ("scheduled", lambda v: dict(reversed(v.items()))),  # the order counts too
        ("blocks", lambda v: {k: [*ids, 99] for k, ids in v.items()}),
        ("computed", lambda v: {k: n + 1 for k, n in v.items()}),
        ("running", lambda v: v[::-1]),
        ("waiting", lambda v: [*v, "99"]),
        ("free", lambda v: v[::-1]),
        ("free_after", lambda v: v[::-1]),
        ("usage", lambda v: v + 0.001),
        ("preempted", lambda v: [*v, "99"]),
        ("finished", lambda v: [*v, "99"]),
        ("prefix", lambda v: {**v, "hits": v["hits"] + 1}),
    ],
)
def test_a_changed_field_is_reported_with_its_step(field, change):
    scenario = copy.deepcopy(next(read_scenarios(TRACES)))
    at = next(s for s in scenario["steps"] if len(s["scheduled"]) > 1 and len(s["free"]) > 1)
    at[field] = change(at[field])
    _, found = replay_scenario(scenario)
    assert [line.split(":")[0] for line in found] == [f"scenario {scenario['seed']}, step {at['step']}, {field}"]


def test_changed_totals_are_reported():
    scenario = copy.deepcopy(next(read_scenarios(TRACES)))
    scenario["num_preemptions"]["0"] += 1
    _, found = replay_scenario(scenario)
    assert len(found) == 1 and "at the end, num_preemptions" in found[0]


def run_replay(path: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(HERE / "replay.py"), str(path), *options], capture_output=True, text=True
    )


def test_command_line(tmp_path):
    scenario = next(read_scenarios(TRACES))
    good = tmp_path / "good.jsonl"
    good.write_text(json.dumps(scenario) + "\n\n")
    done = run_replay(good)
    assert (done.returncode, done.stdout.strip()) == (0, f"1 scenarios, {len(scenario['steps'])} steps, 0 divergences")

    scenario["steps"][3]["free"] = []
    bad = tmp_path / "bad.jsonl.gz"
    with gzip.open(bad, "wt") as file:
        file.write(json.dumps(scenario))
    done = run_replay(bad)
    assert done.returncode == 1 and "step 3, free: got [" in done.stdout and "expected []" in done.stdout
    assert done.stdout.strip().endswith("1 divergences")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no scenarios"),
        ("{not json", "line 1: not JSON"),
        ('{"config": {}}', "line 1: no num_preemptions"),
        ("5", "line 1: 5 is not a JSON object"),
        ("null", "line 1: None is not a JSON object"),
        ("[" * 10**5, "line 1: not JSON"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, content, message):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    done = run_replay(path)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_gz_is_refused(tmp_path, damage):
    content = bytearray(gzip.compress(gzip.decompress(TRACES.read_bytes())))
    if damage == "cut":
        content = content[: len(content) // 2]
    else:
        content[10] = 0xFF  # right after the header: a block of a type that does not exist
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(content)
    done = run_replay(path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "x.jsonl.gz is cut off or damaged" in done.stderr and "git restore tests/parity" in done.stderr


def drop(*path):
    def change(scenario):
        for key in path[:-1]:
            scenario = scenario[key]
        del scenario[path[-1]]

    return change


def put(value, *path):
    def change(scenario):
        for key in path[:-1]:
            scenario = scenario[key]
        scenario[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("config", "watermark"), "line 1, config: no watermark"),
        (put(None, "config"), "line 1: 'config' is None, expected dict"),
        (put("many", "config", "num_blocks"), "line 1, config: 'num_blocks' is 'many', expected int"),
        (put(1, "config", "num_blocks"), "scenario .*: num_blocks must be a whole number of at least 2"),
        (drop("outputs"), "line 1: no outputs"),
        (drop("num_preemptions"), "line 1: no num_preemptions"),
        (put([3], "requests"), "line 1, requests: 3 is not a JSON object"),
        (put("a", "requests", 0, "id"), "line 1, requests: 'id' is 'a', expected digits"),
        (put(0, "requests", 0, "id"), "line 1, requests: 'id' is 0, expected str"),
        (put("1", "requests", 0, "id"), "line 1, requests: id '1' is there twice"),
        (put(0, "requests", 0, "max_tokens"), "scenario .*: max_tokens must be a whole number of at least 1"),
        (put(None, "steps", 2, "usage"), r"line 1, steps\[2\]: 'usage' is None, expected int or float"),
        (drop("steps", 2, "step"), r"line 1, steps\[2\]: no step"),
    ],
)
def test_fields_that_do_not_fit_are_named(tmp_path, change, message, monkeypatch, capsys):
    scenario = copy.deepcopy(next(read_scenarios(TRACES)))
    change(scenario)
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(scenario))
    with pytest.raises(NotATrace, match=message):
        replay(path)
    monkeypatch.setattr(sys, "argv", ["replay.py", str(path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert len(capsys.readouterr().err.strip().splitlines()) <= 4  # the usage, and one line


def test_a_request_that_vllm_took_and_we_refuse_is_a_divergence():
    scenario = copy.deepcopy(next(read_scenarios(TRACES)))
    scenario["config"]["num_blocks"] = 3
    _, found = replay_scenario(scenario)
    assert len(found) == 1 and "step 0, 0 refused: Request '0' can grow to" in found[0]


@pytest.mark.parametrize("limit", ["0", "-1", "x"])
def test_a_limit_below_1_is_refused(limit):
    done = run_replay(TRACES, f"--limit={limit}")
    assert done.returncode == 2 and f"must be a whole number of at least 1, got '{limit}'" in done.stderr


def test_a_missing_file_is_refused(tmp_path):
    done = run_replay(tmp_path / "none.jsonl")
    assert done.returncode == 2 and "none.jsonl" in done.stderr and "Traceback" not in done.stderr


# Blocking torch and numpy shows that the core is standard library only. The time is processor time of a fresh
# interpreter: on an idle machine that is what one waits, and other processes do not disturb it.
WITHOUT_TORCH = """
import sys, time
sys.modules["torch"] = sys.modules["numpy"] = None
start = time.process_time()
import minivllm, minivllm.core
print((time.process_time() - start) * 1000)
sys.argv = ["replay.py", {path!r}]
sys.path.insert(0, {here!r})
import replay
sys.exit(replay.main())
"""


def test_without_torch_and_numpy_the_core_imports_fast_and_replays():
    code = WITHOUT_TORCH.format(path=str(TRACES), here=str(HERE))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    milliseconds, report = done.stdout.strip().splitlines()
    assert report == "60 scenarios, 6966 steps, 0 divergences"
    assert float(milliseconds) < 150
