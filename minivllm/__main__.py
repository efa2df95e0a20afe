"""Command line: `python -m minivllm COMMAND`."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import minivllm
from minivllm.commands import add_parsers


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists what it takes)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. No command prints the help, an unknown one is an error (exit code 2)."""
    parser = _Parser(
        prog="python -m minivllm", description="A miniature vLLM, and the book that builds it: Inside LLM Inference."
    )
    parser.add_argument("--version", action="version", version=f"minivllm {minivllm.__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    commands.add_parser("doctor", help="is this machine ready for the book? (exit code 0 only if so)")
    add_parsers(commands)
    chosen = parser.parse_args(arguments)
    if chosen.command == "doctor":
        from minivllm.doctor import main as doctor

        return doctor()
    if chosen.command is not None:
        try:
            return chosen.run(chosen)
        except ValueError as error:
            print(f"minivllm {chosen.command}: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
    parser.print_help()
    return 0


def console() -> int:
    """The program: `main` with a terminal's surroundings. Both `minivllm` and `python -m minivllm` run it."""
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ✓ shows ?
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; Python's own last flush must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(console())
