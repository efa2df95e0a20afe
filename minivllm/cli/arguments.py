"""Options that several commands take, and numbers within bounds."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivllm.theory.catalog import find_model
from minivllm.theory.model_spec import ModelSpec
from minivllm.theory.sizing import WEIGHT_BITS

LARGEST = 10**9  # of any number on the command line


def add_model_and_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a name that `catalog` lists, or its hub id")
    parser.add_argument("--config", metavar="PATH", help="instead of --model: a config.json, or the folder it is in")
    parser.add_argument("--gpu", required=True, help="a name that `catalog` lists, such as h100-sxm")
    parser.add_argument("--tp", type=count, default=1, help="GPUs that share every layer (default 1)")
    parser.add_argument(
        "--kv-dtype", default="auto", help="auto, fp8, int8, int4, q8_0 ..., with their scales (default: the model's)"
    )
    parser.add_argument("--weight-dtype", default="auto", help=f"auto, {', '.join(WEIGHT_BITS)}")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON, with units in the names")
    output.add_argument("--explain", action="store_true", help="also print the formulas with their terms filled in")


def chosen_model(args: argparse.Namespace) -> ModelSpec:
    """ValueError unless exactly one of --model and --config is given, and names a model."""
    if (args.model is None) == (args.config is None):
        raise ValueError("give either --model NAME or --config PATH")
    return find_model(args.model) if args.config is None else ModelSpec.from_file(Path(args.config))


def _parser_of(kind: Callable[[str], Any], what: str, least: float = 1e-300) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text.replace("_", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what}") from None
        if not least <= value <= LARGEST:
            raise argparse.ArgumentTypeError(f"{text[:40]} is not {what}")
        return value

    return parse


count = _parser_of(int, f"a whole number from 1 to {LARGEST:,}")
number = _parser_of(float, f"a positive number of at most {LARGEST:,}")
number_or_0 = _parser_of(float, f"a number from 0 to {LARGEST:,}", least=0)
