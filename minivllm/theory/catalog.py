"""Models and devices by name, with a source for every row (data/models.json, data/devices.json)."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from minivllm.resources import COMES_WITH, DATA, RESTORE
from minivllm.theory.dtypes import full_dtype
from minivllm.theory.model_spec import ModelSpec
from minivllm.units import GB, GIB


@dataclass(frozen=True)
class Device:
    """An accelerator. Bandwidths in decimal GB/s, rates in dense TFLOP/s (10^12; never with sparsity)."""

    name: str
    title: str
    memory_bandwidth_gb_s: float
    dense_tflop_s: dict[str, float]
    memory_label_gb: float = 0
    memory_reported_gib: float | None = None
    interconnect_gb_s: float | None = None
    vendor: str = ""
    aliases: tuple[str, ...] = ()
    source: str = ""
    reported_source: str = ""
    note: str = field(default="", compare=False)

    @property
    def memory_bytes(self) -> float:
        """What the driver reports where that is known, otherwise the label, read as GB."""
        return self.memory_label_gb * GB if self.memory_reported_gib is None else self.memory_reported_gib * GIB

    @property
    def bandwidth(self) -> float:
        """B/s."""
        return self.memory_bandwidth_gb_s * GB

    def flop_s(self, dtype: str = "bfloat16") -> float:
        """Dense FLOP/s of matrix products in that dtype. ValueError if the device has no such rate."""
        key = full_dtype(dtype)
        if key == "bfloat16" and key not in self.dense_tflop_s:
            key = "float16"  # older GPUs: models are run in float16 there
        if key not in self.dense_tflop_s:
            known = ", ".join(self.dense_tflop_s) or "none, its maker publishes no rates"
            raise ValueError(f"{self.title} has no rate for {dtype!r}; known: {known}")
        return self.dense_tflop_s[key] * 1e12


@functools.cache
def _rows(file: str) -> tuple[dict[str, Any], ...]:
    path = DATA / file
    if not path.is_file():
        raise ValueError(f"the catalogue comes with {COMES_WITH}, in {path}, and is not there: {RESTORE}")
    return tuple(json.loads(path.read_text(encoding="utf-8")))


def list_models() -> list[ModelSpec]:
    return [_model(row) for row in _rows("models.json")]


def list_devices() -> list[Device]:
    return [_device(row) for row in _rows("devices.json")]


def find_model(name: str) -> ModelSpec:
    """The model of that name (or hub id), upper or lower case. ValueError lists the closest names."""
    rows = _rows("models.json")
    names = {row["hub_id"]: row for row in rows if row["hub_id"]} | {row["name"]: row for row in rows}
    return _model(_find(name, names, "model"))


def find_device(name: str) -> Device:
    """The device of that name or alias, upper or lower case. ValueError lists the closest names."""
    rows = _rows("devices.json")
    names = {alias: row for row in rows for alias in row.get("aliases", ())} | {row["name"]: row for row in rows}
    return _device(_find(name, names, "device"))


def model_source(name: str) -> tuple[str, str]:
    """Where the model's config and its parameter count are from."""
    row = next(row for row in _rows("models.json") if row["name"] == find_model(name).name)
    return row["source"], row["parameters_source"]


def _model(row: dict[str, Any]) -> ModelSpec:
    spec = ModelSpec.from_hf(row["config"], row["name"])
    return replace(
        spec, published_parameters=row["parameters"], published_active_parameters=row.get("active_parameters")
    )


def _device(row: dict[str, Any]) -> Device:
    return Device(**{**row, "aliases": tuple(row.get("aliases", ()))})


def _find(name: str, rows: dict[str, dict[str, Any]], kind: str) -> dict[str, Any]:
    key = plain_name(name)
    plain = {plain_name(known): row for known, row in rows.items()}
    if key in plain:
        return plain[key]
    # Qwen/Qwen2.5-7B-Instruct is no other size than qwen2.5-7b, but may be another length: say so, do not guess.
    last = plain_name(name.rpartition("/")[2])
    within = sorted((known for known in plain if last.startswith(known)), key=len, reverse=True)
    close = within[:1] + [known for known in plain if key and known.startswith(key)]
    close += difflib.get_close_matches(key, plain, n=5, cutoff=0.5) or list(_starting_alike(key, plain))
    close = list(dict.fromkeys(plain[match]["name"] for match in close))[:6]
    hint = f"closest: {', '.join(close)}; all" if close else "known names"
    raise ValueError(f"unknown {kind} {name[:40]!r}; {hint}: python -m minivllm catalog")


def plain_name(name: str) -> str:
    """Qwen2.5_7B and qwen2.5-7b are the same name, and so are GPT-2 and gpt2."""
    if not isinstance(name, str):
        raise ValueError(f"a name is a text; this is {name!r}")
    return re.sub(r"[\s_-]+", "", name.lower())


def _starting_alike(key: str, names: Iterable[str]) -> Iterable[str]:
    return (name for name in names if key[:3] and name.startswith(key[:3]))
