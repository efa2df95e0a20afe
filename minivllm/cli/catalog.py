"""`minivllm catalog`: the models and GPUs that are known by name."""

from __future__ import annotations

import argparse

from minivllm.theory.catalog import list_devices, list_models, plain_name
from minivllm.theory.plan import as_served
from minivllm.theory.sizing import kv_bytes_per_token
from minivllm.units import GIB


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", default="", help="only names that contain this")


def run(args: argparse.Namespace) -> int:
    """ValueError if no name contains the text."""
    text = plain_name(args.text)
    models = [as_served(model) for model in list_models() if text in plain_name(model.name)]
    devices = [device for device in list_devices() if text in plain_name(device.name)]
    if not models and not devices:
        raise ValueError(f"no model or GPU has {args.text[:40]!r} in its name; without a word, all are listed")
    if models:
        print(f"{'model':20}{'parameters':>12}{'KV per token':>14}{'context':>10}")
    for model in models:
        billions, kib = model.parameters / 1e9, kv_bytes_per_token(model) / 1024
        print(f"{model.name:20}{billions:>10.2f} B{kib:>10.1f} KiB{model.max_position_embeddings:>10,}")
    if models and devices:
        print()
    if devices:
        print(f"{'device':20}{'memory':>12}{'bandwidth':>14}{'bfloat16':>16}")
    for device in devices:
        rate = f"{device.flop_s() / 1e12:,.0f} TFLOP/s" if device.dense_tflop_s else "not published"
        memory = f"{device.memory_bytes / GIB:,.1f} GiB"
        print(f"{device.name:20}{memory:>12}{device.memory_bandwidth_gb_s:>9,.0f} GB/s{rate:>16}")
    return 0
