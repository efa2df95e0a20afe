"""The program `minivllm`: finds the command, runs it, and turns what went wrong into one line and an exit code."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import minivllm
from minivllm.cli.text import escaped

COMMANDS = {  # each is the module of that name; only the one that is asked for is imported
    "doctor": "is this machine ready for the book? (exit code 0 only if so)",
    "size": "how many requests of a model fit on a GPU, and what limits them",
    "roofline": "how fast prefill and decode can be at best, and what bounds them",
    "catalog": "the models and GPUs that are known by name",
    "drill": "napkin questions of an interview, with a score",
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {escaped(message)} (--help lists what it takes)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. No command prints the help, an unknown one is an error (exit code 2)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _Parser(prog=_called(), description="A miniature vLLM, and the book that builds it: Inside LLM Inference.")
    parser.add_argument("--version", action="version", version=f"minivllm {minivllm.__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what)
        if name == asked:
            module = importlib.import_module(f"minivllm.cli.{name}")
            module.configure(command)
            command.set_defaults(run=module.run)
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    try:
        return chosen.run(chosen)
    except ValueError as error:
        print(f"minivllm {chosen.command}: {escaped(' '.join(str(error).split()))}", file=sys.stderr)
        return 2


def _called() -> str:
    """What the user typed: the installed program, or Python's way to it."""
    return "minivllm" if Path(sys.argv[0]).stem == "minivllm" else "python -m minivllm"


def console() -> int:
    """`main` with a terminal's surroundings. Output that cannot be written is exit code 1; --help and errors in the
    arguments end here too, so that their output is flushed."""
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ✓ shows ?
    code: Any  # what sys.exit was given, as a rule a number
    try:
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
        if sys.stdout is not None:  # closed before the program began
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        code = _give_up_output()
    except OSError as error:
        if error.filename is not None:  # some other file than the output
            raise
        with contextlib.suppress(OSError):
            print(f"minivllm: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        code = _give_up_output()
    return code


def _give_up_output() -> int:
    """Python flushes once more at the end, and that must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
