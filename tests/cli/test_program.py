"""The program around the commands: what it imports, what it prints where, and what it does if it cannot."""

import json
import os
import re
import subprocess
import sys

import pytest

from minivllm.cli import program
from minivllm.cli.text import escaped

SIZE = ["size", "--model", "qwen2.5-7b", "--gpu", "h100-sxm"]
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


def run(*arguments, flags=(), **options):
    """With buffers: without them argparse itself says nothing of a help text that cannot be written."""
    command = [sys.executable, *flags, "-m", "minivllm", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, env=environment, **options)


@pytest.mark.parametrize(
    ("arguments", "others"),
    [
        (SIZE, "doctor|drills|roofline"),
        (["catalog"], "doctor|drills|roofline"),
        (["drill", "--count", "1"], "doctor|plan"),
    ],
    ids=lambda value: value[0],
)
def test_a_command_imports_what_it_needs(arguments, others):
    done = run(*arguments, flags=["-X", "importtime"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    found = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert done.returncode == 0 and "minivllm.theory.catalog" in found
    unwanted = re.compile(rf"(torch|numpy|matplotlib|tokenizers)\b|minivllm\.\w+\.({others})\b|minivllm\.({others})\b")
    assert [name for name in found if unwanted.match(name)] == []


@pytest.mark.parametrize("arguments", [["catalog"], ["catalog", "h100"], ["--help"], ["size", "--help"]], ids=str)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_one_line(arguments):
    """Long output fails while it is printed, short output when it is flushed at the end."""
    with open("/dev/full", "w") as full:
        done = run(*arguments, stdout=full)
    assert done.returncode == 1
    assert done.stderr == "minivllm: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", [["catalog"], ["--help"]], ids=str)
def test_a_reader_that_has_seen_enough_is_no_error(arguments):
    read, write = os.pipe()
    os.close(read)
    done = run(*arguments, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_a_closed_output_is_no_error():
    command = f"exec '{sys.executable}' -m minivllm catalog h100 >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_name_that_was_called(monkeypatch, capsys):
    for called, name in (("/bin/minivllm", "minivllm"), ("/lib/minivllm/__main__.py", "python -m minivllm")):
        monkeypatch.setattr(sys, "argv", [called, "nonsense"])
        assert program.console() == 2
        assert capsys.readouterr().err.startswith(f"{name}: argument COMMAND: invalid choice: 'nonsense'")


def test_every_command_is_listed(capsys):
    assert program.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"    {name}" in out for name in program.COMMANDS)


class TestNothingThatATerminalObeys:
    """Names and settings of a checkpoint are somebody else's text."""

    def said(self, capsys, *arguments):
        code = program.main([*arguments, "--gpu", "h100-sxm"])
        out, err = capsys.readouterr()
        assert all(char.isprintable() or char == "\n" for char in out + err)
        return code, out + err

    @pytest.mark.parametrize("command", ["size", "roofline"])
    @pytest.mark.parametrize("more", [[], ["--explain"]], ids=str)
    def test_a_folder_s_name(self, capsys, tmp_path, command, more):
        folder = tmp_path / "\x1b]0;title\x07\u202e\nLimit: none\x9b31m"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        code, text = self.said(capsys, command, "--config", str(folder), *more)
        assert code == 0 and r"\x1b]0;title\x07\u202e\nLimit: none\x9b31m" in text
        assert program.main([command, "--config", str(folder), "--gpu", "h100-sxm", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["model"] == folder.name

    def test_a_setting(self, capsys, tmp_path):
        for name, value in (("model_type", "x\x1b[2J"), ("torch_dtype", "\x1b[2J"), ("hidden_size", "\x1b[2J")):
            (tmp_path / "config.json").write_text(json.dumps(CONFIG | {name: value}))
            for command in ("size", "roofline"):
                assert r"\x1b[2" in self.said(capsys, command, "--config", str(tmp_path))[1]

    def test_what_is_left_alone(self):
        assert escaped("Qwen2.5 · µs ✓ 模型") == "Qwen2.5 · µs ✓ 模型"
        assert escaped("a\tb\udcff") == r"a\tb\udcff"
