"""The built wheel, in an environment of its own: the calculators without torch, the engine with it, all files."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from pathlib import Path

import pytest

from tools.notebooks import ROOT

PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
CALCULATORS = [
    (["size", "--model", "qwen2.5-7b", "--gpu", "h100-sxm"], "57,344 B = 56.00 KiB"),
    (["roofline", "--model", "qwen2.5-7b", "--gpu", "h100-sxm"], "ridge point: 295 FLOP/B"),
    (["drill", "--count", "1", "--seed", "1"], "Score: 0 of 0"),
    (["catalog", "h100"], "3,350 GB/s"),
]


def checked(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since building leaves folders in the source."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "LICENSE-text"):
        shutil.copy(ROOT / name, source)
    for name in ("minivllm", "data"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    checked([*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(out), str(source)])
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of the programs of a new environment that holds the wheel and nothing else, not even pip."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    checked(
        [*PIP[:3], "--python", str(programs / "python"), *PIP[3:], "install", "--no-deps", "--no-index", str(wheel)]
    )
    return programs


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Another folder than the repository, and no way to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)


def test_what_is_in_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names} == {"minivllm", "inside_llm_inference-0.1.0.dist-info"}
    data = {str(path.relative_to(ROOT)) for path in (ROOT / "data").rglob("*") if path.is_file()}
    files = {name for name in data if not name.endswith((".py", ".pyc"))}
    assert {name for name in names if name.startswith("minivllm/data/")} == {f"minivllm/{name}" for name in files}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "minivllm").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules


@pytest.mark.parametrize("arguments, text", CALCULATORS, ids=lambda value: value[0])
def test_the_calculators_need_nothing_else(installed, elsewhere, arguments, text):
    assert text in checked([installed / "minivllm", *arguments], stdin=subprocess.DEVNULL)
    assert text in checked([installed / "python", "-m", "minivllm", *arguments], stdin=subprocess.DEVNULL)


def test_it_stands_alone(installed, elsewhere):
    code = (
        "import importlib.util as u, json, minivllm.resources as r; "
        "print(json.dumps([[n for n in ('torch', 'numpy', 'data') if u.find_spec(n)], r.IS_INSTALLED, str(r.DATA)]))"
    )
    others, is_installed, data = json.loads(checked([installed / "python", "-c", code]))
    assert others == [] and is_installed and Path(data).is_relative_to(installed.parent)


def test_what_the_engine_needs_is_said(installed, elsewhere):
    """By the import, by `roofline --plot` and by the doctor, in one line each."""

    def said(*command):
        done = subprocess.run([installed / command[0], *command[1:]], capture_output=True, text=True, timeout=60)
        assert done.returncode
        return (done.stdout + done.stderr).splitlines()

    way_out = "which is not installed: pip install 'inside-llm-inference[engine]'"
    assert said("python", "-c", "from minivllm import LLM")[-1] == f"ModuleNotFoundError: LLM needs torch, {way_out}"
    plot = [*CALCULATORS[1][0], "--plot", "roof.png"]
    way_out = "which is not installed: pip install 'inside-llm-inference[book]'"
    assert said("minivllm", *plot)[-1] == f"minivllm roofline: --plot needs matplotlib, {way_out}"
    report = said("minivllm", "doctor")
    assert report[-1].endswith("→ pip install 'inside-llm-inference[book]'")
    assert not [line for line in report if "requirements.txt" in line]


def test_a_call_is_quick(installed, elsewhere, cpu_seconds):
    start = time.perf_counter()
    checked([installed / "minivllm", *CALCULATORS[0][0]])
    print(f"minivllm size: {time.perf_counter() - start:.2f} s, {cpu_seconds():.2f} s of the processor")
    assert cpu_seconds() < 1


def test_the_engine_finds_its_model(installed, elsewhere, monkeypatch):
    """With the packages of this environment, but the wheel's minivllm: .pth files, such as that of an editable
    install, do not count in PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", sysconfig.get_path("purelib"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = (
        "import minivllm; from minivllm import LLM, SamplingParams; "
        "params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True); "
        "print(minivllm.__file__, len(LLM('tiny').generate('Once', params, use_tqdm=False)[0].outputs[0].token_ids))"
    )
    file, count = checked([installed / "python", "-c", code]).splitlines()[-1].rsplit(maxsplit=1)
    assert Path(file).is_relative_to(installed.parent) and count == "5"
