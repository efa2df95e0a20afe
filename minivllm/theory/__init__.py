"""Formulas of LLM inference, with units, and the data behind them: how much memory, and how fast at best.

Standard library only, so that it runs wherever Python does. `catalog` knows models and devices by name, `ModelSpec`
is what a config.json says about sizes (`hf_config` reads it), `dtypes` what an element takes; `sizing` turns memory
into tokens, `roofline` operations and bytes into time; `kv_layout`, `plan` and `ways_out` plan a server, `step_model`
predicts the steps of a machine that was measured.
What they return is a `Quantity`: a number that can say how it came about.
"""

from minivllm.theory.catalog import Device, find_device, find_model, list_devices, list_models
from minivllm.theory.model_spec import ModelSpec
from minivllm.theory.quantity import Quantity
from minivllm.units import GB, GIB

__all__ = ["GB", "GIB", "Device", "ModelSpec", "Quantity", "find_device", "find_model", "list_devices", "list_models"]
